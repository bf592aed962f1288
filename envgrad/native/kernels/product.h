// Products of few rows with packed weights.
//
// A weight (N, K) lies in panels of NR outputs: for each of K inputs, NR numbers side by side, so that a row block's
// sums stay in registers while the panel streams by. Each output is summed over K in order, alone, so it does not
// depend on which other rows are computed beside it, or on how many threads there are.
#pragma once

#include "vec.h"

enum { NR = 2 * VL };
#if VL == 16
enum { MR = 12 };
#elif VL == 8
enum { MR = 6 };
#else
enum { MR = 8 };
#endif

enum { LINE = 16 };  // floats of a cache line

enum Result { STORE, ADD, GATE };

INLINE long padded(long n, long to) { return (n + to - 1) / to * to; }

INLINE vf silu(vf x) { return x / (splat(1.0f) + vexp(-x)); }

// R rows of `a` times one panel: y = result, y += result, or y = silu(first half) * second half. Meanwhile what lies
// at `coming` is on its way to the caches.
template <int R, Result E>
INLINE void tile(const float *a, long lda, const float *panel, const float *coming, int k, const float *bias, float *y,
                 long ldy) {
    vf sums[R][2];
    vf first = bias ? load(bias) : splat(0.0f), second = bias ? load(bias + VL) : splat(0.0f);
    UNROLL for (int r = 0; r < R; r++) {
        sums[r][0] = first;
        sums[r][1] = second;
    }
    for (int i = 0; i < k; i++, panel += NR, coming += LINE) {
        __builtin_prefetch(coming, 0, 2);
        vf left = load(panel), right = load(panel + VL);
        UNROLL for (int r = 0; r < R; r++) {
            vf x = splat(a[r * lda + i]);
            sums[r][0] += x * left;
            sums[r][1] += x * right;
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        float *out = y + r * ldy;
        if (E == GATE) {
            store(out, silu(sums[r][0]) * sums[r][1]);
        } else if (E == ADD) {
            store(out, load(out) + sums[r][0]);
            store(out + VL, load(out + VL) + sums[r][1]);
        } else {
            store(out, sums[r][0]);
            store(out + VL, sums[r][1]);
        }
    }
}

template <int R, Result E>
static void tiles(int rows, const float *a, long lda, const float *panel, const float *coming, int k, const float *bias,
                  float *y, long ldy) {
    if (rows == R) return tile<R, E>(a, lda, panel, coming, k, bias, y, ldy);
    if constexpr (R > 1) return tiles<R - 1, E>(rows, a, lda, panel, coming, k, bias, y, ldy);
}

// Panels first .. last of `weight`, all m rows. y has padded(n, NR) columns, or half of that where halves are gated.
// Large weights come from memory: each panel while the one before it is multiplied, spread over its row blocks.
template <Result E>
static void product(const float *a, long lda, int m, const float *weight, int k, const float *bias, float *y, long ldy,
                    int first, int last) {
    int blocks = (m + MR - 1) / MR;
    for (int p = first; p < last; p++) {
        const float *panel = weight + (long)p * k * NR, *next = panel + (long)(p + 1 < last ? k : 0) * NR;
        const float *start = bias ? bias + (long)p * NR : NULL;
        float *out = y + (long)p * (E == GATE ? VL : NR);
        for (int b = 0; b < blocks; b++) {
            int from = (long)m * b / blocks, to = (long)m * (b + 1) / blocks;
            tiles<MR, E>(to - from, a + from * lda, lda, panel, next + (long)b * k * LINE, k, start, out + from * ldy,
                         ldy);
        }
    }
}

// NR rows of a weight (N, K) into a panel; rows that are not there are zero. A few inputs at a time, so that what is
// read and written stays in the nearest cache.
static inline void pack_panel(float *panel, const float *const *rows, int k) {
    enum { STEP = 16 };
    for (int from = 0; from < k; from += STEP) {
        int to = from + STEP < k ? from + STEP : k;
        for (int c = 0; c < NR; c++) {
            if (rows[c]) for (int i = from; i < to; i++) panel[(long)i * NR + c] = rows[c][i];
            else for (int i = from; i < to; i++) panel[(long)i * NR + c] = 0.0f;
        }
    }
}
