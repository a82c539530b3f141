// Gradients of single examples and their weighted sum, for kernel.cpp.
//
// The caller turns the amounts that an example's norms are made of into factors, and the numbers that were measured are the ones
// that are added: in double, so that nothing overflows or vanishes in between.

// Calls f(where in packed memory, its length, layer of the layer table) for every weight and bias.
// columns: layers of the weight and of the bias of every op.
template <class F> static void tensors(const Layer* layers, I count, const I* columns, F f) {
    for (I i = 0; i < count; i++) {
        const Layer& l = layers[i];
        if (l.o.kind != CONVOLUTION) continue;
        const I weights = l.panels * l.taps * 16;
        f(l.packed, weights, columns[2 * i]);
        if (l.o.bias >= 0) f(l.packed + weights, l.panels * 16, columns[2 * i + 1]);
    }
}

static double amount(const float* g, I size, I order) {  // sum of absolute values (order 1) or squares
    double sums[16] = {}, total = 0;
    if (order == 1)
        for (I i = 0; i < size; i += 16)
            for (int j = 0; j < 16; j++) sums[j] += std::fabs((double)g[i + j]);
    else
        for (I i = 0; i < size; i += 16)
            for (int j = 0; j < 16; j++) sums[j] += (double)g[i + j] * (double)g[i + j];
    for (int j = 0; j < 16; j++) total += sums[j];
    return total;
}

extern "C" {

// Floats of one example's packed gradient.
I fedlgm_packed(const Op* ops, I count) {
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    return lay_out(ops, count, 1, layers, memory);
}

// Writes the gradients of the examples x[0:n], [n, packed], and adds the amounts of their norms to [n, width].
// area: what fedlgm_workspace asks for with a batch of n.
void fedlgm_examples(const Op* ops, I count, const float* x, const void* targets, I n, I loss, const float* model, const I* columns,
                     I width, I order, const I* rows, float* gradients, double* amounts, float* area) {
    Layer layers[MOST] = {};
    Memory memory = {area, 0};
    I size;
    const float* w = begin(ops, count, n, model, layers, memory, size);
    gather(layers[0], x, rows, n);
    differentiate(layers, count, w, gradients, n, loss, targets, rows, size);
    for (I i = 0; i < n; i++)
        tensors(layers, count, columns, [&](I first, I length, I column) {
            amounts[i * width + column] += amount(gradients + i * size + first, length, order);
        });
}

// Adds factors [n, width] times gradients [n, packed] to `sums`, [packed]; a factor of zero adds nothing, whatever the gradient.
void fedlgm_add(const Op* ops, I count, const float* gradients, I n, const I* columns, I width, const double* factors, double* sums) {
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    const I size = lay_out(ops, count, 1, layers, memory);
    for (I i = 0; i < n; i++)
        tensors(layers, count, columns, [&](I first, I length, I column) {
            const double factor = factors[i * width + column];
            if (factor == 0) return;
            const float* g = gradients + i * size + first;
            double* to = sums + first;
            for (I k = 0; k < length; k += 16)
                for (int j = 0; j < 16; j++) to[k + j] += factor * (double)g[k + j];
        });
}

// Writes packed sums in the order of the model.
void fedlgm_unpack(const Op* ops, I count, const double* sums, double* total) {
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    lay_out(ops, count, 1, layers, memory);
    each(layers, count, [&](I packed, I flat) { total[flat] = sums[packed]; });
}
}
