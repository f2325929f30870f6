/* The machine: its state, its virtual clock, and what every NVML call passes first (faults, hangs, handles). */
#include "fake.h"

Gpu gpus[MAX_GPUS];
Fail fails[MAX_FAILS];
int gpu_count, fail_count, initialised, init_error, replaced, reloaded, foreign_namespace;
u32 generation;
u64 now_us;
long long wall_us;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t released = PTHREAD_COND_INITIALIZER;

static struct { const char *name; u32 count; } calls[MAX_FUNCTIONS];
static Handle handles[MAX_GPUS][MAX_MIG + 1];

/* --- faults, counters, handles ------------------------------------------------------------------- */

u32 fakeNvmlCalls(const char *function) {
    u32 count = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_FUNCTIONS && calls[i].name; i++) if (!strcmp(calls[i].name, function)) count = calls[i].count;
    pthread_mutex_unlock(&mutex);
    return count;
}

static void count_call(const char *function) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!calls[i].name) calls[i].name = function;
        if (calls[i].name == function || !strcmp(calls[i].name, function)) { calls[i].count++; return; }
    }
}

static int due(Fail *list, int count, const char *function) {
    for (int i = 0; i < count; i++) {
        Fail *f = &list[i];
        if (!f->times || (strcmp(f->function, function) && strcmp(f->function, "*"))) continue;
        if (f->after) { f->after--; continue; }
        if (f->times > 0) f->times--;
        return f->code;
    }
    return OK;
}

Return faulty(Fail *list, int *count, const char *function) {
    int code = due(list, *count, function);
    if (code != HANGS) return code;
    while (due(list, *count, function) == HANGS) pthread_cond_wait(&released, &mutex);
    return OK;
}

char grown_function[64];
int grown_bytes;

void grow(const char *function, void *end) {
    if (grown_bytes && (!strcmp(grown_function, function) || !strcmp(grown_function, "*"))) memset(end, 0x42, (size_t)grown_bytes);
}

Return enter(const char *function) {
    load_state();
    count_call(function);
    if (!initialised) return UNINITIALIZED;
    if (replaced) return REPLACED;
    if (reloaded) return UNKNOWN;
    return faulty(fails, &fail_count, function);
}

Return enter_device(const char *function, void *device, Gpu **g, Mig **m) {
    Handle *h = device;
    if (!h || (void *)h < (void *)handles || (void *)h >= (void *)(handles + MAX_GPUS)) return INVALID_ARGUMENT;
    if (h->generation != generation || h->gpu >= gpu_count) return INVALID_ARGUMENT;
    *g = &gpus[h->gpu];
    if (h->mig >= 0) {
        *m = &(*g)->mig[h->mig];
        if (h->mig >= (*g)->instances || (*m)->serial != h->serial) return INVALID_ARGUMENT;
    }
    if ((*g)->lost || (*g)->stale) return GPU_IS_LOST;
    return faulty((*g)->fail, &(*g)->fails, function);
}

void *handle_of(Gpu *g, Mig *m) {
    int mig = m ? (int)(m - g->mig) : -1;
    Handle *h = &handles[g->index][mig + 1];
    *h = (Handle){generation, g->index, mig, m ? m->serial : 0};
    return h;
}

/* --- the virtual clock ------------------------------------------------------------------------------ */

static Engine *engine_of(Gpu *g, int gi) { return &g->engine[gi < 0 ? 0 : gi % MAX_MIG]; }

/* How much of its place a process gets: co-runners that together want more than all of it are scaled down. */
static u32 granted(const Gpu *g, const Worker *w) {
    u64 wanted = 0;
    for (int i = 0; i < g->workers; i++) if (g->worker[i].running && g->worker[i].gi == w->gi) wanted += g->worker[i].load;
    return wanted > 1000000 ? (u32)((u64)w->load * 1000000 / wanted) : w->load;
}

u32 load_now(const Gpu *g) {
    u32 load = 0;
    if (g->lost) return 0;
    for (int i = 0; i < g->workers; i++) if (g->worker[i].running && g->worker[i].gi < 0) load += granted(g, &g->worker[i]);
    return load;
}

static u32 slices_of(const Gpu *g, int gi) {
    for (int i = 0; i < g->instances; i++) if (!g->mig[i].hole && g->mig[i].gi == gi) return (u32)g->mig[i].gi_slices;
    return 0;
}

static void run(Gpu *g, u64 microseconds) {
    u64 device = 0;
    for (int i = 0; i < g->workers && !g->lost; i++) {
        Worker *w = &g->worker[i];
        if (!w->running) continue;
        u64 busy = granted(g, w) * microseconds;
        w->busy += busy;
        Engine *e = engine_of(g, w->gi);
        e->busy += busy;
        e->sm += busy / 1000000 * g->sm_share;
        e->tensor += busy / 1000000 * g->tensor_share;
        device += w->gi < 0 ? busy : busy * slices_of(g, w->gi) / 7;
    }
    g->slot_busy += device;
    g->microjoules += (g->idle_milliwatts * microseconds + (u64)((double)g->extra_milliwatts * (double)device / 1e6)) / 1000;
}

/* Who runs at this instant: time slices go round in proportion to the load; with `noise` it is anybody's guess. */
static Worker *runner(Gpu *g) {
    u64 wanted = 0, total = load_now(g);
    if (!total) return NULL;
    if (g->noise) {
        g->noise = g->noise * 1664525u + 1013904223u;
        wanted = (u64)(g->noise >> 8) * total >> 24;
    } else {
        wanted = now_us % SLICE_CYCLE_US * total / SLICE_CYCLE_US;
    }
    for (int i = 0; i < g->workers; i++) {
        Worker *w = &g->worker[i];
        if (!w->running || w->gi >= 0) continue;
        u32 mine = granted(g, w);
        if (wanted < mine) return w;
        wanted -= mine;
    }
    return NULL;
}

static void take_sample(Gpu *g) {
    Worker *w = runner(g);
    u32 util = (u32)(g->slot_busy / PERIOD_US / 100);
    g->slot_busy = g->slot_us = 0;
    if (g->migmode || g->lost) return;
    if (g->samples == RING) {
        memmove(g->sample, g->sample + 1, sizeof g->sample[0] * (RING - 1));
        g->samples--;
    }
    g->sample[g->samples++] = (Sample){now_us + (u64)wall_us, w ? w->pid : 0, util};
    g->sample_count++;
    if (w && g->accounting) w->sum += util;
}

void pass_time(u64 to_us) {
    while (now_us < to_us) {
        u64 step = to_us - now_us;
        for (int i = 0; i < gpu_count; i++) {
            u64 left = PERIOD_US - gpus[i].slot_us;
            if (gpus[i].simulated && left < step) step = left;
        }
        now_us += step;
        for (int i = 0; i < gpu_count; i++) {
            Gpu *g = &gpus[i];
            if (!g->simulated) continue;
            run(g, step);
            g->slot_us += step;
            if (g->slot_us == PERIOD_US) take_sample(g);
        }
    }
}

Worker *worker_of(Gpu *g, u32 pid, int running) {
    for (int i = g->workers - 1; i >= 0; i--) if (g->worker[i].pid == pid && (g->worker[i].running || !running)) return &g->worker[i];
    return NULL;
}

/* The driver keeps the accounting of the last 128 that ended. */
void forget_dead(Gpu *g) {
    int dead = 0;
    for (int i = g->workers - 1; i >= 0; i--) {
        if (g->worker[i].running || ++dead <= MAX_DEAD) continue;
        memmove(&g->worker[i], &g->worker[i + 1], sizeof g->worker[0] * (size_t)(g->workers - i - 1));
        g->workers--;
    }
}
