// Vectors of the machine's width, as GCC and Clang have them for every processor, and their exponential.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// aligned(4): loads and stores at any float
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

INLINE float sum_of(vf x) {
    float total = 0.0f;
    UNROLL for (int i = 0; i < VL; i++) total += x[i];
    return total;
}

INLINE float max_of(vf x) {
    float most = x[0];
    UNROLL for (int i = 1; i < VL; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// e^x to about 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below -87, NaN for NaN.
INLINE vf vexp(vf x) {
    const vf magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    x = x > splat(88.0f) ? splat(88.0f) : x;
    vf shifted = x * splat(1.44269504f) + magic;
    vf n = shifted - magic;
    vf r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(0.5f);
    p = p * r * r + r + splat(1.0f);
    vi scale = ((vi)shifted - (vi)magic + 127) << 23;
    vf found = p * (vf)scale;
    return x < splat(-87.0f) ? splat(0.0f) : found;
}
