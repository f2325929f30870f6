/* What a test says to the machine, one line at a time: through fakeNvmlTell, or in the file named by
 * FAKE_NVML_STATE, which is read again when it changes. Figures belong to the last `gpu` (or `on`), if any.
 *
 * machine:    reset (nothing there, the library not started) · process (a new one: not started) · initerr CODE · fail FUNCTION CODE [AFTER [TIMES]] · hang FUNCTION · unhang · clear (no more faults)
 *             wall MICROSECONDS (what the system clock is ahead) · at MICROSECONDS (the clock) · replaced 0|1 · reload · namespace 0|1 (1: dead pids are hidden)
 *             grow FUNCTION BYTES (its structures are that much larger than the binding's; '*': of every function)
 * gpu:        gpu UUID NAME ('_' is a blank) · on INDEX · minor N (else the index) · mem TOTAL USED · lost · found · util GPU MEMORY
 *             power MILLIWATT MILLIJOULE · clocks SM MEMORY · temp C · ecc CORRECTED UNCORRECTED · throttle BITS
 *             remap PENDING FAILED · recovery ACTION (what the driver asks for)
 *             sample MICROSECONDS PERCENT · proc PID BYTES [GI CI] · gfx PID BYTES · mps PID BYTES · pu MICROSECONDS PID PERCENT
 *             garbage N (readings no process made) · entry BYTES (size of an entry in the lists of processes, else 24) · scrambled 0|1 (they name no process) · xid CODE · accounting 0|1 · gpm 0|1 · sampler 0|1 · addressing 0|1|2 (2: coherent)
 * simulated:  simulate IDLE_MW EXTRA_MW · load PID PPM [BYTES [GI CI]] · exit PID · noise SEED · wrap MILLIJOULES
 *             shares SM_PPM TENSOR_PPM (of the busy time) · draw PID 0|1|2 (it computes, draws, does both)
 * MIG:        migmode [0|1|SLICES] (1: seven) · migclear · mighole · mig UUID GI CI SLICES PROFILE TOTAL USED [GI_SLICES [PROFILE_ID START]]
 */
#include "fake.h"
#include <sys/stat.h>

static Gpu *current;
static int serial;
static struct timespec loaded_at;

static void on_machine(const char *key, const char *rest, Fail *list, int *count) {
    Fail f = {.times = -1};
    if (!strcmp(key, "initerr")) init_error = atoi(rest);
    else if (!strcmp(key, "namespace")) foreign_namespace = atoi(rest);
    else if (!strcmp(key, "replaced")) replaced = atoi(rest);
    else if (!strcmp(key, "grow")) sscanf(rest, "%63s %d", grown_function, &grown_bytes);
    else if (!strcmp(key, "reset")) {
        memset(gpus, 0, sizeof gpus);
        gpu_count = fail_count = init_error = replaced = reloaded = foreign_namespace = initialised = 0;
        now_us = 0;
        wall_us = 0;
        grown_bytes = 0;
        generation++;
        current = NULL;
        void_events();
    } else if (!strcmp(key, "process")) {
        initialised = 0;
        generation++;
        void_events();
    } else if (!strcmp(key, "wall")) wall_us = strtoll(rest, NULL, 10);
    else if (!strcmp(key, "at")) pass_time(strtoull(rest, NULL, 10));
    else if (!strcmp(key, "clear") || !strcmp(key, "unhang")) {
        fail_count = 0;
        for (int i = 0; i < gpu_count; i++) gpus[i].fails = 0;
        pthread_cond_broadcast(&released);
    } else if (!strcmp(key, "fail") && *count < MAX_FAILS) {
        sscanf(rest, "%63s %d %d %d", f.function, &f.code, &f.after, &f.times);
        list[(*count)++] = f;
    } else if (!strcmp(key, "hang") && *count < MAX_FAILS) {
        sscanf(rest, "%63s", f.function);
        f.code = HANGS;
        list[(*count)++] = f;
    } else if (!strcmp(key, "reload")) {
        reloaded = initialised > 0;
        generation++;
        void_events();
        for (int i = 0; i < gpu_count; i++) {
            Gpu *g = &gpus[i];
            g->microjoules = g->energy_offset = g->samples = g->accounting = 0;
            g->stale = 0;
            for (int w = g->workers - 1; w >= 0; w--) {
                g->worker[w].sum = 0;
                g->worker[w].since = g->sample_count;
            }
        }
    } else if (!strcmp(key, "gpu") && gpu_count < MAX_GPUS) {
        Gpu *g = current = &gpus[gpu_count];
        memset(g, 0, sizeof *g);
        g->index = g->minor = gpu_count++;
        g->gpm = g->sampler = 1;
        g->sm_share = 800000;
        g->tensor_share = 300000;
        sscanf(rest, "%95s %95s", g->uuid, g->name);
        for (char *c = g->name; *c; c++) if (*c == '_') *c = ' ';
    } else if (!strcmp(key, "on") && atoi(rest) < gpu_count) {
        current = &gpus[atoi(rest)];
    }
}

/* A process that begins takes the driver's slot of the one that ended last, and with it the samples in the ring. */
static void inherit(Gpu *g, u32 pid) {
    const Worker *last = g->workers > 1 && !g->worker[g->workers - 2].running ? &g->worker[g->workers - 2] : NULL;
    for (int i = 0; last && i < g->samples; i++) if (g->sample[i].pid == last->pid) g->sample[i].pid = pid;
}

static void on_worker(Gpu *g, const char *key, const char *rest) {
    u32 pid = 0, load = 0;
    u64 bytes = 0;
    int gi = -1, ci = -1;
    int given = sscanf(rest, "%u %u %llu %d %d", &pid, &load, &bytes, &gi, &ci);
    Worker *w = worker_of(g, pid, 1);
    if (!strcmp(key, "exit")) {
        if (!w) return;
        w->running = 0;
        w->ended = now_us;
        w->until = g->sample_count;
        Worker last = *w; /* in the order of their end, so that the oldest is forgotten first */
        size_t after = (size_t)(&g->worker[g->workers] - (w + 1));
        memmove(w, w + 1, after * sizeof *w);
        g->worker[g->workers - 1] = last;
        forget_dead(g);
        return;
    }
    if (!strcmp(key, "draw")) {
        if (w) w->graphics = (int)load;
        return;
    }
    if (!w) {
        if (g->workers == MAX_ENTRIES) return;
        w = &g->worker[g->workers++];
        *w = (Worker){.running = 1, .pid = pid, .gi = gi, .ci = ci, .since = g->sample_count, .started = now_us};
        inherit(g, pid);
    }
    w->load = load;
    if (given > 2) w->bytes = bytes;
}

static void on_list(Gpu *g, const char *key, const char *rest) {
    if (!strcmp(key, "sample") && g->samples < MAX_ENTRIES) {
        Sample *s = &g->sample[g->samples++];
        sscanf(rest, "%llu %u", &s->at, &s->util);
        s->util *= 100;
    } else if ((!strcmp(key, "proc") && g->processes < MAX_ENTRIES) || (!strcmp(key, "gfx") && g->drawers < MAX_ENTRIES)
               || (!strcmp(key, "mps") && g->clients < MAX_ENTRIES)) {
        Process *p = key[0] == 'p' ? &g->process[g->processes++] : key[0] == 'g' ? &g->drawer[g->drawers++] : &g->client[g->clients++];
        long long bytes = 0;
        p->gi = p->ci = -1;
        sscanf(rest, "%u %lld %d %d", &p->pid, &bytes, &p->gi, &p->ci);
        p->bytes = (u64)bytes;
    } else if (!strcmp(key, "pu") && g->entries < MAX_ENTRIES) {
        ProcessBusy *p = &g->process_busy[g->entries++];
        sscanf(rest, "%llu %u %u", &p->at, &p->pid, &p->percent);
    } else if ((!strcmp(key, "mig") || !strcmp(key, "mighole")) && g->instances < MAX_MIG) {
        Mig *m = &g->mig[g->instances++];
        memset(m, 0, sizeof *m);
        m->serial = ++serial;
        m->hole = key[3] != 0;
        int given = sscanf(rest, "%95s %d %d %d %31s %llu %llu %d %d %d", m->uuid, &m->gi, &m->ci, &m->slices, m->profile, &m->total, &m->used, &m->gi_slices, &m->profile_id, &m->start);
        if (given < 8) m->gi_slices = m->slices;
    }
}

static void on_gpu(Gpu *g, const char *key, const char *rest) {
    if (!strcmp(key, "mem")) sscanf(rest, "%llu %llu", &g->total, &g->used);
    else if (!strcmp(key, "util")) sscanf(rest, "%u %u", &g->util, &g->memory_util);
    else if (!strcmp(key, "power")) sscanf(rest, "%u %llu", &g->milliwatts, &g->millijoules);
    else if (!strcmp(key, "clocks")) sscanf(rest, "%u %u", &g->sm_clock, &g->memory_clock);
    else if (!strcmp(key, "temp")) sscanf(rest, "%u", &g->temperature);
    else if (!strcmp(key, "ecc")) sscanf(rest, "%llu %llu", &g->ecc_corrected, &g->ecc_uncorrected);
    else if (!strcmp(key, "throttle")) sscanf(rest, "%llu", &g->throttle);
    else if (!strcmp(key, "lost")) g->lost = 1;
    else if (!strcmp(key, "found")) { g->stale = g->lost; g->lost = 0; g->microjoules = 0; g->samples = 0; }
    else if (!strcmp(key, "minor")) g->minor = atoi(rest);
    else if (!strcmp(key, "garbage")) g->garbage = atoi(rest);
    else if (!strcmp(key, "entry")) g->entry = atoi(rest);
    else if (!strcmp(key, "scrambled")) g->scrambled = atoi(rest);
    else if (!strcmp(key, "accounting")) g->accounting = atoi(rest);
    else if (!strcmp(key, "addressing")) g->addressing = atoi(rest);
    else if (!strcmp(key, "gpm")) g->gpm = atoi(rest);
    else if (!strcmp(key, "sampler")) g->sampler = atoi(rest);
    else if (!strcmp(key, "remap")) g->remapping = 1, sscanf(rest, "%u %u", &g->remap_pending, &g->remap_failed);
    else if (!strcmp(key, "recovery")) g->recovering = 1, g->recovery = (u32)strtoul(rest, NULL, 10);
    else if (!strcmp(key, "xid")) raise_event(g, 0x8, strtoull(rest, NULL, 10));
    else if (!strcmp(key, "simulate")) { sscanf(rest, "%u %u", &g->idle_milliwatts, &g->extra_milliwatts); g->simulated = 1; }
    else if (!strcmp(key, "noise")) sscanf(rest, "%u", &g->noise);
    else if (!strcmp(key, "shares")) sscanf(rest, "%u %u", &g->sm_share, &g->tensor_share);
    else if (!strcmp(key, "wrap")) { sscanf(rest, "%llu", &g->energy_offset); g->energy_wrap = 1ull << 32; }
    else if (!strcmp(key, "migmode")) { g->migmode = *rest ? atoi(rest) : 1; raise_event(g, 0x100, 0); }
    else if (!strcmp(key, "migclear")) { g->instances = 0; raise_event(g, 0x100, 0); }
    else if (!strcmp(key, "load") || !strcmp(key, "exit") || !strcmp(key, "draw")) on_worker(g, key, rest);
    else on_list(g, key, rest);
}

static void tell(const char *line) {
    char key[32];
    int used = 0;
    if (sscanf(line, "%31s%n", key, &used) != 1 || key[0] == '#') return;
    const char *rest = line + used + strspn(line + used, " \n");
    on_machine(key, rest, current ? current->fail : fails, current ? &current->fails : &fail_count);
    if (current && strcmp(key, "gpu")) on_gpu(current, key, rest);
}

/* Several lines at once. `machine` before a fault makes it one of every GPU. */
void fakeNvmlTell(const char *text) {
    char line[512];
    pthread_mutex_lock(&mutex);
    while (*text) {
        size_t length = strcspn(text, "\n"), kept = length < sizeof line - 1 ? length : sizeof line - 1;
        memcpy(line, text, kept);
        line[kept] = 0;
        if (!strcmp(line, "machine")) current = NULL;
        else tell(line);
        text += length + (text[length] == '\n');
    }
    pthread_mutex_unlock(&mutex);
}

/* True busy time of a process, running or not, in microseconds of the place it ran on. */
u64 fakeNvmlTruth(u32 gpu, u32 pid) {
    u64 busy = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; gpu < (u32)gpu_count && i < gpus[gpu].workers; i++)
        if (gpus[gpu].worker[i].pid == pid) busy += gpus[gpu].worker[i].busy;
    pthread_mutex_unlock(&mutex);
    return busy / 1000000;
}

void load_state(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat st;
    if (!path || stat(path, &st)) return;
    if (st.st_mtim.tv_sec == loaded_at.tv_sec && st.st_mtim.tv_nsec == loaded_at.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    loaded_at = st.st_mtim;
    memset(gpus, 0, sizeof gpus);
    gpu_count = fail_count = init_error = replaced = reloaded = foreign_namespace = 0;
    current = NULL;
    serial = 0;
    char line[512];
    while (fgets(line, sizeof line, file)) tell(line);
    fclose(file);
}
