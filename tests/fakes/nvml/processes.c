/* NVML: processes, their utilisation and their accounting. */
#include "fake.h"

typedef struct { u32 pid; u64 bytes; u32 gi, ci; } ProcessInfo;

static int here(const Mig *m, int gi, int ci) { return !m || (gi == m->gi && ci == m->ci); }

/* An entry of the size that this driver writes; what lies behind the known fields is what newer drivers add. */
static void write_entry(const Gpu *g, char *infos, u32 n, ProcessInfo info) {
    size_t size = g->entry ? (size_t)g->entry : sizeof info;
    if (g->scrambled) info.pid = n % 2 ? 0 : 4000000000u + n;
    memset(infos + n * size, 0, size);
    memcpy(infos + n * size, &info, size < sizeof info ? size : sizeof info);
}

/* Processes written down, and the simulated ones of `g` (NULL: none) that are in the list of those that compute, or draw. */
static Return list(const Gpu *from_gpu, const Process *from, int available, const Gpu *g, int draw, const Mig *m, u32 *count, void *infos) {
    u32 n = 0;
    for (int i = 0; i < available; i++) {
        if (!here(m, from[i].gi, from[i].ci)) continue;
        if (infos && n < *count) write_entry(from_gpu, infos, n, (ProcessInfo){from[i].pid, from[i].bytes, (u32)from[i].gi, (u32)from[i].ci});
        n++;
    }
    for (int i = 0; g && i < g->workers; i++) {
        const Worker *w = &g->worker[i];
        if (!w->running || !here(m, w->gi, w->ci) || (draw ? !w->graphics : w->graphics == 1)) continue;
        if (infos && n < *count) write_entry(from_gpu, infos, n, (ProcessInfo){w->pid, w->bytes, (u32)w->gi, (u32)w->ci});
        n++;
    }
    Return rc = n > *count ? INSUFFICIENT_SIZE : OK;
    *count = n;
    return rc;
}
Return nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, ProcessInfo *infos) {
    BEGIN DEVICE rc = list(g, g->process, g->processes, g, 0, m, count, infos); END
}
Return nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, u32 *count, ProcessInfo *infos) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    rc = list(g, g->drawer, g->drawers, g, 1, m, count, infos);
    END
}
Return nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, u32 *count, ProcessInfo *infos) {
    BEGIN DEVICE rc = list(g, g->client, g->clients, NULL, 0, m, count, infos); END
}

/* One entry per process that did something since then: literal, or folded from the ring, one runner per sample. Samples
 * that name no living process do not count at all. */
static u32 utilisations(Gpu *g, u64 since, ProcessBusy *found, u32 room) {
    u32 n = 0, seen = 0;
    for (int i = 0; i < g->entries && n < room; i++) if (g->process_busy[i].at > since) found[n++] = g->process_busy[i];
    for (int i = 0; g->simulated && i < g->samples; i++) {
        const Sample *s = &g->sample[i];
        if (s->at <= since || !s->pid || !worker_of(g, s->pid, 1)) continue;
        seen++;
        u32 k = 0;
        while (k < n && found[k].pid != s->pid) k++;
        if (k == room) continue;
        if (k == n) found[n++] = (ProcessBusy){s->at, s->pid, 0};
        found[k].percent += s->util;
        found[k].at = s->at;
    }
    for (u32 k = (u32)g->entries; g->simulated && k < n; k++) found[k].percent = found[k].percent / seen / 100;
    for (int k = 0; k < g->garbage && n < room; k++) found[n++] = (ProcessBusy){now_us, 4000000000u + (u32)k, k % 2 ? 57 : 250};
    return n;
}
typedef struct { u32 pid; u64 at; u32 sm, memory, encoder, decoder; } ProcessUtilization;
Return nvmlDeviceGetProcessUtilization(void *device, ProcessUtilization *samples, u32 *count, u64 since) {
    ProcessBusy found[MAX_ENTRIES];
    BEGIN DEVICE
    if (m || g->migmode) REFUSE(NOT_SUPPORTED);
    if (!samples) { *count = 100; REFUSE(INSUFFICIENT_SIZE); }
    u32 n = g->sampler ? utilisations(g, since, found, *count < MAX_ENTRIES ? *count : MAX_ENTRIES) : 0;
    for (u32 i = 0; i < n; i++) samples[i] = (ProcessUtilization){found[i].pid, found[i].at, found[i].percent, 0, 0, 0};
    *count = n;
    if (!n) rc = NOT_FOUND;
    if (n) GROW(&samples[n - 1]);
    END
}
typedef struct { u64 at; u32 pid, sm, memory, encoder, decoder, jpeg, ofa; } ProcessUtilizationInfo;
typedef struct { u32 version, count; u64 since; ProcessUtilizationInfo *infos; } ProcessesUtilizationInfo;
Return nvmlDeviceGetProcessesUtilizationInfo(void *device, ProcessesUtilizationInfo *query) {
    ProcessBusy found[MAX_ENTRIES];
    BEGIN DEVICE
    if (m || g->migmode) REFUSE(NOT_SUPPORTED);
    if (!query->infos) { query->count = 100; REFUSE(INSUFFICIENT_SIZE); }
    u32 n = utilisations(g, query->since, found, query->count < MAX_ENTRIES ? query->count : MAX_ENTRIES);
    for (u32 i = 0; i < n; i++) query->infos[i] = (ProcessUtilizationInfo){found[i].at, found[i].pid, found[i].percent, 0, 0, 0, 0, 0};
    query->count = n;
    if (!n) rc = NOT_FOUND;
    END
}

/* --- accounting: every device sample counts for one process, and none is missed --------------------------- */

Return nvmlDeviceGetAccountingMode(void *device, u32 *mode) {
    BEGIN DEVICE
    if (g->migmode) REFUSE(NOT_SUPPORTED);
    *mode = (u32)g->accounting;
    GROW(mode);
    END
}
Return nvmlDeviceSetAccountingMode(void *device, u32 mode) {
    BEGIN DEVICE
    if (m || g->migmode) REFUSE(NOT_SUPPORTED);
    g->accounting = (int)mode;
    END
}
Return nvmlDeviceGetAccountingBufferSize(void *device, u32 *size) { BEGIN DEVICE *size = 4000; GROW(size);
    END }
Return nvmlDeviceGetAccountingPids(void *device, u32 *count, u32 *pids) {
    BEGIN DEVICE
    if (!g->accounting || g->migmode) REFUSE(NOT_SUPPORTED);
    u32 n = 0;
    for (int i = 0; i < g->workers && n < *count; i++) {
        if (!g->worker[i].running && foreign_namespace) continue;
        pids[n++] = g->worker[i].pid;
    }
    *count = n;
    if (n) GROW(&pids[n - 1]);
    END
}
static u32 count_of(const Gpu *g, const Worker *w) { return (u32)((w->running ? g->sample_count : w->until) - w->since); }
typedef struct { u32 gpu, memory; u64 max_memory, time, start; u32 running, reserved[5]; } Stats;
Return nvmlDeviceGetAccountingStats(void *device, u32 pid, Stats *stats) {
    BEGIN DEVICE
    if (!g->accounting || g->migmode) REFUSE(NOT_SUPPORTED);
    Worker *w = worker_of(g, pid, 0);
    if (!w || (!w->running && foreign_namespace)) REFUSE(NOT_FOUND);
    u32 count = count_of(g, w);
    memset(stats, 0, sizeof *stats);
    stats->gpu = count ? (u32)(w->sum / count / 100) : 0;
    stats->max_memory = w->bytes;
    stats->time = w->running ? 0 : (w->ended - w->started) / 1000;
    stats->start = w->started;
    stats->running = (u32)w->running;
    GROW(stats);
    END
}
typedef struct { u32 pid, running, gpu, memory; u64 max_memory; u32 count; u64 sum, memory_sum, time, start; } Stats2;
Return nvmlDeviceGetAccountingStats_v2(void *device, Stats2 *stats) {
    BEGIN DEVICE
    if (!g->accounting || g->migmode) REFUSE(NOT_SUPPORTED);
    u32 pid = stats->pid;
    Worker *w = worker_of(g, pid, 0);
    if (!w || (!w->running && foreign_namespace)) REFUSE(NOT_FOUND);
    u32 count = count_of(g, w);
    *stats = (Stats2){pid, (u32)w->running, count ? (u32)(w->sum / count / 100) : 0, 0, w->bytes, count, w->sum, 0,
                      w->running ? 0 : (w->ended - w->started) / 1000, w->started};
    GROW(stats);
    END
}
