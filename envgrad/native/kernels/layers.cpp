// What a decoder layer does between its matrix products, forward and backward: norms with what is added before them,
// gated activations, rotations. Rows of numbers lie side by side; threads share the rows.
#include <pthread.h>

#include "vec.h"

enum { BLOCK = 64 };  // rows whose gradients of a norm's weight are summed before they are added to the others'

template <class Do>
struct Share {
    const Do *work;
    int part;
    long begin, end;
};

template <class Do>
static void *do_share(void *given) {
    const Share<Do> *share = (Share<Do> *)given;
    (*share->work)(share->part, share->begin, share->end);
    return NULL;
}

enum { MOST_THREADS = 64 };

// `work(part, begin, end)` for all of `rows`, one part in each thread. A thread that cannot be had is done without.
template <class Do>
static void in_threads(int threads, long rows, const Do &work) {
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    Share<Do> shares[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    bool running[MOST_THREADS] = {};
    for (int part = 0; part < threads; part++)
        shares[part] = {&work, part, rows * part / threads, rows * (part + 1) / threads};
    for (int part = 1; part < threads; part++)
        running[part] = !pthread_create(&ids[part], NULL, do_share<Do>, &shares[part]);
    do_share<Do>(&shares[0]);
    for (int part = 1; part < threads; part++) {
        if (running[part]) pthread_join(ids[part], NULL);
        else do_share<Do>(&shares[part]);
    }
}

// What `each_vector` hands its work: a whole vector, or the `count` numbers that are left of a row.
struct Whole {};
struct Some {
    int count;
};

INLINE vf load(const float *p, Whole) { return load(p); }
INLINE void store(float *p, vf x, Whole) { store(p, x); }

INLINE vf load(const float *p, Some some) {
    vf x = splat(0.0f);
    for (int i = 0; i < some.count; i++) x[i] = p[i];
    return x;
}

INLINE void store(float *p, vf x, Some some) {
    for (int i = 0; i < some.count; i++) p[i] = x[i];
}

template <class Do>
INLINE void each_vector(long n, const Do &work) {
    long i = 0;
    for (; i + VL <= n; i += VL) work(i, Whole{});
    if (i < n) work(i, Some{(int)(n - i)});
}

// y = (x + added) * scale * weight, where scale = 1 / sqrt(mean((x + added)^2) + epsilon); `added` may be NULL.
struct Norm {
    const float *x, *added, *weight;
    float *sum;    // x + added, if there is something added
    float *y;
    float *scale;  // of each row
    int64_t rows, width;
    float epsilon;
    int32_t threads;
};

static void norm_row(const Norm *norm, long row) {
    long n = norm->width, at = row * n;
    const float *x = norm->x + at, *weight = norm->weight;
    vf squares = splat(0.0f);
    if (norm->added) {
        const float *added = norm->added + at;
        float *sum = norm->sum + at;
        each_vector(n, [&](long i, auto size) {
            vf one = load(x + i, size) + load(added + i, size);
            store(sum + i, one, size);
            squares += one * one;
        });
        x = sum;
    } else {
        each_vector(n, [&](long i, auto size) {
            vf one = load(x + i, size);
            squares += one * one;
        });
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / n + norm->epsilon);
    norm->scale[row] = scale;
    float *y = norm->y + at;
    each_vector(n, [&](long i, auto size) {
        store(y + i, load(x + i, size) * splat(scale) * load(weight + i, size), size);
    });
}

// The gradients of x (and of what was added to it, which is the same), and of the weight.
struct NormBack {
    const float *grad;      // of y
    const float *sum_grad;  // of x + added, where that is used elsewhere too; or NULL
    const float *sum, *weight, *scale;
    float *x_grad;
    float *weight_grad;  // (threads, 2, width) zeros; the first of each two are the result of a thread. Or NULL
    int64_t rows, width;
    int32_t threads;
};

static void norm_back_row(const NormBack *norm, long row, float *weight_grad) {
    long n = norm->width, at = row * n;
    const float *grad = norm->grad + at, *x = norm->sum + at, *weight = norm->weight;
    vf products = splat(0.0f), scale = splat(norm->scale[row]);
    each_vector(n, [&](long i, auto size) {
        products += load(grad + i, size) * load(weight + i, size) * load(x + i, size);
    });
    vf along = splat(sum_of(products) / n) * scale * scale * scale;
    float *x_grad = norm->x_grad + at;
    const float *sum_grad = norm->sum_grad ? norm->sum_grad + at : NULL;
    each_vector(n, [&](long i, auto size) {
        vf found = load(grad + i, size) * load(weight + i, size) * scale - load(x + i, size) * along;
        store(x_grad + i, sum_grad ? found + load(sum_grad + i, size) : found, size);
    });
    if (!weight_grad) return;
    each_vector(n, [&](long i, auto size) {
        vf more = load(grad + i, size) * load(x + i, size) * scale;
        store(weight_grad + i, load(weight_grad + i, size) + more, size);
    });
}

static void norm_back_rows(const NormBack *norm, int part, long begin, long end) {
    float *total = norm->weight_grad ? norm->weight_grad + 2 * part * norm->width : NULL;
    float *block = total ? total + norm->width : NULL;
    for (long row = begin; row < end; row += BLOCK) {
        long until = row + BLOCK < end ? row + BLOCK : end;
        for (long one = row; one < until; one++) norm_back_row(norm, one, block);
        for (long i = 0; total && i < norm->width; i++) {
            total[i] += block[i];
            block[i] = 0.0f;
        }
    }
}

// hidden = silu(gate) * up
struct Gated {
    const float *gate, *up;
    float *hidden;
    int64_t count;
    int32_t threads;
};

// vexp goes no further than 88.
INLINE vf sigmoid(vf x) { return x < splat(-88.0f) ? splat(0.0f) : splat(1.0f) / (splat(1.0f) + vexp(-x)); }

static void gated_part(const Gated *gated, long begin, long end) {
    const float *gate = gated->gate + begin, *up = gated->up + begin;
    float *hidden = gated->hidden + begin;
    each_vector(end - begin, [&](long i, auto size) {
        vf x = load(gate + i, size);
        store(hidden + i, x * sigmoid(x) * load(up + i, size), size);
    });
}

struct GatedBack {
    const float *grad, *gate, *up;
    float *gate_grad, *up_grad;
    float *hidden;  // what it was, or NULL
    int64_t count;
    int32_t threads;
};

static void gated_back_part(const GatedBack *back, long begin, long end) {
    const float *grad = back->grad + begin, *gate = back->gate + begin, *up = back->up + begin;
    float *gate_grad = back->gate_grad + begin, *up_grad = back->up_grad + begin;
    float *hidden = back->hidden ? back->hidden + begin : NULL;
    each_vector(end - begin, [&](long i, auto size) {
        vf by = load(grad + i, size), x = load(gate + i, size), other = load(up + i, size);
        vf share = sigmoid(x), active = x * share;
        store(gate_grad + i, by * other * share * (splat(1.0f) + x * (splat(1.0f) - share)), size);
        store(up_grad + i, by * active, size);
        if (hidden) store(hidden + i, active * other, size);
    });
}

// The halves of each head turned by the angles of its row, which are the same for both halves; `x` and `y` may be the
// same.
struct Rotation {
    const float *x;
    const float *cosine, *sine;  // (rows, size)
    float *y;
    int64_t rows;
    int32_t heads, size;
    float direction;  // 1, or -1 for the gradient
    int32_t threads;
};

// A head that is one vector: its halves are exchanged.
INLINE void rotate_vector(const float *x, vf cosine, vf sine, float *y) {
    vf one = load(x), other;
    UNROLL for (int i = 0; i < VL; i++) other[i] = one[i ^ (VL / 2)];
    store(y, one * cosine + other * sine);
}

static void rotate_row(const Rotation *rotation, long row) {
    int size = rotation->size, half = size / 2;
    const float *cosine = rotation->cosine + row * size, *sine = rotation->sine + row * size;
    vf direction = splat(rotation->direction);
    if (size == VL) {
        UNROLL for (int i = 0; i < VL / 2; i++) direction[i] = -direction[i];
        vf c = load(cosine), s = load(sine) * direction;
        for (int head = 0; head < rotation->heads; head++) {
            long at = (row * rotation->heads + head) * size;
            rotate_vector(rotation->x + at, c, s, rotation->y + at);
        }
        return;
    }
    for (int head = 0; head < rotation->heads; head++) {
        long at = (row * rotation->heads + head) * size;
        const float *one = rotation->x + at, *other = one + half;
        float *first = rotation->y + at, *second = first + half;
        each_vector(half, [&](long i, auto part) {
            vf a = load(one + i, part), b = load(other + i, part);
            vf c = load(cosine + i, part), s = load(sine + i, part) * direction;
            store(first + i, a * c - b * s, part);
            store(second + i, b * c + a * s, part);
        });
    }
}

extern "C" {
void envgrad_norm(const Norm *norm) {
    in_threads(norm->threads, norm->rows, [=](int, long begin, long end) {
        for (long row = begin; row < end; row++) norm_row(norm, row);
    });
}

void envgrad_norm_back(const NormBack *norm) {
    in_threads(norm->threads, norm->rows,
               [=](int part, long begin, long end) { norm_back_rows(norm, part, begin, end); });
}

void envgrad_gated(const Gated *gated) {
    in_threads(gated->threads, gated->count, [=](int, long begin, long end) { gated_part(gated, begin, end); });
}

void envgrad_gated_back(const GatedBack *back) {
    in_threads(back->threads, back->count, [=](int, long begin, long end) { gated_back_part(back, begin, end); });
}

void envgrad_rotate(const Rotation *rotation) {
    in_threads(rotation->threads, rotation->rows, [=](int, long begin, long end) {
        for (long row = begin; row < end; row++) rotate_row(rotation, row);
    });
}
}
