/* A fake libnvidia-ml.so.1: a machine of GPUs whose truth is known, shown through NVML's own C interface.
 *
 * The real binding runs on it, so struct layouts, sizing calls and error mapping are exercised. Every GPU is
 * either literal (it shows the figures that were written down) or simulated: a virtual clock, processes with a
 * load each, and rings, counters, accounting and GPM made from them the way the driver is known to make them.
 * What is unknown of real drivers is modelled to the agent's disadvantage (rounding to whole percents).
 *
 * Files: machine.c the simulation, language.c what tests say, devices.c, processes.c, instances.c (MIG, GPM),
 * events.c NVML's functions. library.py builds and loads it.
 */
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Return;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, GPU_IS_LOST = 15, REPLACED = 18, UNKNOWN = 999
};
enum { MAX_GPUS = 16, MAX_MIG = 16, MAX_ENTRIES = 256, MAX_FAILS = 32, MAX_FUNCTIONS = 96, MAX_XIDS = 64 };
/* Driver facts, read on an H200 with driver 580: the ring holds 71 samples, one every 200 ms, in whole percents cut off;
 * samples of an ended process are not reported, and a process that begins may inherit them. 128 ended ones keep their
 * accounting (gpu_acct.c). */
enum { RING = 71, PERIOD_US = 200000, MAX_DEAD = 128, SLICE_CYCLE_US = 5462 };

/* A call that fails: after `after` good ones, `times` times (-1: from then on). code HANGS: it does not return. */
enum { HANGS = -1 };
typedef struct { char function[64]; int code, after, times; } Fail;
typedef struct { u32 pid; u64 bytes; int gi, ci; } Process;
typedef struct { u64 at; u32 pid, percent; } ProcessBusy;
typedef struct { u64 at; u32 pid, util; } Sample; /* util in hundredths of a percent */
typedef struct { int hole, gi, ci, slices, gi_slices, serial, profile_id, start; char uuid[96], profile[32]; u64 total, used; } Mig;

/* A simulated process. load: millionths of its device or instance. busy: its true time, millionths of a us. */
/* graphics: 0 computes, 1 draws, 2 both. */
typedef struct { int running, graphics, gi, ci; u32 pid, load; u64 bytes, busy, sum, since, until, started, ended; } Worker;

/* One compute engine: the device, or a GPU instance. Time-weighted sums in millionths of a microsecond. */
typedef struct { u64 busy, sm, tensor; } Engine;

typedef struct {
    int index, minor, lost, stale, migmode, addressing, simulated, gpm, accounting, sampler, garbage, entry, scrambled;
    int processes, drawers, clients, entries, samples, instances, fails, workers;
    char uuid[96], name[96];
    u64 total, used, millijoules, energy_offset, energy_wrap;
    u32 util, memory_util, milliwatts, sm_clock, memory_clock, temperature;
    u32 remapping, remap_pending, remap_failed, recovering, recovery;
    u64 ecc_corrected, ecc_uncorrected, throttle;
    Process process[MAX_ENTRIES], drawer[MAX_ENTRIES], client[MAX_ENTRIES];
    ProcessBusy process_busy[MAX_ENTRIES];
    Sample sample[MAX_ENTRIES];
    Mig mig[MAX_MIG];
    Fail fail[MAX_FAILS];
    /* simulated only */
    Worker worker[MAX_ENTRIES];
    u32 idle_milliwatts, extra_milliwatts, sm_share, tensor_share, noise;
    u64 slot_us, slot_busy, sample_count, microjoules;
    Engine engine[MAX_MIG];
} Gpu;

/* What a handle stands for; void as soon as the library is shut down. */
typedef struct { u32 generation; int gpu, mig, serial; } Handle;

extern Gpu gpus[MAX_GPUS];
extern Fail fails[MAX_FAILS];
extern int gpu_count, fail_count, initialised, init_error, replaced, reloaded, foreign_namespace;
extern u32 generation;
extern u64 now_us;
extern long long wall_us; /* what the system clock is ahead of now_us: samples are dated by it */
extern pthread_mutex_t mutex;
extern pthread_cond_t released;

extern char grown_function[64];
extern int grown_bytes;

/* Writes what a newer driver would write behind a structure that `GROW` names: `grow FUNCTION BYTES`. */
void grow(const char *function, void *end);
#define GROW(pointer) do { if (!rc && (pointer)) grow(__func__, (char *)(pointer) + sizeof *(pointer)); } while (0)

void load_state(void);
Return enter(const char *function);
Return faulty(Fail *list, int *count, const char *function);
Return enter_device(const char *function, void *device, Gpu **g, Mig **m);
void *handle_of(Gpu *g, Mig *m);
void pass_time(u64 to_us);
u32 load_now(const Gpu *g);
Worker *worker_of(Gpu *g, u32 pid, int running);
void forget_dead(Gpu *g);
void raise_event(Gpu *g, u64 type, u64 data);
void void_events(void);

/* A call under the lock, on an initialised library; DEVICE: its first argument is a GPU or an instance. */
#define BEGIN \
    pthread_mutex_lock(&mutex); \
    Return rc = enter(__func__); \
    if (rc) goto out;
#define DEVICE \
    Gpu *g = NULL; \
    Mig *m = NULL; \
    if ((rc = enter_device(__func__, device, &g, &m))) goto out; \
    (void)m;
#define REFUSE(code) do { rc = (code); goto out; } while (0)
#define END \
    out: \
    pthread_mutex_unlock(&mutex); \
    return rc;
#endif
