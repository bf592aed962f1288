// Attention of single queries over a slot's keys and values.
//
// Keys lie in blocks of VL tokens, in each block number by number of the head: one vector has the same number of VL
// keys. Values lie token by token, padded to whole vectors. All query heads that share a key head go together.
#pragma once

#include "vec.h"

enum { MOST = 4 };  // query heads of one pass
enum { AHEAD = 32 };  // tokens whose values are on their way

template <int G>
INLINE void scores_of(const float *q, int size, const float *keys, int count, float *scores, long stride) {
    int blocks = (count + VL - 1) / VL;
    for (int b = 0; b < blocks; b += 2) {
        const float *one = keys + (long)b * size * VL;
        const float *two = b + 1 < blocks ? one + (long)size * VL : one;
        vf sums[G][2];
        UNROLL for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = splat(0.0f);
        for (int d = 0; d < size; d++) {
            __builtin_prefetch(one + (d + 4 * size) * VL);  // two pairs of blocks ahead: pages end too soon
            __builtin_prefetch(one + (d + 5 * size) * VL);
            vf left = load(one + d * VL), right = load(two + d * VL);
            UNROLL for (int g = 0; g < G; g++) {
                vf x = splat(q[g * size + d]);
                sums[g][0] += x * left;
                sums[g][1] += x * right;
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            store(scores + g * stride + b * VL, sums[g][0]);
            store(scores + g * stride + (b + 1) * VL, sums[g][1]);
        }
    }
}

// Scores become weights; returns their sum. Beyond `count` they become zero.
INLINE float weigh(float *scores, int count) {
    int whole = count / VL * VL, blocks = (count + VL - 1) / VL;
    float most = scores[0];
    vf most_of = splat(most);
    for (int k = 0; k < whole; k += VL) most_of = vmax(load(scores + k), most_of);
    if (whole) most = max_of(most_of);
    for (int k = whole; k < count; k++) most = scores[k] > most ? scores[k] : most;
    for (int k = count; k < blocks * VL; k++) scores[k] = -__builtin_inff();
    vf total = splat(0.0f), shift = splat(most);
    for (int k = 0; k < blocks * VL; k += VL) {
        vf weight = vexp(load(scores + k) - shift);
        store(scores + k, weight);
        total += weight;
    }
    return sum_of(total);
}

// What a query attends to: the first `shared` tokens (whole blocks) in another slot, the others in its own. Reading
// what siblings have in common from one place keeps it in the core's own cache.
struct Past {
    const float *shared_keys, *shared_values, *keys, *values;
    int shared, count;
};

// Adds to N vectors of each head the weighted values of `count` tokens, by turns to S sums.
template <int G, int N, int S>
INLINE void blend(const float *weights, long stride, const float *values, int width, int count, vf (&parts)[S][G][N]) {
    int k = 0;
    for (; k + S <= count; k += S) UNROLL for (int s = 0; s < S; s++) {
        const float *row = values + (long)(k + s) * width;
        UNROLL for (int g = 0; g < G; g++) {
            vf weight = splat(weights[g * stride + k + s]);
            if (g == 0) __builtin_prefetch(row + AHEAD * width);
            UNROLL for (int n = 0; n < N; n++) parts[s][g][n] += weight * load(row + n * VL);
        }
    }
    for (; k < count; k++) UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++)
        parts[0][g][n] += splat(weights[g * stride + k]) * load(values + (long)k * width + n * VL);
}

// N vectors of all the past's values. The sums go on from the shared part to the own one, so nobody sees where it ends.
template <int G, int N, int S>
INLINE void blend_all(const float *weights, long stride, const Past *past, int from, int width, vf (&sums)[G][2]) {
    vf parts[S][G][N];
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++)
        parts[s][g][n] = splat(0.0f);
    int shared = past->shared;
    blend<G, N, S>(weights, stride, past->shared_values + from, width, shared, parts);
    blend<G, N, S>(weights + shared, stride, past->values + (long)shared * width + from, width, past->count - shared,
                   parts);
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++) {
        sums[g][n] = parts[0][g][n];
        UNROLL for (int s = 1; s < S; s++) sums[g][n] += parts[s][g][n];
    }
}

// G query heads of `size` numbers at q, and their outputs at out. `scores` has room for G rows of `stride`.
template <int G>
static void attend(const float *q, int size, const Past *past, float *scores, long stride, float *out) {
    int shared = past->shared, own = past->count - shared, vectors = (size + VL - 1) / VL, width = vectors * VL;
    scores_of<G>(q, size, past->shared_keys, shared, scores, stride);
    scores_of<G>(q, size, past->keys + (long)shared * size, own, scores + shared, stride);
    float scale[G];
    UNROLL for (int g = 0; g < G; g++) scale[g] = 1.0f / weigh(scores + g * stride, past->count);
    for (int n = 0; n < vectors;) {
        bool pair = n + 1 < vectors;
        vf sums[G][2];
        if (pair) blend_all<G, 2, 2>(scores, stride, past, n * VL, width, sums);
        else blend_all<G, 1, 4>(scores, stride, past, n * VL, width, sums);
        UNROLL for (int g = 0; g < G; g++) for (int part = 0; part <= pair; part++) {
            vf found = sums[g][part] * splat(scale[g]);
            int from = (n + part) * VL, left = size - from < VL ? size - from : VL;
            if (left == VL) store(out + g * size + from, found);
            else memcpy(out + g * size + from, &found, left * sizeof(float));
        }
        n += 1 + pair;
    }
}

static inline void attend_heads(int heads, const float *q, int size, const Past *past, float *scores, long stride,
                                float *out) {
    for (int done = 0; done < heads;) {
        int now = heads - done < MOST ? heads - done : MOST;
        const float *query = q + (long)done * size;
        float *to = out + (long)done * size;
        switch (now) {
            case 1: attend<1>(query, size, past, scores, stride, to); break;
            case 2: attend<2>(query, size, past, scores, stride, to); break;
            case 3: attend<3>(query, size, past, scores, stride, to); break;
            default: attend<4>(query, size, past, scores, stride, to);
        }
        done += now;
    }
}
