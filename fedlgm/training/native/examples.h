// Gradients of single examples and their weighted sum, for kernel.cpp.
//
// The caller turns the amounts that an example's norms are made of into factors, and the numbers that were measured are the ones
// that are added: in double, so that nothing overflows or vanishes in between. The gradient of a layer with one position is the
// outer product of its input and its output's gradient: it is measured and added without being made.

// Calls f(layer, column of its weight, column of its bias). columns: layers of the layer table, of the weight and bias of every op.
template <class F> static void own(const Layer* layers, I count, const I* columns, F f) {
    for (I i = 0; i < count; i++)
        if (layers[i].o.kind == CONVOLUTION) f(layers[i], columns[2 * i], columns[2 * i + 1]);
}

static double amount(const float* g, I size, I order) {  // sum of absolute values (order 1) or squares
    double sums[16] = {}, total = 0;
    I i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += order == 1 ? std::fabs((double)g[i + j]) : (double)g[i + j] * (double)g[i + j];
    for (int j = 0; i + j < size; j++) sums[j] += order == 1 ? std::fabs((double)g[i + j]) : (double)g[i + j] * (double)g[i + j];
    for (int j = 0; j < 16; j++) total += sums[j];
    return total;
}

static void add_kept(double* sums, const float* g, I size, double factor) {
    if (factor == 0) return;  // also of what is not finite
    for (I i = 0; i < size; i += 16)
        for (int j = 0; j < 16; j++) sums[i + j] += factor * (double)g[i + j];
}

typedef double D __attribute__((vector_size(64)));  // one register with AVX-512, two with AVX2

// sums[k] += x[k] times factor dy, example after example: two inputs by 16 outputs in registers.
static void add_products(double* sums, const Layer& l, const double* factors, I n, I width, double* scaled) {
    const I outputs = l.o.oc;
    for (I p = 0; p < l.panels; p++, sums += l.taps * 16) {
        const I lanes = least(16, outputs - 16 * p);
        for (I i = 0; i < n; i++)
            for (I j = 0; j < 16; j++) scaled[16 * i + j] = j < lanes ? factors[i * width] * (double)l.dy[i * outputs + 16 * p + j] : 0;
        for (I k = 0; k < l.taps; k += 2) {
            const bool two = k + 1 < l.taps;
            double spare[16] = {}, *to[2] = {sums + 16 * k, two ? sums + 16 * (k + 1) : spare};
            D a[2][2];
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int q = 0; q < 2; q++) memcpy(&a[r][q], to[r] + 8 * q, sizeof(D));
            for (I i = 0; i < n; i++) {
                if (factors[i * width] == 0) continue;
                const float* x = l.padded + i * l.image + k;
                const double first = x[0], second = two ? x[1] : 0;
                UNROLL for (int q = 0; q < 2; q++) {
                    D h;
                    memcpy(&h, scaled + 16 * i + 8 * q, sizeof(D));
                    a[0][q] += first * h;
                    a[1][q] += second * h;
                }
            }
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int q = 0; q < 2; q++) memcpy(to[r] + 8 * q, &a[r][q], sizeof(D));
        }
    }
}

extern "C" {

// Numbers of the packed parameters, and of what is kept of one example's gradient.
void fedlgm_sizes(const Op* ops, I count, I* sizes) {
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    sizes[0] = lay_out(ops, count, 1, layers, memory, sizes[1]);
}

// Prepares the gradients of the examples x[0:n], [n, kept], and adds the amounts of their norms to [n, width].
// area: what fedlgm_workspace asks for with a batch of n.
void fedlgm_examples(const Op* ops, I count, const float* x, const void* targets, I n, I loss, const float* model, const I* columns,
                     I width, I order, const I* rows, float* gradients, double* amounts, float* area) {
    Layer layers[MOST] = {};
    Memory memory = {area, 0};
    I size, kept;
    const float* w = begin(ops, count, n, model, layers, memory, size, kept);
    gather(layers[0], x, rows, n);
    differentiate(layers, count, w, gradients, n, loss, targets, rows, kept);
    own(layers, count, columns, [&](const Layer& l, I weight, I bias) {
        const I weights = l.panels * l.taps * 16;
        for (I i = 0; i < n; i++) {
            const float* g = gradients + i * kept + l.kept;
            const double of_bias = l.kept < 0 ? amount(l.dy + i * l.o.oc, l.o.oc, order) : amount(g + weights, l.panels * 16, order);
            const double of_weight = l.kept < 0 ? amount(l.padded + i * l.image, l.taps, order) * of_bias : amount(g, weights, order);
            amounts[i * width + weight] += of_weight;
            if (l.o.bias >= 0) amounts[i * width + bias] += of_bias;
        }
    });
}

// Adds factors [n, width] times the gradients that fedlgm_examples has left to `sums`, packed. A factor of zero adds nothing.
// scaled: room for 16 n numbers.
void fedlgm_add(const Op* ops, I count, const float* gradients, I n, const I* columns, I width, const double* factors, double* scaled,
                double* sums, float* area) {
    Layer layers[MOST] = {};
    Memory memory = {area, 0};
    I kept;
    lay_out(ops, count, n, layers, memory, kept);
    own(layers, count, columns, [&](const Layer& l, I weight, I bias) {
        const I weights = l.panels * l.taps * 16;
        if (l.kept < 0) add_products(sums + l.packed, l, factors + weight, n, width, scaled);
        for (I i = 0; i < n; i++) {
            const float* g = gradients + i * kept + l.kept;
            const double of_bias = factors[i * width + bias];
            if (l.kept >= 0) add_kept(sums + l.packed, g, weights, factors[i * width + weight]);
            if (l.o.bias < 0 || of_bias == 0) continue;
            if (l.kept >= 0) add_kept(sums + l.packed + weights, g + weights, l.panels * 16, of_bias);
            else
                for (I j = 0; j < l.o.oc; j++) sums[l.packed + weights + j] += of_bias * (double)l.dy[i * l.o.oc + j];
        }
    });
}

// Writes packed sums in the order of the model.
void fedlgm_unpack(const Op* ops, I count, const double* sums, double* total) {
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    I kept;
    lay_out(ops, count, 1, layers, memory, kept);
    each(layers, count, [&](I packed, I flat) { total[flat] = sums[packed]; });
}
}
