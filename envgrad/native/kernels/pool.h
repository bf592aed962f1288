// A few threads that work on one task at a time, and meet at barriers inside it.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum { SPINS = 4000 };  // rounds of waiting, some dozens of microseconds, before a thread gives its core away

struct Pool;
typedef void (*Work)(Pool *, int thread, void *argument);

struct Pool {
    int threads;  // the caller's included
    pid_t owner;  // process in which the workers are
    pthread_t *workers;
    Work work;
    void *argument;
    int32_t generation;  // tasks given out
    int32_t running;     // workers that have not finished the task
    int32_t arrived, phase;
    int32_t ending;
    pthread_mutex_t mutex;
    pthread_cond_t given;
};

struct Seat {
    Pool *pool;
    int thread;
};

static inline int32_t seen(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void tell(int32_t *p, int32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }

// Wait for all threads of the task.
static inline void barrier(Pool *pool) {
    if (pool->threads == 1) return;
    int32_t phase = seen(&pool->phase);
    if (__atomic_fetch_add(&pool->arrived, 1, __ATOMIC_ACQ_REL) == pool->threads - 1) {
        tell(&pool->arrived, 0);
        tell(&pool->phase, phase + 1);
        return;
    }
    for (int spins = 0; seen(&pool->phase) == phase; spins++) {
        if (spins < SPINS) PAUSE();
        else sched_yield();
    }
}

static void *pool_worker(void *given) {
    Seat seat = *(Seat *)given;
    free(given);
    Pool *pool = seat.pool;
    int32_t done = 0;
    for (;;) {
        for (int spins = 0; spins < SPINS && seen(&pool->generation) == done; spins++) PAUSE();
        if (seen(&pool->generation) == done) {
            pthread_mutex_lock(&pool->mutex);
            while (pool->generation == done) pthread_cond_wait(&pool->given, &pool->mutex);
            pthread_mutex_unlock(&pool->mutex);
        }
        done++;
        if (seen(&pool->ending)) return NULL;
        pool->work(pool, seat.thread, pool->argument);
        __atomic_fetch_sub(&pool->running, 1, __ATOMIC_ACQ_REL);
    }
}

static inline void pool_run(Pool *pool, Work work, void *argument) {
    if (pool->owner != getpid()) pool->threads = 1;  // a forked child has none of the workers
    if (pool->threads == 1) {
        work(pool, 0, argument);
        return;
    }
    pool->work = work;
    pool->argument = argument;
    tell(&pool->running, pool->threads - 1);
    pthread_mutex_lock(&pool->mutex);
    tell(&pool->generation, pool->generation + 1);
    pthread_cond_broadcast(&pool->given);
    pthread_mutex_unlock(&pool->mutex);
    work(pool, 0, argument);
    for (int spins = 0; seen(&pool->running); spins++) {
        if (spins < SPINS) PAUSE();
        else sched_yield();
    }
}

// NULL where threads cannot be had.
static inline Pool *pool_new(int threads) {
    Pool *pool = (Pool *)calloc(1, sizeof(Pool));
    if (!pool) return NULL;
    pool->threads = 1;
    pool->owner = getpid();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->given, NULL);
    pool->workers = (pthread_t *)calloc(threads, sizeof(pthread_t));
    if (!pool->workers) return pool;
    for (int thread = 1; thread < threads; thread++) {
        Seat *seat = (Seat *)malloc(sizeof(Seat));
        if (!seat) break;
        *seat = (Seat){pool, thread};
        if (pthread_create(&pool->workers[thread], NULL, pool_worker, seat)) {
            free(seat);
            break;
        }
        pool->threads = thread + 1;
    }
    return pool;
}

static inline void pool_free(Pool *pool) {
    if (pool->owner != getpid()) return;  // what waits for workers would wait for ever
    pthread_mutex_lock(&pool->mutex);
    tell(&pool->ending, 1);  // before the task that workers wait for, also as those see it who hold no lock
    tell(&pool->generation, pool->generation + 1);
    pthread_cond_broadcast(&pool->given);
    pthread_mutex_unlock(&pool->mutex);
    for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->workers[thread], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->given);
    free(pool->workers);
    free(pool);
}
