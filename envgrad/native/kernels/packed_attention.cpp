// Exact attention of a packed row: queries see the prefix of their family and their own row up to a place.
//
// One pass over the keys forward, as in Milakov and Gimelshein (arXiv:1805.02867); backward, weights are made again
// from what is kept of each softmax (Dao et al., arXiv:2205.14135). Rows of all heads that share keys are one block,
// and a family's prefix is packed once for all its siblings.
#include "attention_tiles.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCK = 48 };          // keys whose weights are kept at a time
enum { LARGE = 0x41f00000 };  // the bits of 30.0f: weights up to 2^30 are added up before shifts are raised
enum { KEPT = 1 << 22 };      // floats of intermediate results that a thread keeps between calls

// Strides are in floats; numbers of a head lie side by side.
struct PackedAttention {
    const float *query, *key, *value;  // (T, heads, width), (T, kv heads, width)
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    float *output, *shift, *share;  // (T, heads, width), (T, heads): a weight is 2^(score - shift) * share
    const float *grad;
    int64_t grad_token, grad_head;
    float *query_grad, *key_grad, *value_grad;  // contiguous as output; those of keys and values are added to
    const int32_t *spans;    // (num_spans, 5): first query, queries, first key of the prefix, its keys, first own key
    const int32_t *visible;  // (queries,) how many own keys a query sees, ascending within a span
    const int32_t *tokens;   // (queries,) which tokens they are; null where every token is one
    int32_t num_spans, begin, end;  // of the queries, those from `begin` to `end` are asked for
    int32_t kv_heads, group, width;
    float scale;
};

// Keys and values of one prefix or one row, of one head.
struct Keys {
    long first, count;
    float *key_panels, *value_panels;  // (tiles, width, KEYS)
    float *key_rows, *value_rows;      // (keys, width)
    float *key_grads, *value_grads;
};

struct Room {
    float *memory = nullptr;
    size_t size = 0;

    void resize(size_t floats) {
        free(memory);
        memory = floats ? (float *)aligned_alloc(64, padded_to(floats * sizeof(float), 4096)) : nullptr;
        size = memory ? floats : 0;
    }

    ~Room() { free(memory); }
};

static thread_local Room room;

// What one head's pass over the spans needs.
struct Pass {
    const PackedAttention *of;
    long head, width;  // width: padded
    Keys prefix, own;
    float *query_columns, *grad_columns, *sums;  // (width, ROWS)
    float *query_rows, *grad_rows;               // (ROWS, width)
    float *weights, *slopes;                     // (BLOCK, ROWS)
    // Of the block of rows:
    long count;
    int32_t tokens[ROWS], visible[ROWS], limits[ROWS];  // limits: of the keys that are looked at, how many it sees
    int64_t places[ROWS];                               // in (T, heads)
    float shifts[ROWS], total[ROWS], means[ROWS];
};

static void pack_keys(const Pass *pass, Keys *keys, bool backward) {
    const PackedAttention *of = pass->of;
    long width = pass->width;
    for (long k = 0; k < padded_to(keys->count, KEYS); k++) {
        const float *key = of->key + (keys->first + k) * of->key_token + pass->head * of->key_head;
        const float *value = of->value + (keys->first + k) * of->value_token + pass->head * of->value_head;
        long panel = k / KEYS * KEYS * width + k % KEYS;
        for (long d = 0; d < width; d++) {
            bool real = k < keys->count && d < of->width;
            float x = real ? key[d] : 0.0f, y = real ? value[d] : 0.0f;
            keys->key_panels[panel + d * KEYS] = x;
            keys->value_rows[k * width + d] = y;
            if (backward) {
                keys->value_panels[panel + d * KEYS] = y;
                keys->key_rows[k * width + d] = x;
            }
        }
    }
    if (backward) {
        size_t bytes = padded_to(keys->count, KEYS) * width * sizeof(float);
        memset(keys->key_grads, 0, bytes);
        memset(keys->value_grads, 0, bytes);
    }
}

static void add_gradients(const Pass *pass, const Keys *keys) {
    const PackedAttention *of = pass->of;
    for (long k = 0; k < keys->count; k++) {
        long to = ((keys->first + k) * of->kv_heads + pass->head) * of->width;
        for (long d = 0; d < of->width; d++) {
            of->key_grad[to + d] += keys->key_grads[k * pass->width + d];
            of->value_grad[to + d] += keys->value_grads[k * pass->width + d];
        }
    }
}

// The block of rows from row `first` of the queries from `begin` on: their heads side by side.
static void set_rows(Pass *pass, long begin, long first, long count) {
    long group = pass->of->group, heads = group * pass->of->kv_heads;
    long query = begin + first / group, head = first % group;
    pass->count = count;
    for (long r = 0; r < count; r++) {
        long token = pass->of->tokens ? pass->of->tokens[query] : query;
        pass->tokens[r] = token;
        pass->visible[r] = pass->of->visible[query];
        pass->places[r] = token * heads + pass->head * group + head;
        if (++head == group) {
            head = 0;
            query++;
        }
    }
}

// How many of `keys` the block's rows see, and the most of them; `least` is what all of them see.
static long set_limits(Pass *pass, const Keys *keys, long *least) {
    for (long r = 0; r < ROWS; r++) {
        long row = r < pass->count ? r : pass->count - 1;
        pass->limits[r] = keys == &pass->own ? pass->visible[row] : (int32_t)keys->count;
    }
    *least = pass->limits[0];
    return pass->limits[pass->count - 1];
}

// Rows (ROWS, width) of x (T, heads, of->width), times `scale`; what is beyond them is 0.
template <int P>
static void pack_rows(const Pass *pass, const float *x, long token, long head, float scale, float *rows) {
    long heads = pass->of->group * pass->of->kv_heads;
    for (long r = 0; r < P * VL; r++, rows += pass->width) {
        bool real = r < pass->count;
        long of = real ? pass->tokens[r] : 0, which = real ? pass->places[r] - of * heads : 0;
        copy_row(x + of * token + which * head, real ? pass->of->width : 0, scale, rows, pass->width);
    }
}

template <int P>
static void pack_queries(const Pass *pass) {
    const PackedAttention *of = pass->of;
    pack_rows<P>(pass, of->query, of->query_token, of->query_head, of->scale, pass->query_rows);
    to_columns<P>(pass->query_rows, pass->width, 1.44269504f, pass->query_columns);
    memset(pass->sums, 0, pass->width * ROWS * sizeof(float));
}

// The sums, times `scales`, into x (T, heads, of->width).
template <int P>
static void unpack_sums(const Pass *pass, const float *scales, float *x) {
    to_rows<P>(pass->sums, pass->width, scales, pass->query_rows);
    for (long r = 0; r < pass->count; r++) {
        copy_row(pass->query_rows + r * pass->width, pass->of->width, 1.0f, x + pass->places[r] * pass->of->width, 0);
    }
}

// Raise the shifts to the highest scores of keys [first, first + count), where these are higher.
template <int P>
static void raise(Pass *pass, const Keys *keys, long first, long count) {
    float before[ROWS];
    memcpy(before, pass->shifts, sizeof before);
    for (long k = first; k < first + count; k += KEYS) {
        const float *panel = keys->key_panels + k * pass->width;
        highest<P>(panel, pass->query_columns, pass->of->width, k, pass->limits, pass->shifts);
    }
    for (int r = 0; r < P * VL; r++) {
        if (pass->shifts[r] == before[r]) continue;
        float less = exp2f(before[r] - pass->shifts[r]);
        pass->total[r] *= less;
        for (long d = 0; d < pass->width; d++) pass->sums[d * ROWS + r] *= less;
    }
}

// Weights of keys [first, first + count). If they are too large for the shifts, these are raised.
template <int P>
static void weigh_block(Pass *pass, const Keys *keys, long first, long count, long least) {
    for (bool raised = false;; raised = true) {
        float total[ROWS];
        int32_t most[ROWS] = {};
        memcpy(total, pass->total, sizeof total);
        for (long k = first; k < first + count; k += KEYS) {
            auto tile = k + KEYS <= least ? weigh<P, false> : weigh<P, true>;
            tile(keys->key_panels + k * pass->width, pass->query_columns, pass->of->width, k, pass->limits,
                 pass->shifts, total, most, pass->weights + (k - first) * ROWS);
        }
        bool large = false;
        for (int r = 0; r < P * VL; r++) large |= most[r] > LARGE;
        if (!large || raised) {  // what is large still is not a number
            memcpy(pass->total, total, sizeof total);
            return;
        }
        raise<P>(pass, keys, first, count);
    }
}

template <int P>
static void forward_rows(Pass *pass) {
    const PackedAttention *of = pass->of;
    pack_queries<P>(pass);
    for (int r = 0; r < ROWS; r++) {
        pass->shifts[r] = -INFINITY;
        pass->total[r] = 0.0f;
    }
    const Keys *parts[2] = {&pass->prefix, &pass->own};
    for (int part = pass->prefix.count ? 0 : 1, begun = 0; part < 2; part++) {
        const Keys *keys = parts[part];
        long least, limit = set_limits(pass, keys, &least);
        if (!begun++) highest<P>(keys->key_panels, pass->query_columns, of->width, 0, pass->limits, pass->shifts);
        for (long k = 0; k < limit; k += BLOCK) {
            long count = limit - k < BLOCK ? limit - k : BLOCK;
            weigh_block<P>(pass, keys, k, count, least);
            gather<P>(keys->value_rows + k * pass->width, pass->width, count, pass->weights, pass->sums);
        }
    }
    float shares[ROWS];
    for (int r = 0; r < ROWS; r++) shares[r] = 1.0f / pass->total[r];
    for (long r = 0; r < pass->count; r++) {
        of->shift[pass->places[r]] = pass->shifts[r];
        of->share[pass->places[r]] = shares[r];
    }
    unpack_sums<P>(pass, shares, of->output);
}

// Gradients of the block's rows times their shares, so that weights need not be multiplied; and `means`.
template <int P>
static void pack_gradients(Pass *pass) {
    const PackedAttention *of = pass->of;
    float shares[ROWS];
    for (int r = 0; r < ROWS; r++) {
        pass->shifts[r] = r < pass->count ? of->shift[pass->places[r]] : 0.0f;
        shares[r] = r < pass->count ? of->share[pass->places[r]] : 0.0f;
    }
    pack_rows<P>(pass, of->grad, of->grad_token, of->grad_head, 1.0f, pass->grad_rows);
    for (int p = 0; p < P; p++) {
        vf x[VL], mean = splat(0.0f);
        for (int i = 0; i < VL; i++) {
            long r = p * VL + i;
            float *row = pass->grad_rows + r * pass->width;
            copy_row(row, of->width, shares[r], row, 0);
            x[i] = r < pass->count ? products(row, of->output + pass->places[r] * of->width, of->width) : mean;
        }
        transpose(x);
        UNROLL for (int i = 0; i < VL; i++) mean += x[i];
        store(pass->means + p * VL, mean);
    }
    to_columns<P>(pass->grad_rows, pass->width, 1.0f, pass->grad_columns);
}

template <int P>
static void backward_keys(Pass *pass, const Keys *keys) {
    long width = pass->width, depth = pass->of->width;
    long least, limit = set_limits(pass, keys, &least);
    for (long first = 0; first < limit; first += BLOCK) {
        long count = limit - first < BLOCK ? limit - first : BLOCK;
        for (long k = first; k < first + count; k += KEYS) {
            float *weights = pass->weights + (k - first) * ROWS, *slopes = pass->slopes + (k - first) * ROWS;
            auto tile = k + KEYS <= least ? recall<P, false> : recall<P, true>;
            tile(keys->key_panels + k * width, pass->query_columns, depth, k, pass->limits, pass->shifts, weights);
            differentiate<P>(keys->value_panels + k * width, pass->grad_columns, depth, pass->means, weights, slopes);
        }
        gather<P>(keys->key_rows + first * width, width, count, pass->slopes, pass->sums);
        for (long k = 0; k < count;) {
            bool pair = width == VL && k + KEYS < count;
            long at = (first + k) * width;
            scatter(pass->weights + k * ROWS, pass->grad_rows, pass->count, width, keys->value_grads + at, pair);
            scatter(pass->slopes + k * ROWS, pass->query_rows, pass->count, width, keys->key_grads + at, pair);
            k += pair ? 2 * KEYS : KEYS;
        }
    }
}

template <int P>
static void backward_rows(Pass *pass) {
    float scales[ROWS];
    for (int r = 0; r < ROWS; r++) scales[r] = pass->of->scale;
    pack_queries<P>(pass);
    pack_gradients<P>(pass);
    if (pass->prefix.count) backward_keys<P>(pass, &pass->prefix);
    backward_keys<P>(pass, &pass->own);
    unpack_sums<P>(pass, scales, pass->of->query_grad);
}

static void place_keys(Keys *keys, float **memory, long most, long width, bool backward) {
    float **parts[6] = {&keys->key_panels, &keys->value_rows,  &keys->value_panels,
                        &keys->key_rows,   &keys->value_grads, &keys->key_grads};
    for (int i = 0; i < (backward ? 6 : 2); i++) {
        *parts[i] = *memory;
        *memory += padded_to(most, KEYS) * width;
    }
}

static bool make_room(Pass *pass, bool backward) {
    const PackedAttention *of = pass->of;
    long prefix = 0, own = 0, width = pass->width;
    for (long s = 0; s < of->num_spans; s++) {
        const int32_t *span = of->spans + 5 * s;
        long seen = of->visible[span[0] + span[1] - 1];
        prefix = span[3] > prefix ? span[3] : prefix;
        own = seen > own ? seen : own;
    }
    size_t keys = (padded_to(prefix, KEYS) + padded_to(own, KEYS)) * width * (backward ? 6 : 2);
    size_t all = keys + 5 * width * ROWS + 2 * BLOCK * ROWS;
    if (room.size < all) room.resize(all);
    float *memory = room.memory;
    if (!memory) return false;
    float **columns[5] = {&pass->query_columns, &pass->grad_columns, &pass->sums, &pass->query_rows, &pass->grad_rows};
    for (int i = 0; i < 5; i++, memory += width * ROWS) *columns[i] = memory;
    pass->weights = memory;
    pass->slopes = memory += BLOCK * ROWS;
    memory += BLOCK * ROWS;
    place_keys(&pass->prefix, &memory, prefix, width, backward);
    place_keys(&pass->own, &memory, own, width, backward);
    return true;
}

static void change_prefix(Pass *pass, long first, long count, bool backward) {
    if (pass->prefix.first == first && pass->prefix.count == count) return;
    if (backward) add_gradients(pass, &pass->prefix);
    pass->prefix.first = first;
    pass->prefix.count = count;
    pack_keys(pass, &pass->prefix, backward);
}

static int run(const PackedAttention *of, bool backward) {
    Pass pass = {};
    pass.of = of;
    pass.width = padded_to(of->width, UNIT);
    if (!of->num_spans) return 0;
    if (!make_room(&pass, backward)) return 1;
    void (*const passes[2][PARTS])(Pass *) = {
        {forward_rows<1>, forward_rows<2>, forward_rows<3>}, {backward_rows<1>, backward_rows<2>, backward_rows<3>}};
    for (pass.head = 0; pass.head < of->kv_heads; pass.head++) {
        pass.prefix.count = 0;
        for (long s = 0; s < of->num_spans; s++) {
            const int32_t *span = of->spans + 5 * s;
            long begin = span[0] > of->begin ? span[0] : of->begin;
            long end = span[0] + span[1] < of->end ? span[0] + span[1] : of->end;
            if (begin >= end) continue;
            change_prefix(&pass, span[2], span[3], backward);
            pass.own.first = span[4];
            pass.own.count = of->visible[end - 1];
            pack_keys(&pass, &pass.own, backward);
            long rows = (end - begin) * of->group;
            for (long first = 0; first < rows; first += ROWS) {
                set_rows(&pass, begin, first, rows - first < ROWS ? rows - first : ROWS);
                passes[backward][(pass.count - 1) / VL](&pass);
            }
            if (backward) add_gradients(&pass, &pass.own);
        }
        if (backward) add_gradients(&pass, &pass.prefix);
    }
    if (room.size > KEPT) room.resize(0);
    return 0;
}

extern "C" int envgrad_packed_attention_forward(const PackedAttention *of) { return run(of, false); }
extern "C" int envgrad_packed_attention_backward(const PackedAttention *of) { return run(of, true); }
