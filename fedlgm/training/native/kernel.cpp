// Local training of one client in one call: forward, backward and optimizer for a stack of layers.
//
// Bits. Every number is one chain of IEEE operations whose order is written here: sums run over taps, channels or positions one
// after another, lanes are different output channels, and a multiplication and its addition are fused where `fma` says so and
// nowhere else (-ffp-contract=off). Blocks differ between instruction sets; what a lane computes does not.
//
// Memory. Activations are channels-last without padding of channels; the last lanes of a pixel are read and written under a mask.
// Weights lie in panels of 16 output channels: [oc / 16][ky][kx][ic][16], then [oc / 16][16] of the bias; unused lanes stay zero.
// A linear layer is a convolution whose kernel is as large as its image. The caller has checked shapes and the range of rows and
// targets, and owns all memory.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include "lanes.h"

typedef int64_t I;
enum Kind { CONVOLUTION, MAXIMUM, AVERAGE, SIGMOID, TANH, RELU };
enum Loss { CROSS_ENTROPY, SQUARED_ERROR, LOGISTIC };

struct Op {  // as the caller passes it: 15 integers
    I kind, c, h, w, oc, oh, ow, kh, kw, sh, sw, ph, pw, weight, bias;  // the last two: where in the model's vector; bias -1: none
    I inputs() const { return c * h * w; }
    I outputs() const { return oc * oh * ow; }
};

struct Layer {  // an Op with its addresses
    Op o;
    float *x, *y, *dx, *dy;        // activations and their gradients; dx is null where nobody needs it
    float *padded, *dpadded;       // the input with a border of zeros, or x itself
    float *wt;                     // weights with input channels as lanes, for the gradient of the input
    I packed, panels, run, runs, segment, taps, row, image;
    I kept;                        // where in the gradient of one example; -1: an outer product of x and dy, which is not kept
    I packed_size() const { return panels * 16 * (taps + 1); }
};

static I up(I n) { return (n + 15) / 16 * 16; }
static I least(I a, I b) { return a < b ? a : b; }

// ---- convolution ------------------------------------------------------------------------------------------------------------

// out[p][c] = bias[c] + sum over taps of in[p] w[c]: P neighbouring positions by C panels in registers.
template <int P, int C>
static void forward_block(const float* in, I ps, const Layer& l, const float* w, const float* bias, float* out, int last) {
    V a[P][C];
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int c = 0; c < C; c++) a[p][c] = bias ? ld(bias + 16 * c) : zero();
    const I panel = l.taps * 16, run = l.run;
    for (I s = 0; s < l.runs; s++) {
        const float* q[(P + 2) / 3];
        UNROLL for (int i = 0; i < (P + 2) / 3; i++) q[i] = in + s * l.segment + 3 * i * ps;
        for (I j = 0; j < run; j++, w += 16) {
            V v[C];
            UNROLL for (int c = 0; c < C; c++) v[c] = ld(w + c * panel);
            UNROLL for (int p = 0; p < P; p++) {
                V x = set(q[p / 3][(p % 3) * ps]);
                UNROLL for (int c = 0; c < C; c++) a[p][c] = fma(x, v[c], a[p][c]);
            }
            UNROLL for (int i = 0; i < (P + 2) / 3; i++) q[i]++;
        }
    }
    UNROLL for (int p = 0; p < P; p++) {
        UNROLL for (int c = 0; c < C - 1; c++) st(out + p * l.o.oc + 16 * c, a[p][c]);
        stn(out + p * l.o.oc + 16 * (C - 1), a[p][C - 1], last);
    }
}

// dw[k][c] = sum over positions of in[k] g[c]: K neighbouring taps of each of R runs by C panels in registers.
template <int R, int K, int C>
static void weight_block(const float* in, const float* g, const Layer& l, I n, float* dw, int last) {
    V a[R * K][C];
    UNROLL for (int k = 0; k < R * K; k++) UNROLL for (int c = 0; c < C; c++) a[k][c] = zero();
    const I ps = l.o.sw * l.o.c, oc = l.o.oc;
    for (I i = 0; i < n; i++)
        for (I y = 0; y < l.o.oh; y++) {
            const float* r = in + i * l.image + y * l.o.sh * l.row;
            for (I x = 0; x < l.o.ow; x++, r += ps, g += oc) {
                V v[C];
                UNROLL for (int c = 0; c < C - 1; c++) v[c] = ld(g + 16 * c);
                v[C - 1] = ldn(g + 16 * (C - 1), last);
                UNROLL for (int k = 0; k < R * K; k++) {
                    V b = set(r[k / K * l.segment + k % K]);
                    UNROLL for (int c = 0; c < C; c++) a[k][c] = fma(b, v[c], a[k][c]);
                }
            }
        }
    UNROLL for (int k = 0; k < R * K; k++)
        UNROLL for (int c = 0; c < C; c++) st(dw + (c * l.taps + k / K * l.run + k % K) * 16, a[k][c]);
}

// dx[p] += sum over output channels of g[p] wt: P positions by C panels of 16 neighbouring taps in registers.
template <int P, int C>
static void input_block(const float* g, const Layer& l, const float* wt, float* const* dx, int lanes) {
    V a[P][C];
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int c = 0; c < C; c++) a[p][c] = zero();
    const I oc = l.o.oc;
    const float* q[(P + 2) / 3];
    UNROLL for (int i = 0; i < (P + 2) / 3; i++) q[i] = g + 3 * i * oc;
    for (I o = 0; o < oc; o++, wt += 16) {
        V v[C];
        UNROLL for (int c = 0; c < C; c++) v[c] = ld(wt + c * oc * 16);
        UNROLL for (int p = 0; p < P; p++) {
            V x = set(q[p / 3][(p % 3) * oc]);
            UNROLL for (int c = 0; c < C; c++) a[p][c] = fma(x, v[c], a[p][c]);
        }
        UNROLL for (int i = 0; i < (P + 2) / 3; i++) q[i]++;
    }
    UNROLL for (int p = 0; p < P; p++) {
        UNROLL for (int c = 0; c < C - 1; c++) st(dx[p] + 16 * c, add(ld(dx[p] + 16 * c), a[p][c]));
        float* end = dx[p] + 16 * (C - 1);
        stn(end, add(ldn(end, lanes), a[p][C - 1]), lanes);
    }
}

typedef void (*Forward)(const float*, I, const Layer&, const float*, const float*, float*, int);
typedef void (*Weight)(const float*, const float*, const Layer&, I, float*, int);
typedef void (*Input)(const float*, const Layer&, const float*, float* const*, int);
template <int N> struct Tables {
    static void fill(Forward (*f)[2], Weight (*w)[2][2], Input (*i)[2]) {
        if constexpr (N <= P1) f[N][0] = forward_block<N, 1>, i[N][0] = input_block<N, 1>;
        if constexpr (N <= P2) f[N][1] = forward_block<N, 2>, i[N][1] = input_block<N, 2>;
        if constexpr (N <= K1) w[N][0][0] = weight_block<1, N, 1>;
        if constexpr (N <= K2) w[N][0][1] = weight_block<1, N, 2>;
        if constexpr (2 * N <= K1) w[N][1][0] = weight_block<2, N, 1>;
        if constexpr (2 * N <= K2) w[N][1][1] = weight_block<2, N, 2>;
        if constexpr (N > 1) Tables<N - 1>::fill(f, w, i);
    }
};
static struct Blocks {
    Forward forward[17][2] = {};
    Weight weight[17][2][2] = {};
    Input input[17][2] = {};
    Blocks() { Tables<16>::fill(forward, weight, input); }
} blocks;

static int width(I panels, I first, int two) { return two && first + 1 < panels ? 2 : 1; }
static int lanes_of(I channels, I first, int c) { return (int)least(16, channels - 16 * (first + c - 1)); }

static void convolve(const Layer& l, const float* params, I n) {
    const Op& o = l.o;
    const float *w = params + l.packed, *bias = o.bias < 0 ? nullptr : w + l.panels * l.taps * 16;
    const bool merged = o.oh == 1 && o.ow == 1;  // positions of different images then lie evenly spaced
    const I rows = merged ? 1 : n * o.oh, columns = merged ? n : o.ow, ps = merged ? l.image : o.sw * o.c;
    for (I r = 0; r < rows; r++) {
        const float* in = l.padded + r / o.oh * l.image + r % o.oh * o.sh * l.row;
        for (I p = 0, c; p < l.panels; p += c) {
            c = width(l.panels, p, P2);
            const I most = c == 2 ? P2 : P1, count = (columns + most - 1) / most;
            for (I b = 0, at = 0, end; b < count; b++, at = end) {
                end = columns * (b + 1) / count;
                blocks.forward[end - at][c - 1](in + at * ps, ps, l, w + p * l.taps * 16, bias ? bias + 16 * p : nullptr,
                                                l.y + (r * columns + at) * o.oc + 16 * p, lanes_of(o.oc, p, (int)c));
            }
        }
    }
}

static void weight_gradient(const Layer& l, float* gradient, I n) {
    const Op& o = l.o;
    float* dw = gradient + l.packed;
    for (I p = 0, c; p < l.panels; p += c) {
        c = width(l.panels, p, K2);
        const int last = lanes_of(o.oc, p, (int)c);
        const I most = c == 2 ? K2 : K1, count = (l.run + most - 1) / most;
        for (I s = 0, r; s < l.runs; s += r) {
            r = s + 1 < l.runs && 2 * l.run <= most ? 2 : 1;
            for (I b = 0, at = 0, end; b < count; b++, at = end) {
                end = l.run * (b + 1) / count;
                blocks.weight[end - at][r - 1][c - 1](l.padded + s * l.segment + at, l.dy + 16 * p, l, n,
                                               dw + (p * l.taps + s * l.run + at) * 16, last);
            }
        }
    }
    if (o.bias < 0) return;
    float* db = dw + l.panels * l.taps * 16;
    for (I p = 0; p < l.panels; p++) {
        const int last = lanes_of(o.oc, p, 1);
        V total = zero();
        const float* g = l.dy + 16 * p;
        for (I i = 0; i < n; i++) {  // image by image: shorter chains round less
            V a = zero();
            for (I q = 0; q < o.oh * o.ow; q++, g += o.oc) a = add(a, ldn(g, last));
            total = add(total, a);
        }
        st(db + 16 * p, total);
    }
}

static void input_gradient(const Layer& l, const float* params, I n) {
    const Op& o = l.o;
    const float* w = params + l.packed;
    const I panels = up(l.run) / 16, positions = o.oh * o.ow;
    for (I s = 0; s < l.runs; s++)
        for (I b = 0; b < panels; b++) {
            float* t = l.wt + (s * panels + b) * o.oc * 16;
            const I lanes = least(16, l.run - 16 * b);
            for (I p = 0; p < l.panels; p++, t += 256)
                transpose(w + (p * l.taps + s * l.run + 16 * b) * 16, t, (int)lanes, (int)least(16, o.oc - 16 * p));
        }
    memset(l.dpadded, 0, sizeof(float) * n * l.image);
    const bool apart = positions == 1 || o.sw * o.c >= 32;  // the positions of two panels then have no input in common
    const I together = (4 * P1 + positions - 1) / positions;  // images whose positions share blocks
    for (I first = 0; first < n; first += together) {
        const I end = least(n, first + together), all = (end - first) * positions;
        for (I s = 0; s < l.runs; s++)
            for (I b = 0, c; b < panels; b += c) {
                c = width(panels, b, P2 && apart);
                const I most = c == 2 ? P2 : P1, count = (all + most - 1) / most;
                const int lanes = lanes_of(l.run, b, (int)c);
                float* base = l.dpadded + first * l.image + s * l.segment + 16 * b;
                float* to[16];
                I x = 0, y = 0, i = 0;
                for (I k = 0, at = 0, stop; k < count; k++, at = stop) {
                    stop = all * (k + 1) / count;
                    for (I p = at; p < stop; p++) {
                        to[p - at] = base + i * l.image + y * o.sh * l.row + x * o.sw * o.c;
                        if (++x == o.ow) { x = 0; if (++y == o.oh) y = 0, i++; }
                    }
                    blocks.input[stop - at][c - 1](l.dy + (first * positions + at) * o.oc, l, l.wt + (s * panels + b) * o.oc * 16, to,
                                                   lanes);
                }
            }
    }
}

static void move_border(const Layer& l, I n, bool into) {  // between x and its copy with a border, or back for the gradients
    const Op& o = l.o;
    const I length = o.w * o.c;
    for (I i = 0; i < n; i++)
        for (I y = 0; y < o.h; y++) {
            const I inside = i * l.image + (y + o.ph) * l.row + o.pw * o.c, plain = (i * o.h + y) * length;
            if (into) memcpy(l.padded + inside, l.x + plain, sizeof(float) * length);
            else memcpy(l.dx + plain, l.dpadded + inside, sizeof(float) * length);
        }
}

// ---- pooling and activations ------------------------------------------------------------------------------------------------

INLINE M over(V b, V a) { return either(greater(b, a), unordered(b)); }  // so that a maximum is NaN if any of its values is

// Whether it is a maximum of windows of 2 x 2 that all lie inside the image, which is worth a form of its own.
static bool pairs(const Op& o) {
    return o.kind == MAXIMUM && o.kh == 2 && o.kw == 2 && (o.oh - 1) * o.sh + 2 <= o.h && (o.ow - 1) * o.sw + 2 <= o.w;
}

template <bool PAIRS> static void pool(const Layer& l, I n) {
    const Op& o = l.o;
    const bool average = !PAIRS && o.kind == AVERAGE;
    float* to = l.y;
    for (I i = 0; i < n; i++)
        for (I y = 0; y < o.oh; y++) {
            const float* from = l.x + (i * o.h + y * o.sh) * o.w * o.c;
            for (I x = 0; x < o.ow; x++, to += o.c, from += o.sw * o.c) {
                const I rows = PAIRS ? 2 : least(o.kh, o.h - y * o.sh), columns = PAIRS ? 2 : least(o.kw, o.w - x * o.sw);
                for (I c = 0; c < o.c; c += 16) {
                    const int lanes = (int)least(16, o.c - c);
                    V a = zero();
                    UNROLL for (I v = 0; v < rows; v++)
                        UNROLL for (I u = 0; u < columns; u++) {
                            V b = ldn(from + (v * o.w + u) * o.c + c, lanes);
                            if (average) a = add(a, b);
                            else a = v + u == 0 ? b : select(over(b, a), b, a);
                        }
                    stn(to + c, average ? divide(a, set((float)(rows * columns))) : a, lanes);
                }
            }
        }
}

static void pool_back(const Layer& l, I n) {
    const Op& o = l.o;
    memset(l.dx, 0, sizeof(float) * n * o.inputs());
    const float* dy = l.dy;
    for (I i = 0; i < n; i++)
        for (I y = 0; y < o.oh; y++)
            for (I x = 0; x < o.ow; x++, dy += o.c) {
                const I at = ((i * o.h + y * o.sh) * o.w + x * o.sw) * o.c;
                const I rows = least(o.kh, o.h - y * o.sh), columns = least(o.kw, o.w - x * o.sw);
                for (I c = 0; c < o.c; c += 16) {
                    const int lanes = (int)least(16, o.c - c);
                    const float* from = l.x + at + c;
                    float* to = l.dx + at + c;
                    V g = ldn(dy + c, lanes), m = zero();
                    if (o.kind == AVERAGE) g = divide(g, set((float)(rows * columns)));
                    else
                        for (I v = 0; v < rows; v++)
                            for (I u = 0; u < columns; u++) {
                                V b = ldn(from + (v * o.w + u) * o.c, lanes);
                                m = v + u == 0 ? b : select(over(b, m), b, m);
                            }
                    for (I v = 0; v < rows; v++)
                        for (I u = 0; u < columns; u++) {
                            const I there = (v * o.w + u) * o.c;
                            V share = g;
                            if (o.kind == MAXIMUM) {  // the first of equal values takes the gradient, and leaves none
                                const M here = equal(ldn(from + there, lanes), m);
                                share = select(here, g, zero());
                                g = select(here, zero(), g);
                            }
                            stn(to + there, add(ldn(to + there, lanes), share), lanes);
                        }
                }
            }
}

// The same for the maximum of pairs. A column that two windows share stays in registers between them.
static void pool_pairs_back(const Layer& l, I n) {
    const Op& o = l.o;
    const I down = o.w * o.c;
    memset(l.dx, 0, sizeof(float) * n * o.inputs());
    for (I i = 0; i < n; i++)
        for (I y = 0; y < o.oh; y++)
            for (I c = 0; c < o.c; c += 16) {
                const int lanes = (int)least(16, o.c - c);
                const float *x = l.x + (i * o.h + y * o.sh) * down + c, *dy = l.dy + (i * o.oh + y) * o.ow * o.c + c;
                float* dx = l.dx + (x - l.x);
                V x0 = zero(), x1 = zero(), d0 = zero(), d1 = zero();
                for (I k = 0; k < o.ow; k++, x += o.sw * o.c, dx += o.sw * o.c, dy += o.c) {
                    if (k == 0 || o.sw > 1) {
                        x0 = ldn(x, lanes), x1 = ldn(x + down, lanes);
                        d0 = ldn(dx, lanes), d1 = ldn(dx + down, lanes);
                    }
                    const V z0 = ldn(x + o.c, lanes), z1 = ldn(x + down + o.c, lanes), g = ldn(dy, lanes);
                    const M right0 = over(z0, x0), right1 = over(z1, x1);
                    const M low = over(select(right1, z1, x1), select(right0, z0, x0));
                    const V g0 = select(low, zero(), g), g1 = select(low, g, zero());
                    stn(dx, add(d0, select(right0, zero(), g0)), lanes);
                    stn(dx + down, add(d1, select(right1, zero(), g1)), lanes);
                    d0 = add(ldn(dx + o.c, lanes), select(right0, g0, zero()));
                    d1 = add(ldn(dx + down + o.c, lanes), select(right1, g1, zero()));
                    if (k + 1 == o.ow || o.sw > 1) stn(dx + o.c, d0, lanes), stn(dx + down + o.c, d1, lanes);
                    x0 = z0, x1 = z1;
                }
            }
}

INLINE V sigmoid(V x) { return divide(set(1), add(set(1), exponential(subtract(zero(), x)))); }

INLINE V hyperbolic_tangent(V x) {  // Cephes: a polynomial near zero, where the other form cancels
    const V z = mul(x, x);
    V p = fma(set(-5.70498872745e-3f), z, set(2.06390887954e-2f));
    p = fma(p, z, set(-5.37397155531e-2f));
    p = fma(p, z, set(1.33314422036e-1f));
    p = fma(p, z, set(-3.33332819422e-1f));
    p = fma(mul(p, z), x, x);
    const V size = select(greater(zero(), x), subtract(zero(), x), x);
    const V far = subtract(set(1), divide(set(2), add(exponential(add(size, size)), set(1))));
    return select(greater(set(0.625f), size), p, select(greater(zero(), x), subtract(zero(), far), far));
}

template <int KIND> static void activate(float* y, I count) {
    for (I i = 0; i < count; i += 16) {
        const int lanes = (int)least(16, count - i);
        V x = ldn(y + i, lanes);
        x = KIND == SIGMOID ? sigmoid(x) : KIND == TANH ? hyperbolic_tangent(x) : greatest(zero(), x);
        stn(y + i, x, lanes);
    }
}

template <int KIND> static void activate_back(const float* y, float* d, I count) {
    for (I i = 0; i < count; i += 16) {
        const int lanes = (int)least(16, count - i);
        V v = ldn(y + i, lanes), g = ldn(d + i, lanes);
        if (KIND == SIGMOID) g = mul(g, mul(v, subtract(set(1), v)));
        if (KIND == TANH) g = mul(g, subtract(set(1), mul(v, v)));
        if (KIND == RELU) g = select(greater(v, zero()), g, select(unordered(v), g, zero()));
        stn(d + i, g, lanes);
    }
}

// ---- loss and optimizer -----------------------------------------------------------------------------------------------------

static void loss_gradient(const Layer& l, I loss, const void* targets, const I* rows, I n, I over) {  // of the sum over `over`
    const I k = l.o.outputs();
    for (I i = 0; i < n; i++) {
        const float* o = l.y + i * k;
        float* g = l.dy + i * k;
        if (loss == SQUARED_ERROR) {
            const float* t = (const float*)targets + rows[i] * k;
            for (I j = 0; j < k; j++) g[j] = 2.0f * (o[j] - t[j]) / (float)(over * k);
            continue;
        }
        if (loss == LOGISTIC) {
            const float* t = (const float*)targets + rows[i] * k;
            for (I j = 0; j < k; j += 16) {
                const int lanes = (int)least(16, k - j);
                stn(g + j, divide(subtract(sigmoid(ldn(o + j, lanes)), ldn(t + j, lanes)), set((float)(over * k))), lanes);
            }
            continue;
        }
        float top = o[0], total = 0;
        for (I j = 1; j < k; j++) top = o[j] > top ? o[j] : top;
        for (I j = 0; j < k; j += 16) {
            const int lanes = (int)least(16, k - j);
            stn(g + j, exponential(subtract(ldn(o + j, lanes), set(top))), lanes);
        }
        for (I j = 0; j < k; j++) total += g[j];
        for (I j = 0; j < k; j++) g[j] = (g[j] / total - (j == ((const I*)targets)[rows[i]] ? 1.0f : 0.0f)) / (float)over;
    }
}

struct Optimizer {  // as the caller passes it
    double adam, lr, momentum, clip;  // adam: 0 is SGD; clip: l2 norm of a batch's gradient, 0 for none
};

struct Powers { double first = 1, second = 1; bool begun = false; };  // of Adam's decays so far

static void clip(float* g, I size, double bound) {
    double sums[16] = {}, total = 0;
    for (I i = 0; i < size; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += (double)g[i + j] * (double)g[i + j];
    for (int j = 0; j < 16; j++) total += sums[j];
    double scale = bound / std::sqrt(total);
    if (scale > 1) scale = 1;
    for (I i = 0; i < size; i += 16) st(g + i, mul(ld(g + i), set((float)scale)));
}

static void step(const Optimizer& by, Powers& t, float* w, const float* g, float* m, float* v, I size) {
    if (by.adam != 0) {
        t.first *= 0.9, t.second *= 0.999;
        const V rate = set((float)(-by.lr / (1 - t.first))), root = set((float)std::sqrt(1 - t.second));
        for (I i = 0; i < size; i += 16) {
            const V d = ld(g + i);
            const V a = fma(subtract(d, ld(m + i)), set(0.1f), ld(m + i));
            const V b = fma(mul(set(0.001f), d), d, mul(set(0.999f), ld(v + i)));
            st(m + i, a), st(v + i, b);
            st(w + i, fma(rate, divide(a, add(divide(root_of(b), root), set(1e-8f))), ld(w + i)));
        }
        return;
    }
    const V rate = set((float)-by.lr), momentum = set((float)by.momentum);
    for (I i = 0; i < size; i += 16) {
        V d = ld(g + i);
        if (by.momentum != 0) {
            if (t.begun) d = fma(momentum, ld(m + i), d);
            st(m + i, d);
        }
        st(w + i, fma(rate, d, ld(w + i)));
    }
    t.begun = true;
}

// ---- a client ---------------------------------------------------------------------------------------------------------------

struct Memory {  // hands out aligned pieces of one area; measures if the area is null
    float* area;
    I used;
    float* take(I floats) {
        float* piece = area ? area + used : nullptr;
        used += up(floats) + 16;
        return piece;
    }
};

static const int MOST = 64;  // layers

// Gives the size of the packed parameters, and how much of one example's gradient is kept.
static I lay_out(const Op* ops, I count, I batch, Layer* layers, Memory& memory, I& kept) {
    I size = 0;
    kept = 0;
    bool needed = false;  // a gradient of the output: from the first layer with parameters on
    float *x = memory.take(batch * ops[0].inputs()), *dx = nullptr;
    for (I i = 0; i < count; i++) {
        Layer& l = layers[i];
        const Op& o = l.o = ops[i];
        const bool own = o.kind == CONVOLUTION, in_place = o.kind >= SIGMOID;
        const bool wants = needed;  // the gradient of the input
        needed = needed || own;
        l.x = x, l.dx = dx;
        l.y = in_place ? x : memory.take(batch * o.outputs());
        l.dy = !needed ? nullptr : in_place ? dx : memory.take(batch * o.outputs());
        x = l.y, dx = l.dy;
        if (!own) continue;
        l.row = (o.w + 2 * o.pw) * o.c, l.image = (o.h + 2 * o.ph) * l.row;
        l.panels = up(o.oc) / 16, l.taps = o.kh * o.kw * o.c;
        l.run = o.kw * o.c, l.runs = o.kh, l.segment = l.row;
        if (l.run == l.segment) l.run = l.taps, l.runs = 1;
        l.packed = size;
        l.kept = l.runs == 1 && l.image == l.taps && o.oh * o.ow == 1 ? -1 : kept;
        size += l.packed_size();
        if (l.kept >= 0) kept += l.packed_size();
        const bool border = o.ph || o.pw;
        l.padded = border ? memory.take(batch * l.image) : l.x;
        l.dpadded = !wants ? nullptr : border ? memory.take(batch * l.image) : l.dx;
        l.wt = wants ? memory.take(l.runs * up(l.run) * o.oc) : nullptr;
    }
    return size;
}

// Calls f(packed index, index in the model) for every parameter.
template <class F> static void each(const Layer* layers, I count, F f) {
    for (I i = 0; i < count; i++) {
        const Layer& l = layers[i];
        const Op& o = l.o;
        if (o.kind != CONVOLUTION) continue;
        const I window = o.kh * o.kw, apart = o.c * window;
        for (I p = 0; p < l.panels; p++)  // packed numbers in order
            for (I t = 0, to = l.packed + p * l.taps * 16; t < window; t++)
                for (I c = 0; c < o.c; c++, to += 16)
                    for (I a = 0, k = o.weight + p * 16 * apart + c * window + t; a < least(16, o.oc - 16 * p); a++, k += apart)
                        f(to + a, k);
        if (o.bias >= 0)
            for (I a = 0; a < o.oc; a++) f(l.packed + l.panels * l.taps * 16 + a, o.bias + a);
    }
}

// Lays out, and copies the model; borders, and what masks leave out, are zero. Gives the packed parameters and their number.
static float* begin(const Op* ops, I count, I batch, const float* model, Layer* layers, Memory& memory, I& size, I& kept) {
    size = lay_out(ops, count, batch, layers, memory, kept);
    for (I i = 0; i < count; i++)
        if (layers[i].padded && layers[i].padded != layers[i].x) memset(layers[i].padded, 0, sizeof(float) * batch * layers[i].image);
    float* w = memory.take(size);
    memset(w, 0, sizeof(float) * size);
    each(layers, count, [&](I packed, I flat) { w[packed] = model[flat]; });
    return w;
}

static void gather(const Layer& l, const float* x, const I* rows, I n) {  // [N, C, H, W] to [n, H, W, C]
    const I c = l.o.c, pixels = l.o.h * l.o.w;
    for (I i = 0; i < n; i++) {
        const float* from = x + rows[i] * c * pixels;
        float* to = l.x + i * c * pixels;
        if (c == 1 || pixels == 1) memcpy(to, from, sizeof(float) * c * pixels);
        else
            for (I a = 0; a < c; a++)
                for (I p = 0; p < pixels; p++) to[p * c + a] = from[a * pixels + p];
    }
}

static Layer example_of(Layer l, I i) {
    l.padded += i * l.image, l.dy += i * l.o.outputs(), l.packed = l.kept;
    return l;
}

// Gradient of the mean loss; or, one after another, what is kept of every example's: `apart` floats, -1 for the mean.
static void differentiate(Layer* layers, I count, const float* params, float* gradient, I n, I loss, const void* targets,
                          const I* rows, I apart = -1) {
    for (I i = 0; i < count; i++) {
        const Layer& l = layers[i];
        switch (l.o.kind) {
            case CONVOLUTION:
                if (l.padded != l.x) move_border(l, n, true);
                convolve(l, params, n);
                break;
            case SIGMOID: activate<SIGMOID>(l.y, n * l.o.outputs()); break;
            case TANH: activate<TANH>(l.y, n * l.o.outputs()); break;
            case RELU: activate<RELU>(l.y, n * l.o.outputs()); break;
            default: pairs(l.o) ? pool<true>(l, n) : pool<false>(l, n);
        }
    }
    loss_gradient(layers[count - 1], loss, targets, rows, n, apart < 0 ? n : 1);
    for (I i = count - 1; i >= 0 && layers[i].dy; i--) {
        const Layer& l = layers[i];
        switch (l.o.kind) {
            case CONVOLUTION:
                if (apart < 0) weight_gradient(l, gradient, n);
                else if (l.kept >= 0)
                    for (I j = 0; j < n; j++) weight_gradient(example_of(l, j), gradient + j * apart, 1);
                if (!l.dx) return;
                input_gradient(l, params, n);
                if (l.dpadded != l.dx) move_border(l, n, false);
                break;
            case SIGMOID: activate_back<SIGMOID>(l.y, l.dy, n * l.o.outputs()); break;
            case TANH: activate_back<TANH>(l.y, l.dy, n * l.o.outputs()); break;
            case RELU: activate_back<RELU>(l.y, l.dy, n * l.o.outputs()); break;
            default: pairs(l.o) ? pool_pairs_back(l, n) : pool_back(l, n);
        }
    }
}

extern "C" {

// Floats of working memory; -1 for more layers than fit.
I fedlgm_workspace(const Op* ops, I count, I batch) {
    if (count < 1 || count > MOST) return -1;
    Layer layers[MOST] = {};
    Memory memory = {nullptr, 0};
    I kept;
    const I size = lay_out(ops, count, batch, layers, memory, kept);
    for (int i = 0; i < 4; i++) memory.take(size);  // weights, gradient and the optimizer's state
    return memory.used;
}

// Writes the local model minus the model, or, without epochs, the gradient of the batch that `order` lists.
// x: float32 [N, ...]; targets: int64 [N], or float32 [N, outputs]; order: int64 [epochs, n], rows of x;
// area: what fedlgm_workspace asked for, aligned to 64 bytes.
void fedlgm_train(const Op* ops, I count, const float* x, const void* targets, const I* order, I n, I epochs, I batch, I loss,
                  const Optimizer* by, const float* model, float* update, float* area) {
    Layer layers[MOST] = {};
    Memory memory = {area, 0};
    I size, kept;
    float* w = begin(ops, count, batch, model, layers, memory, size, kept);
    float *g = memory.take(size), *m = memory.take(size), *v = memory.take(size);
    for (float* part : {g, m, v}) memset(part, 0, sizeof(float) * size);
    Powers powers;
    for (I e = 0; e < (epochs ? epochs : 1); e++)
        for (I at = 0; at < n; at += batch) {
            const I now = least(batch, n - at), *rows = order + e * n + at;
            gather(layers[0], x, rows, now);
            differentiate(layers, count, w, g, now, loss, targets, rows);
            if (!epochs) break;
            if (by->clip != 0) clip(g, size, by->clip);
            step(*by, powers, w, g, m, v, size);
        }
    if (epochs) each(layers, count, [&](I packed, I flat) { update[flat] = w[packed] - model[flat]; });
    else each(layers, count, [&](I packed, I flat) { update[flat] = g[packed]; });
}
}

#include "examples.h"

