// Logits -> tokens and log-probs, a row at a time: softmax, and the token where its cumulative sum passes a row's draw.
#include "pool.h"
#include "vec.h"

enum { BLOCK = 512 };  // tokens whose weights are summed together

struct Draw {
    int32_t rows, vocabulary;
    long stride;  // of a row of logits
    const float *logits, *temperature;
    const uint8_t *greedy;      // NULL where no row is
    const uint64_t *seeds;
    const int32_t *positions;   // index of the token in its row's answer
    int32_t *tokens;
    double *logprobs;           // NaN where a row's logits are not finite
    float *room;                // vocabulary, in whole vectors, for each thread
};

// One number in (0, 1) of a seed and a counter: SplitMix64 (Steele et al. 2014) of the seed, then of the counter.
static double uniform(uint64_t state, uint64_t counter) {
    const uint64_t step = 0x9E3779B97F4A7C15ull;
    const uint64_t words[2] = {step, (counter + 1) * step};
    for (int i = 0; i < 2; i++) {
        state += words[i];
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
        state ^= state >> 31;
    }
    return ((double)(state >> 16) + 0.5) * 0x1p-48;
}

// Where the running sum of `weights` passes `aim`: the first such token, or the last with any weight.
static int passing(const float *weights, int from, int to, double aim) {
    int last = from;
    double sum = 0.0;
    for (int i = from; i < to; i++) {
        sum += weights[i];
        if (weights[i] > 0.0f) {
            last = i;
            if (sum > aim) return i;
        }
    }
    return last;
}

static void draw_row(const Draw *draw, int row, float *weights) {
    const float *logits = draw->logits + row * draw->stride;
    int n = draw->vocabulary, whole = n / VL * VL, padded = (n + VL - 1) / VL * VL, best = 0;
    vf warmth = splat(draw->temperature[row]);
    for (int i = 0; i < whole; i += VL) store(weights + i, load(logits + i) / warmth);
    for (int i = whole; i < n; i++) weights[i] = logits[i] / draw->temperature[row];
    for (int i = n; i < padded; i++) weights[i] = -__builtin_inff();
    vf most_of = load(weights);
    for (int i = VL; i < padded; i += VL) most_of = vmax(load(weights + i), most_of);
    float most = max_of(most_of);
    bool greedy = draw->greedy && draw->greedy[row];
    if (greedy) while (best < n - 1 && weights[best] != most) best++;
    double total = 0.0;
    for (int from = 0; from < padded; from += BLOCK) {
        vf sum = splat(0.0f);
        for (int i = from; i < padded && i < from + BLOCK; i += VL) {
            vf weight = vexp(load(weights + i) - splat(most));
            store(weights + i, weight);
            sum += weight;
        }
        total += sum_of(sum);
    }
    int token = best;
    if (!greedy) {
        double aim = uniform(draw->seeds[row], draw->positions[row]) * total, done = 0.0;
        int from = 0;
        for (; from + BLOCK < n; from += BLOCK) {  // the blocks' sums once more: cheaper than keeping them
            vf sum = splat(0.0f);
            for (int i = from; i < from + BLOCK; i += VL) sum += load(weights + i);
            if (done + sum_of(sum) > aim) break;
            done += sum_of(sum);
        }
        token = passing(weights, from, from + BLOCK < n ? from + BLOCK : n, aim - done);
    }
    draw->tokens[row] = token;
    double score = (double)(logits[token] / draw->temperature[row]) - most;
    draw->logprobs[row] = total > 0.0 && total < (double)__builtin_inff() ? score - __builtin_log(total)
                                                                          : (double)__builtin_nanf("");
}

static void draw_share(Pool *pool, int thread, void *argument) {
    const Draw *draw = (const Draw *)argument;
    float *weights = draw->room + (long)thread * ((draw->vocabulary + VL - 1) / VL * VL);
    for (int row = draw->rows * thread / pool->threads; row < draw->rows * (thread + 1) / pool->threads; row++)
        draw_row(draw, row, weights);
}

// On the pool's threads, or, without one, on the caller's.
extern "C" void envgrad_draw(Pool *pool, Draw *draw) {
    Pool alone = {.threads = 1};
    pool_run(pool ? pool : &alone, draw_share, draw);
}
