// The forward of a Llama-like decoder over ragged rows, each token attending to the past of its slot, in one call.
//
// Threads share each product by its panels, and attention by tokens and key heads; between them are barriers.
#include "heads.h"
#include "pool.h"
#include "product.h"

struct Layer {
    const float *before, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias;
    const float *between, *gate_up, *gate_up_bias, *down, *down_bias;
    float *keys, *values;
};

struct Model {
    int32_t layers, width, heads, kv_heads, size, mlp, vocabulary;
    float epsilon, query_epsilon, scaling;
    const float *table, *norm, *head, *head_bias;
    const float *cosine, *sine;  // (positions, size / 2)
    const Layer *layer;
    int32_t blocks;  // of keys, in a slot
    Pool *pool;
};

struct Step {
    int32_t tokens, kept;
    const int32_t *ids, *slots, *positions;
    const int32_t *sources, *shared;  // each token's row has its first tokens in common with another slot
    const int32_t *keep;  // tokens whose logits are wanted, ascending
    float *logits;        // (kept, padded vocabulary)
    float *room;          // room_of() floats
};

// Where a step's intermediate results lie in its room.
struct Room {
    long x_width, qkv_width, heads_width, mlp_width, scores;
    float *x, *qkv, *attended, *hidden;
    float *normed[2];  // first thread's, and the distance to the next one's
    float *scores_of;
};

static Room room_for(const Model *model, int tokens, float *at) {
    Room room;
    room.x_width = padded(model->width, NR);
    room.qkv_width = padded((long)(model->heads + 2 * model->kv_heads) * model->size, NR);
    room.heads_width = (long)model->heads * model->size;
    room.mlp_width = padded(model->mlp, VL);
    room.scores = MOST * padded((long)(model->blocks + 1) * VL, 2 * VL);  // two parts, each of whole pairs of blocks
    room.x = at;
    room.qkv = room.x + tokens * room.x_width;
    room.attended = room.qkv + tokens * room.qkv_width;
    room.hidden = room.attended + padded(tokens * room.heads_width, VL);
    room.normed[0] = room.hidden + tokens * room.mlp_width;
    room.scores_of = room.normed[0] + model->pool->threads * tokens * room.x_width;
    room.normed[1] = room.scores_of + model->pool->threads * room.scores;
    return room;
}

INLINE void normalize(const float *x, const float *weight, int size, float epsilon, float *y) {
    vf squares = splat(0.0f);
    int whole = size / VL * VL;
    for (int i = 0; i < whole; i += VL) squares += load(x + i) * load(x + i);
    float total = sum_of(squares);
    for (int i = whole; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf(total / size + epsilon);
    for (int i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

static void normalize_all(const Model *model, const Room *room, int tokens, const float *weight, float *y) {
    for (int t = 0; t < tokens; t++)
        normalize(room->x + t * room->x_width, weight, model->width, model->epsilon, y + t * room->x_width);
}

// Rotate a token's queries and keys, and store its keys and values.
static void rotate_and_store(const Model *model, const Layer *layer, const Step *step, const Room *room, int t) {
    int size = model->size, half = size / 2, slot = step->slots[t], position = step->positions[t];
    int value_width = padded(size, VL);
    float *qkv = room->qkv + t * room->qkv_width;
    const float *cosine = model->cosine + (long)position * half, *sine = model->sine + (long)position * half;
    for (int h = 0; h < model->heads + model->kv_heads; h++) {
        float *x = qkv + (long)h * size;
        const float *norm = h < model->heads ? layer->query_norm : layer->key_norm;
        if (norm) normalize(x, norm, size, model->query_epsilon, x);
        float scale = h < model->heads ? model->scaling : 1.0f;
        for (int i = 0; i < half; i++) {
            float a = x[i] * scale, b = x[i + half] * scale;
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = b * cosine[i] + a * sine[i];
        }
    }
    for (int j = 0; j < model->kv_heads; j++) {
        long head = (long)slot * model->kv_heads + j;
        const float *key = qkv + (long)(model->heads + j) * size, *value = key + (long)model->kv_heads * size;
        float *keys = layer->keys + (head * model->blocks + position / VL) * size * VL + position % VL;
        float *values = layer->values + (head * model->blocks * VL + position) * value_width;
        for (int i = 0; i < size; i++) keys[i * VL] = key[i];
        memcpy(values, value, size * sizeof(float));
    }
}

// The tokens of one thread, by the number of keys they attend to.
static void attend_share(const Model *model, const Layer *layer, const Step *step, const Room *room, int thread) {
    int size = model->size, group = model->heads / model->kv_heads, threads = model->pool->threads;
    long value_width = padded(size, VL), key_size = (long)model->blocks * size * VL, all = 0, done = 0;
    long value_size = (long)model->blocks * VL * value_width;
    for (int t = 0; t < step->tokens; t++) all += step->positions[t] + 1 + VL;
    long from = all * thread / threads, to = all * (thread + 1) / threads;
    float *scores = room->scores_of + thread * room->scores;
    for (int t = 0; t < step->tokens && done < to; done += step->positions[t++] + 1 + VL) {
        if (done < from) continue;
        for (int j = 0; j < model->kv_heads; j++) {
            long own = (long)step->slots[t] * model->kv_heads + j;
            long other = (long)step->sources[t] * model->kv_heads + j;
            Past past = {layer->keys + other * key_size, layer->values + other * value_size,
                         layer->keys + own * key_size, layer->values + own * value_size, step->shared[t] / VL * VL,
                         step->positions[t] + 1};
            attend_heads(group, room->qkv + t * room->qkv_width + (long)j * group * size, size, &past, scores,
                         room->scores / MOST, room->attended + t * room->heads_width + (long)j * group * size);
        }
    }
}

// From here on only the tokens that are kept: their rows move to the front.
static void keep_rows(const Step *step, const Room *room) {
    for (int i = 0; i < step->kept; i++) {
        int t = step->keep[i];
        if (t == i) continue;
        memmove(room->x + i * room->x_width, room->x + t * room->x_width, room->x_width * sizeof(float));
        memmove(room->attended + i * room->heads_width, room->attended + t * room->heads_width,
                room->heads_width * sizeof(float));
    }
}

struct Call {
    const Model *model;
    const Step *step;
};

static void forward(Pool *pool, int thread, void *argument) {
    const Model *model = ((Call *)argument)->model;
    const Step *step = ((Call *)argument)->step;
    Room room = room_for(model, step->tokens, step->room);
    float *normed = room.normed[0] + (long)thread * step->tokens * room.x_width;
    int threads = pool->threads, tokens = step->tokens;
    auto share = [&](long n, int part) { return (int)(n * (thread + part) / threads); };
    long x_panels = room.x_width / NR, qkv_panels = room.qkv_width / NR, mlp_panels = room.mlp_width / VL;
    long head_panels = padded(model->vocabulary, NR) / NR;

    for (int t = share(tokens, 0); t < share(tokens, 1); t++) {
        float *x = room.x + t * room.x_width;
        memcpy(x, model->table + (long)step->ids[t] * model->width, model->width * sizeof(float));
        for (int i = model->width; i < room.x_width; i++) x[i] = 0.0f;
    }
    barrier(pool);
    for (int number = 0; number < model->layers; number++) {
        const Layer *layer = model->layer + number;
        normalize_all(model, &room, tokens, layer->before, normed);
        product<STORE>(normed, room.x_width, tokens, layer->qkv, model->width, layer->qkv_bias, room.qkv,
                       room.qkv_width, share(qkv_panels, 0), share(qkv_panels, 1));
        barrier(pool);
        for (int t = share(tokens, 0); t < share(tokens, 1); t++) rotate_and_store(model, layer, step, &room, t);
        barrier(pool);
        attend_share(model, layer, step, &room, thread);
        barrier(pool);
        if (number == model->layers - 1 && step->kept < tokens) {
            if (thread == 0) keep_rows(step, &room);
            tokens = step->kept;
            barrier(pool);
        }
        product<ADD>(room.attended, room.heads_width, tokens, layer->out, (int)room.heads_width, layer->out_bias, room.x,
                     room.x_width, share(x_panels, 0), share(x_panels, 1));
        barrier(pool);
        normalize_all(model, &room, tokens, layer->between, normed);
        product<GATE>(normed, room.x_width, tokens, layer->gate_up, model->width, layer->gate_up_bias, room.hidden,
                      room.mlp_width, share(mlp_panels, 0), share(mlp_panels, 1));
        barrier(pool);
        product<ADD>(room.hidden, room.mlp_width, tokens, layer->down, model->mlp, layer->down_bias, room.x,
                     room.x_width, share(x_panels, 0), share(x_panels, 1));
        barrier(pool);
    }
    normalize_all(model, &room, tokens, model->norm, normed);
    product<STORE>(normed, room.x_width, tokens, model->head, model->width, model->head_bias, step->logits,
                   padded(model->vocabulary, NR), share(head_panels, 0), share(head_panels, 1));
}

// What packing a weight takes: rows of up to two tensors, taken in turn by halves of a panel where they are gated.
struct Packing {
    const float *rows, *others;  // (n, k); `others` NULL, or (n, k) too
    int32_t n, k;
    float *panels;
};

static void pack(Pool *pool, int thread, void *argument) {
    const Packing *packing = (Packing *)argument;
    long step = packing->others ? VL : NR, panels = padded(packing->n, step) / step;
    for (long p = panels * thread / pool->threads; p < panels * (thread + 1) / pool->threads; p++) {
        const float *rows[NR];
        for (int c = 0; c < NR; c++) {
            const float *from = packing->others && c >= VL ? packing->others : packing->rows;
            long row = p * step + (packing->others ? c % VL : c);
            rows[c] = row < packing->n ? from + row * packing->k : NULL;
        }
        pack_panel(packing->panels + p * packing->k * NR, rows, packing->k);
    }
}

extern "C" {
int envgrad_kernels_version() { return 1; }
int envgrad_vector() { return VL; }
Pool *envgrad_pool_new(int threads) { return pool_new(threads); }
int envgrad_pool_threads(const Pool *pool) { return pool->threads; }
void envgrad_pool_free(Pool *pool) { pool_free(pool); }
long envgrad_room(const Model *model, int tokens) { return room_for(model, tokens, NULL).normed[1] - (float *)NULL; }
void envgrad_pack(Pool *pool, Packing *packing) { pool_run(pool, pack, packing); }
void envgrad_forward(const Model *model, const Step *step) {
    Call call = {model, step};
    pool_run(model->pool, forward, &call);
}
}
