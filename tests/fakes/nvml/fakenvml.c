/* A fake libnvidia-ml.so.1: what the agent asks of NVML, answered from a text file.
 *
 * The real binding runs on it, so struct layouts, sizing calls and error mapping are exercised; what a
 * driver means by its figures is not. The file named by FAKE_NVML_STATE is read again when it changes.
 * Numbers apply to the last `gpu` (`mem`, `proc` and the like) or to the machine (before the first):
 *
 *   initerr CODE                 nvmlInit fails
 *   fail FUNCTION CODE           that call fails: on this GPU, or everywhere before the first `gpu`
 *   gpu UUID NAME                '_' in NAME stands for a blank
 *   mem TOTAL USED               bytes
 *   util GPU MEMORY              percent
 *   power MILLIWATT MILLIJOULE   now, and since the driver was loaded
 *   lost                         every call answers GPU_IS_LOST
 *   sample MICROSECONDS PERCENT  one entry of the utilisation ring
 *   proc PID BYTES [GI CI]       a compute process; BYTES -1: not available
 *   mps PID BYTES                an MPS client
 *   pu MICROSECONDS PID PERCENT  one entry of the per-process utilisation
 *   migmode                      MIG is on
 *   mig UUID GI CI SLICES PROFILE TOTAL USED
 *   mighole                      an index at which there is no instance
 *
 * Build: cc -O1 -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fakenvml.c
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef int Return;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { MAX_GPUS = 16, MAX_MIG = 8, MAX_ENTRIES = 256, MAX_FAILS = 16, MAX_FUNCTIONS = 64 };

typedef struct { char function[64]; int code; } Fail;
typedef struct { u32 pid; u64 bytes; int gi, ci; } Process;
typedef struct { u64 at; u32 pid, percent; } ProcessBusy;
typedef struct { u64 at; u32 percent; } Sample;
typedef struct { int hole, gi, ci, slices; char uuid[96], profile[32]; u64 total, used; } Mig;
typedef struct {
    int index, lost, migmode, processes, clients, busy, samples, instances, fails;
    char uuid[96], name[96];
    u64 total, used, millijoules;
    u32 util, memory_util, milliwatts;
    Process process[MAX_ENTRIES], client[MAX_ENTRIES];
    ProcessBusy process_busy[MAX_ENTRIES];
    Sample sample[MAX_ENTRIES];
    Mig mig[MAX_MIG];
    Fail fail[MAX_FAILS];
} Gpu;

static Gpu gpus[MAX_GPUS];
static Fail fails[MAX_FAILS];
static int gpu_count, fail_count, initialised, init_error;
static struct timespec loaded_at;
static struct { const char *name; u32 count; } calls[MAX_FUNCTIONS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void read_line(char *line, Gpu **current) {
    Gpu *g = *current;
    char key[32];
    int used = 0;
    if (sscanf(line, "%31s%n", key, &used) != 1 || key[0] == '#') return;
    const char *rest = line + used;
    if (!strcmp(key, "initerr")) {
        init_error = atoi(rest);
    } else if (!strcmp(key, "fail")) {
        Fail *f = g ? &g->fail[g->fails++] : &fails[fail_count++];
        sscanf(rest, "%63s %d", f->function, &f->code);
    } else if (!strcmp(key, "gpu")) {
        g = *current = &gpus[gpu_count];
        g->index = gpu_count++;
        sscanf(rest, "%95s %95s", g->uuid, g->name);
        for (char *c = g->name; *c; c++) if (*c == '_') *c = ' ';
    } else if (!g) {
        return;
    } else if (!strcmp(key, "mem")) {
        sscanf(rest, "%llu %llu", &g->total, &g->used);
    } else if (!strcmp(key, "util")) {
        sscanf(rest, "%u %u", &g->util, &g->memory_util);
    } else if (!strcmp(key, "power")) {
        sscanf(rest, "%u %llu", &g->milliwatts, &g->millijoules);
    } else if (!strcmp(key, "lost")) {
        g->lost = 1;
    } else if (!strcmp(key, "migmode")) {
        g->migmode = 1;
    } else if (!strcmp(key, "sample")) {
        Sample *s = &g->sample[g->samples++];
        sscanf(rest, "%llu %u", &s->at, &s->percent);
    } else if (!strcmp(key, "proc") || !strcmp(key, "mps")) {
        Process *p = key[0] == 'p' ? &g->process[g->processes++] : &g->client[g->clients++];
        long long bytes = 0;
        p->gi = p->ci = -1;
        sscanf(rest, "%u %lld %d %d", &p->pid, &bytes, &p->gi, &p->ci);
        p->bytes = (u64)bytes;
    } else if (!strcmp(key, "pu")) {
        ProcessBusy *p = &g->process_busy[g->busy++];
        sscanf(rest, "%llu %u %u", &p->at, &p->pid, &p->percent);
    } else if (!strcmp(key, "mig")) {
        Mig *m = &g->mig[g->instances++];
        sscanf(rest, "%95s %d %d %d %31s %llu %llu", m->uuid, &m->gi, &m->ci, &m->slices, m->profile, &m->total, &m->used);
    } else if (!strcmp(key, "mighole")) {
        g->mig[g->instances++].hole = 1;
    }
}

static void load(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat st;
    if (!path || stat(path, &st)) return;
    if (st.st_mtim.tv_sec == loaded_at.tv_sec && st.st_mtim.tv_nsec == loaded_at.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    loaded_at = st.st_mtim;
    memset(gpus, 0, sizeof gpus);
    memset(fails, 0, sizeof fails);
    gpu_count = fail_count = init_error = 0;
    char line[512];
    Gpu *current = NULL;
    while (fgets(line, sizeof line, file)) read_line(line, &current);
    fclose(file);
}

static int failing(const Fail *list, int count, const char *function) {
    for (int i = 0; i < count; i++) if (!strcmp(list[i].function, function)) return list[i].code;
    return OK;
}

static void count_call(const char *function) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!calls[i].name) calls[i].name = function;
        if (!strcmp(calls[i].name, function)) { calls[i].count++; return; }
    }
}

/* How often a function was called since the library was loaded; for tests. */
u32 fakeNvmlCalls(const char *function) {
    for (int i = 0; i < MAX_FUNCTIONS && calls[i].name; i++) if (!strcmp(calls[i].name, function)) return calls[i].count;
    return 0;
}

/* BEGIN: a call under the lock, on an initialised library. DEVICE: its first argument is a GPU or an instance. */
#define BEGIN \
    Return rc = OK; \
    pthread_mutex_lock(&mutex); \
    load(); \
    count_call(__func__); \
    if (!initialised) { rc = UNINITIALIZED; goto out; } \
    if ((rc = failing(fails, fail_count, __func__))) goto out;
#define DEVICE \
    Gpu *g = NULL; \
    Mig *m = NULL; \
    for (int i = 0; i < gpu_count; i++) { \
        if ((void *)&gpus[i] == device) g = &gpus[i]; \
        for (int j = 0; j < gpus[i].instances; j++) if ((void *)&gpus[i].mig[j] == device) { g = &gpus[i]; m = &gpus[i].mig[j]; } \
    } \
    if (!g) { rc = INVALID_ARGUMENT; goto out; } \
    (void)m; \
    if (g->lost) { rc = GPU_IS_LOST; goto out; } \
    if ((rc = failing(g->fail, g->fails, __func__))) goto out;
#define END \
    out: \
    pthread_mutex_unlock(&mutex); \
    return rc;

Return nvmlInitWithFlags(u32 flags) {
    (void)flags;
    pthread_mutex_lock(&mutex);
    load();
    count_call(__func__);
    Return rc = init_error;
    if (!rc) initialised++;
    pthread_mutex_unlock(&mutex);
    return rc;
}
Return nvmlShutdown(void) { BEGIN initialised--; END }
const char *nvmlErrorString(Return code) { (void)code; return "fake error"; }
Return nvmlSystemGetDriverVersion(char *text, u32 size) { BEGIN snprintf(text, size, "580.00-fake"); END }
Return nvmlDeviceGetCount_v2(u32 *count) { BEGIN *count = (u32)gpu_count; END }
Return nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    BEGIN
    if (index >= (u32)gpu_count) { rc = INVALID_ARGUMENT; goto out; }
    if (gpus[index].lost) { rc = GPU_IS_LOST; goto out; }
    *device = &gpus[index];
    END
}
Return nvmlDeviceGetUUID(void *device, char *text, u32 size) { BEGIN DEVICE snprintf(text, size, "%s", m ? m->uuid : g->uuid); END }
Return nvmlDeviceGetName(void *device, char *text, u32 size) {
    BEGIN DEVICE
    if (m) snprintf(text, size, "%s MIG %s", g->name, m->profile);
    else snprintf(text, size, "%s", g->name);
    END
}
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
Return nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    BEGIN DEVICE
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 16 + g->index);
    END
}
typedef struct { u64 total, free, used; } Memory;
Return nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    BEGIN DEVICE
    memory->total = m ? m->total : g->total;
    memory->used = m ? m->used : g->used;
    memory->free = memory->total - memory->used;
    END
}
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;
Return nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *memory) {
    BEGIN DEVICE
    memory->total = m ? m->total : g->total;
    memory->used = m ? m->used : g->used;
    memory->free = memory->total - memory->used;
    memory->reserved = 0;
    END
}
typedef struct { u32 gpu, memory; } Utilization;
Return nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    BEGIN DEVICE
    if (m || g->migmode) { rc = NOT_SUPPORTED; goto out; }
    rates->gpu = g->util;
    rates->memory = g->memory_util;
    END
}
Return nvmlDeviceGetPowerUsage(void *device, u32 *milliwatts) {
    BEGIN DEVICE
    if (m) { rc = NOT_SUPPORTED; goto out; }
    *milliwatts = g->milliwatts;
    END
}
Return nvmlDeviceGetTotalEnergyConsumption(void *device, u64 *millijoules) {
    BEGIN DEVICE
    if (m) { rc = NOT_SUPPORTED; goto out; }
    *millijoules = g->millijoules;
    END
}
typedef struct { u64 at; union { double d; u32 u; u64 l; } value; } NvmlSample;
Return nvmlDeviceGetSamples(void *device, u32 type, u64 since, u32 *value_type, u32 *count, NvmlSample *samples) {
    (void)type;
    BEGIN DEVICE
    if (m || g->migmode) { rc = NOT_SUPPORTED; goto out; }
    *value_type = 1;
    if (!samples) { *count = 120; goto out; }
    u32 n = 0;
    for (int i = 0; i < g->samples && n < *count; i++) {
        if (g->sample[i].at <= since) continue;
        samples[n].at = g->sample[i].at;
        samples[n].value.l = 0;
        samples[n++].value.u = g->sample[i].percent;
    }
    *count = n;
    if (!n) rc = NOT_FOUND;
    END
}
typedef struct { u32 pid; u64 bytes; u32 gi, ci; } ProcessInfo;
static Return list(const Process *from, int available, const Mig *m, u32 *count, ProcessInfo *infos) {
    u32 n = 0;
    for (int i = 0; i < available; i++) {
        if (m && (from[i].gi != m->gi || from[i].ci != m->ci)) continue;
        if (infos && n < *count) infos[n] = (ProcessInfo){from[i].pid, from[i].bytes, (u32)from[i].gi, (u32)from[i].ci};
        n++;
    }
    Return rc = n > *count ? INSUFFICIENT_SIZE : OK;
    *count = n;
    return rc;
}
Return nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, ProcessInfo *infos) {
    BEGIN DEVICE rc = list(g->process, g->processes, m, count, infos); END
}
Return nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, u32 *count, ProcessInfo *infos) {
    BEGIN DEVICE rc = list(g->client, g->clients, m, count, infos); END
}
typedef struct { u32 pid; u64 at; u32 sm, memory, encoder, decoder; } ProcessUtilization;
Return nvmlDeviceGetProcessUtilization(void *device, ProcessUtilization *samples, u32 *count, u64 since) {
    BEGIN DEVICE
    if (m || g->migmode) { rc = NOT_SUPPORTED; goto out; }
    if (!samples) { *count = 100; rc = INSUFFICIENT_SIZE; goto out; }
    u32 n = 0;
    for (int i = 0; i < g->busy && n < *count; i++) {
        if (g->process_busy[i].at <= since) continue;
        memset(&samples[n], 0, sizeof samples[n]);
        samples[n].pid = g->process_busy[i].pid;
        samples[n].at = g->process_busy[i].at;
        samples[n++].sm = g->process_busy[i].percent;
    }
    *count = n;
    if (!n) rc = NOT_FOUND;
    END
}
Return nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending) { BEGIN DEVICE *current = *pending = (u32)g->migmode; END }
Return nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) { BEGIN DEVICE *count = g->migmode ? 7 : 0; END }
Return nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **instance) {
    BEGIN DEVICE
    if (index >= (u32)g->instances || g->mig[index].hole) { rc = NOT_FOUND; goto out; }
    *instance = &g->mig[index];
    END
}
Return nvmlDeviceGetGpuInstanceId(void *device, u32 *id) {
    BEGIN DEVICE
    if (!m) { rc = NOT_SUPPORTED; goto out; }
    *id = (u32)m->gi;
    END
}
Return nvmlDeviceGetComputeInstanceId(void *device, u32 *id) {
    BEGIN DEVICE
    if (!m) { rc = NOT_SUPPORTED; goto out; }
    *id = (u32)m->ci;
    END
}
typedef struct { u32 multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; u64 memory_mb; } Attributes;
Return nvmlDeviceGetAttributes_v2(void *device, Attributes *attributes) {
    BEGIN DEVICE
    if (!m) { rc = NOT_SUPPORTED; goto out; }
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = attributes->compute_slices = (u32)m->slices;
    attributes->memory_mb = m->total >> 20;
    END
}
