// Sixteen float32 lanes: one register with AVX-512, two with AVX2, an array elsewhere; the same bits everywhere.
// Of unordered numbers, `least` and `greatest` give the second.
// P1, P2: positions of a block of one or two panels; K1, K2: taps. Two panels need 32 registers; 0: never.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <xmmintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__) && !defined(FEDLGM_PORTABLE)
#include <immintrin.h>
constexpr int P1 = 14, P2 = 12, K1 = 16, K2 = 12;
typedef __m512 V;
typedef __mmask16 M;
INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1u); }
INLINE V set(float a) { return _mm512_set1_ps(a); }
INLINE V ld(const float* p) { return _mm512_loadu_ps(p); }
INLINE V ldn(const float* p, int n) { return n == 16 ? ld(p) : _mm512_maskz_loadu_ps(first(n), p); }
INLINE void st(float* p, V a) { _mm512_storeu_ps(p, a); }
INLINE void stn(float* p, V a, int n) { if (n == 16) st(p, a); else _mm512_mask_storeu_ps(p, first(n), a); }
INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V divide(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V root_of(V a) { return _mm512_sqrt_ps(a); }
INLINE V least(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V greatest(V a, V b) { return _mm512_max_ps(a, b); }
INLINE M greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE M equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE M unordered(V a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE M either(M a, M b) { return a | b; }
INLINE V select(M m, V a, V b) { return _mm512_mask_blend_ps(m, b, a); }
INLINE V power_of_two(V n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
#elif defined(__AVX2__) && defined(__FMA__) && !defined(FEDLGM_PORTABLE)
#include <immintrin.h>
constexpr int P1 = 6, P2 = 0, K1 = 6, K2 = 0;
struct V { __m256 a, b; };
typedef V M;
alignas(64) static const int32_t WINDOW[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
INLINE __m256i first(int n) { return _mm256_loadu_si256((const __m256i*)(WINDOW + 16 - n)); }
INLINE __m256i second(int n) { return _mm256_loadu_si256((const __m256i*)(WINDOW + 24 - n)); }
#define EACH(f) {f(x.a, y.a), f(x.b, y.b)}
INLINE V set(float a) { const __m256 v = _mm256_set1_ps(a); return {v, v}; }
INLINE V ld(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void st(float* p, V x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE V ldn(const float* p, int n) {
    if (n == 16) return ld(p);
    return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, second(n))};
}
INLINE void stn(float* p, V x, int n) {
    if (n == 16) return st(p, x);
    _mm256_maskstore_ps(p, first(n), x.a), _mm256_maskstore_ps(p + 8, second(n), x.b);
}
INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V add(V x, V y) { return EACH(_mm256_add_ps); }
INLINE V subtract(V x, V y) { return EACH(_mm256_sub_ps); }
INLINE V mul(V x, V y) { return EACH(_mm256_mul_ps); }
INLINE V divide(V x, V y) { return EACH(_mm256_div_ps); }
INLINE V root_of(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE V least(V x, V y) { return EACH(_mm256_min_ps); }
INLINE V greatest(V x, V y) { return EACH(_mm256_max_ps); }
INLINE M greater(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
INLINE M equal(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)}; }
INLINE M unordered(V x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
INLINE M either(M x, M y) { return EACH(_mm256_or_ps); }
INLINE V select(M m, V x, V y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
INLINE __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V power_of_two(V n) { return {power_of_two(n.a), power_of_two(n.b)}; }
#else
constexpr int P1 = 3, P2 = 0, K1 = 3, K2 = 0;
struct V { float v[16]; };
struct M { bool m[16]; };
#define LANES(e) V r; for (int i = 0; i < 16; i++) r.v[i] = (e); return r
#define TRUTHS(e) M r; for (int i = 0; i < 16; i++) r.m[i] = (e); return r
INLINE V set(float a) { LANES(a); }
INLINE V ld(const float* p) { LANES(p[i]); }
INLINE V ldn(const float* p, int n) { LANES(i < n ? p[i] : 0.0f); }
INLINE void stn(float* p, V a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
INLINE void st(float* p, V a) { stn(p, a, 16); }
INLINE V fma(V a, V b, V c) { LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
INLINE V add(V a, V b) { LANES(a.v[i] + b.v[i]); }
INLINE V subtract(V a, V b) { LANES(a.v[i] - b.v[i]); }
INLINE V mul(V a, V b) { LANES(a.v[i] * b.v[i]); }
INLINE V divide(V a, V b) { LANES(a.v[i] / b.v[i]); }
INLINE V root_of(V a) { LANES(std::sqrt(a.v[i])); }
INLINE V least(V a, V b) { LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE V greatest(V a, V b) { LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE M greater(V a, V b) { TRUTHS(a.v[i] > b.v[i]); }
INLINE M equal(V a, V b) { TRUTHS(a.v[i] == b.v[i]); }
INLINE M unordered(V a) { TRUTHS(a.v[i] != a.v[i]); }
INLINE M either(M a, M b) { TRUTHS(a.m[i] || b.m[i]); }
INLINE V select(M m, V a, V b) { LANES(m.m[i] ? a.v[i] : b.v[i]); }
INLINE float power_of_two(float n) {
    const int32_t bits = (n == n ? (int32_t)n + 127 : 127) * (1 << 23);
    float r;
    memcpy(&r, &bits, sizeof r);
    return r;
}
INLINE V power_of_two(V n) { LANES(power_of_two(n.v[i])); }
#endif

// to[c][j] = from[j][c] for j < rows and c < columns, of 16 x 16 numbers; to[c][j] = 0 for further j.
INLINE void transpose(const float* from, float* to, int rows, int columns) {
#ifdef __SSE__
    if (rows == 16 && columns == 16) {
        for (int j = 0; j < 16; j += 4)
            for (int c = 0; c < 16; c += 4) {
                __m128 r[4];
                UNROLL for (int k = 0; k < 4; k++) r[k] = _mm_loadu_ps(from + 16 * (j + k) + c);
                _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
                UNROLL for (int k = 0; k < 4; k++) _mm_storeu_ps(to + 16 * (c + k) + j, r[k]);
            }
        return;
    }
#endif
    for (int c = 0; c < columns; c++)
        for (int j = 0; j < 16; j++) to[16 * c + j] = j < rows ? from[16 * j + c] : 0.0f;
}

INLINE V zero() { return set(0.0f); }

INLINE V exponential(V x) {  // Cephes; to 2 units in the last place between -87 and 88, clamped beyond
    x = greatest(set(-87.0f), least(set(88.0f), x));
    const V shift = set(12582912.0f), n = subtract(fma(x, set(1.44269504088896341f), shift), shift);
    x = fma(n, set(-0.693359375f), x);
    x = fma(n, set(2.12194440e-4f), x);
    V y = fma(set(1.9875691500e-4f), x, set(1.3981999507e-3f));
    y = fma(y, x, set(8.3334519073e-3f));
    y = fma(y, x, set(4.1665795894e-2f));
    y = fma(y, x, set(1.6666665459e-1f));
    y = fma(y, x, set(5.0000001201e-1f));
    y = add(fma(y, mul(x, x), x), set(1.0f));
    return mul(y, power_of_two(n));
}
