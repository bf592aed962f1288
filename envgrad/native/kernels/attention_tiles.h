// The products of attention, for a block of rows. A row is a query of one head; rows that share keys lie side by side
// in vectors, keys one below the other: a block's scores are (keys, ROWS), so a softmax never crosses a vector.
#pragma once

#include "vec.h"

#if VL == 16 || defined(__aarch64__)
enum { KEYS = 8 };  // of a tile: KEYS * PARTS sums and what they are made of fill 32 registers
#else
enum { KEYS = 4 };  // 16 registers
#endif
enum { PARTS = 3, ROWS = PARTS * VL };
enum { UNIT = VL > 8 ? VL : 8 };  // head sizes are padded to whole units

INLINE long padded_to(long n, long to) { return (n + to - 1) / to * to; }

// 2^x for -126 <= x < 128 to about one unit in the last place, 2^-126 below; NaN for NaN.
INLINE vf power_of_two(vf x) {
    const vf magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    x = splat(-126.0f) > x ? splat(-126.0f) : x;
    vf shifted = x + magic;
    vf r = x - (shifted - magic);
    vf p = splat(1.3264727e-3f);
    p = p * r + splat(9.6715126e-3f);
    p = p * r + splat(5.5507337e-2f);
    p = p * r + splat(2.4022242e-1f);
    p = p * r + splat(6.9314698e-1f);
    p = p * r + splat(1.0f);
    return (vf)((vi)p + ((vi)shifted << 23));
}

// sums[key][row] = sum over d of panel[d][key] * columns[d][row]
template <int P>
INLINE void multiply(const float *panel, const float *columns, long depth, vf (&sums)[KEYS][P]) {
    for (long d = 0; d < depth; d++, panel += KEYS, columns += ROWS) {
        vf right[P];
        UNROLL for (int p = 0; p < P; p++) right[p] = load(columns + p * VL);
        UNROLL for (int k = 0; k < KEYS; k++) {
            vf left = splat(panel[k]);
            UNROLL for (int p = 0; p < P; p++) sums[k][p] += left * right[p];
        }
    }
}

// A row sees the keys before its limit.
INLINE vi seen(int32_t key, const int32_t *limits) { return *(const vi *)limits > key - (vi){}; }

// Highest scores of one tile.
template <int P>
static void highest(const float *panel, const float *columns, long depth, int32_t key, const int32_t *limits,
                    float *top) {
    vf sums[KEYS][P] = {};
    multiply<P>(panel, columns, depth, sums);
    UNROLL for (int p = 0; p < P; p++) {
        vf most = load(top + p * VL);
        UNROLL for (int k = 0; k < KEYS; k++) {
            vf x = seen(key + k, limits + p * VL) ? sums[k][p] : most;
            most = x > most ? x : most;
        }
        store(top + p * VL, most);
    }
}

// Weights 2^(score - shift) of one tile. Their sums are added to `total`. `most` has the bits of the highest exponent
// so far: those of positive numbers are in the order of the numbers, and others are below.
template <int P, bool MASKED>
static void weigh(const float *panel, const float *columns, long depth, int32_t key, const int32_t *limits,
                  const float *shifts, float *total, int32_t *most, float *weights) {
    vf sums[KEYS][P] = {};
    multiply<P>(panel, columns, depth, sums);
    UNROLL for (int p = 0; p < P; p++) {
        vf shift = load(shifts + p * VL), sum = load(total + p * VL);
        vi top = *(const vi *)(most + p * VL);
        UNROLL for (int k = 0; k < KEYS; k++) {
            vf x = sums[k][p] - shift, weight = power_of_two(x);
            vi bits = (vi)x;
            if (MASKED) {
                vi is = seen(key + k, limits + p * VL);
                weight = is ? weight : splat(0.0f);
                bits = is & bits;
            }
            top = bits > top ? bits : top;
            sum += weight;
            store(weights + k * ROWS + p * VL, weight);
        }
        store(total + p * VL, sum);
        *(vi *)(most + p * VL) = top;
    }
}

// The same weights again.
template <int P, bool MASKED>
static void recall(const float *panel, const float *columns, long depth, int32_t key, const int32_t *limits,
                   const float *shifts, float *weights) {
    vf sums[KEYS][P] = {};
    multiply<P>(panel, columns, depth, sums);
    UNROLL for (int p = 0; p < P; p++) {
        vf shift = load(shifts + p * VL);
        UNROLL for (int k = 0; k < KEYS; k++) {
            vf weight = power_of_two(sums[k][p] - shift);
            if (MASKED) weight = seen(key + k, limits + p * VL) ? weight : splat(0.0f);
            store(weights + k * ROWS + p * VL, weight);
        }
    }
}

// Gradients of one tile's scores: weight * (value . gradient - what the row gives back on average).
template <int P>
static void differentiate(const float *panel, const float *columns, long depth, const float *means,
                          const float *weights, float *slopes) {
    vf sums[KEYS][P] = {};
    multiply<P>(panel, columns, depth, sums);
    UNROLL for (int p = 0; p < P; p++) {
        vf mean = load(means + p * VL);
        UNROLL for (int k = 0; k < KEYS; k++) {
            long at = k * ROWS + p * VL;
            store(slopes + at, load(weights + at) * (sums[k][p] - mean));
        }
    }
}

// into[d][row] += sum over `count` keys of keys[key][d] * weights[key][row]
template <int P>
static void gather(const float *keys, long width, long count, const float *weights, float *into) {
    for (long d = 0; d < width; d += KEYS) {
        vf sums[KEYS][P];
        float *out = into + d * ROWS;
        UNROLL for (int i = 0; i < KEYS; i++) {
            UNROLL for (int p = 0; p < P; p++) sums[i][p] = load(out + i * ROWS + p * VL);
        }
        const float *left = keys + d, *right = weights;
        for (long k = 0; k < count; k++, left += width, right += ROWS) {
            vf x[P];
            UNROLL for (int p = 0; p < P; p++) x[p] = load(right + p * VL);
            UNROLL for (int i = 0; i < KEYS; i++) {
                vf one = splat(left[i]);
                UNROLL for (int p = 0; p < P; p++) sums[i][p] += one * x[p];
            }
        }
        UNROLL for (int i = 0; i < KEYS; i++) {
            UNROLL for (int p = 0; p < P; p++) store(out + i * ROWS + p * VL, sums[i][p]);
        }
    }
}

// K keys and W vectors of into[key][d] += sum over rows of weights[key][row] * rows[row][d]
template <int K, int W>
INLINE void scatter_tile(const float *weights, const float *rows, long count, long width, float *into) {
    vf sums[K][W];
    UNROLL for (int k = 0; k < K; k++) {
        UNROLL for (int w = 0; w < W; w++) sums[k][w] = load(into + k * width + w * VL);
    }
    for (long r = 0; r < count; r++, rows += width) {
        vf right[W];
        UNROLL for (int w = 0; w < W; w++) right[w] = load(rows + w * VL);
        UNROLL for (int k = 0; k < K; k++) {
            vf left = splat(weights[k * ROWS + r]);
            UNROLL for (int w = 0; w < W; w++) sums[k][w] += left * right[w];
        }
    }
    UNROLL for (int k = 0; k < K; k++) {
        UNROLL for (int w = 0; w < W; w++) store(into + k * width + w * VL, sums[k][w]);
    }
}

// The same for one tile's keys, or two tiles' (`pair`).
static void scatter(const float *weights, const float *rows, long count, long width, float *into, bool pair) {
    long w = 0;
    for (; !pair && w + 3 * VL <= width; w += 3 * VL) scatter_tile<KEYS, 3>(weights, rows + w, count, width, into + w);
    for (; !pair && w + 2 * VL <= width; w += 2 * VL) scatter_tile<KEYS, 2>(weights, rows + w, count, width, into + w);
    for (; w < width; w += VL) {
        if (pair) scatter_tile<2 * KEYS, 1>(weights, rows + w, count, width, into + w);
        else scatter_tile<KEYS, 1>(weights, rows + w, count, width, into + w);
    }
}

#if VL == 16
static const vi LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VL == 8
static const vi LANES = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const vi LANES = {0, 1, 2, 3};
#endif

// The lanes of `a` with this bit change places with the lanes of `b` without it.
INLINE void exchange(vf &a, vf &b, int bit) {
    const vi has = (LANES & bit) != 0, left = has ? LANES + VL - bit : LANES, right = has ? LANES + VL : LANES + bit;
#if defined(__clang__)
    vf x = a, y = b;
    UNROLL for (int i = 0; i < VL; i++) {
        a[i] = i & bit ? y[i - bit] : x[i];
        b[i] = i & bit ? y[i] : x[i + bit];
    }
#else
    vf x = __builtin_shuffle(a, b, left);
    b = __builtin_shuffle(a, b, right);
    a = x;
#endif
}

INLINE void transpose(vf (&x)[VL]) {
    UNROLL for (int bit = 1; bit < VL; bit *= 2) {
        UNROLL for (int i = 0; i < VL; i++) {
            if (!(i & bit)) exchange(x[i], x[i + bit], bit);
        }
    }
}

INLINE void copy_row(const float *from, long count, float scale, float *to, long width) {
    long d = 0;
    for (; d + VL <= count; d += VL) store(to + d, load(from + d) * scale);
    for (; d < count; d++) to[d] = from[d] * scale;
    for (; d < width; d++) to[d] = 0.0f;
}

// columns[d][row] = rows[row][d] * scale
template <int P>
static void to_columns(const float *rows, long width, float scale, float *columns) {
    for (int p = 0; p < P; p++) {
        for (long d = 0; d < width; d += VL) {
            vf x[VL];
            UNROLL for (int i = 0; i < VL; i++) x[i] = load(rows + (p * VL + i) * width + d) * scale;
            transpose(x);
            UNROLL for (int i = 0; i < VL; i++) store(columns + (d + i) * ROWS + p * VL, x[i]);
        }
    }
}

// rows[row][d] = columns[d][row] * scales[row]
template <int P>
static void to_rows(const float *columns, long width, const float *scales, float *rows) {
    for (int p = 0; p < P; p++) {
        vf scale = load(scales + p * VL);
        for (long d = 0; d < width; d += VL) {
            vf x[VL];
            UNROLL for (int i = 0; i < VL; i++) x[i] = load(columns + (d + i) * ROWS + p * VL) * scale;
            transpose(x);
            UNROLL for (int i = 0; i < VL; i++) store(rows + (p * VL + i) * width + d, x[i]);
        }
    }
}

// Sums over d of a[d] * b[d], still apart in lanes.
INLINE vf products(const float *a, const float *b, long count) {
    vf sum = splat(0.0f);
    long d = 0;
    for (; d + VL <= count; d += VL) sum += load(a + d) * load(b + d);
    for (; d < count; d++) sum[0] += a[d] * b[d];
    return sum;
}
