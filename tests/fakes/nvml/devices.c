/* NVML: the library, devices and their figures. */
#include "fake.h"

Return nvmlInitWithFlags(u32 flags) {
    (void)flags;
    pthread_mutex_lock(&mutex);
    Return rc = enter(__func__);
    if (!initialised || reloaded) rc = faulty(fails, &fail_count, __func__); /* else enter has asked already */
    rc = init_error ? init_error : replaced ? REPLACED : rc;
    if (!rc && !initialised++) {
        generation++;
        reloaded = 0;
        for (int i = 0; i < gpu_count; i++) gpus[i].stale = 0;
    }
    pthread_mutex_unlock(&mutex);
    return rc;
}
Return nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    Return rc = enter(__func__);
    if (!rc || rc == UNKNOWN || rc == REPLACED) {
        if (!--initialised) { generation++; void_events(); }
    }
    pthread_mutex_unlock(&mutex);
    return rc == UNKNOWN ? OK : rc;
}
const char *nvmlErrorString(Return code) { (void)code; return "fake error"; }
Return nvmlSystemGetDriverVersion(char *text, u32 size) { BEGIN snprintf(text, size, "580.00-fake"); if (!rc) grow(__func__, text + size); END }
Return nvmlDeviceGetCount_v2(u32 *count) { BEGIN *count = (u32)gpu_count; GROW(count);
    END }
Return nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    BEGIN
    if (index >= (u32)gpu_count) REFUSE(INVALID_ARGUMENT);
    if (gpus[index].lost) REFUSE(GPU_IS_LOST);
    if ((rc = faulty(gpus[index].fail, &gpus[index].fails, __func__))) goto out;
    *device = handle_of(&gpus[index], NULL);
    GROW(device);
    END
}
Return nvmlDeviceGetUUID(void *device, char *text, u32 size) { BEGIN DEVICE snprintf(text, size, "%s", m ? m->uuid : g->uuid); if (!rc) grow(__func__, text + size); END }
Return nvmlDeviceGetName(void *device, char *text, u32 size) {
    BEGIN DEVICE
    if (m) snprintf(text, size, "%s MIG %s", g->name, m->profile);
    else snprintf(text, size, "%s", g->name);
    if (!rc) grow(__func__, text + size);
    END
}
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
Return nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    BEGIN DEVICE
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 16 + g->index);
    GROW(pci);
    END
}
Return nvmlDeviceGetMinorNumber(void *device, u32 *minor) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    *minor = (u32)g->minor;
    GROW(minor);
    END
}
static u64 used_bytes(const Gpu *g, const Mig *m) {
    u64 used = m ? m->used : g->used;
    for (int i = 0; i < g->workers; i++) {
        const Worker *w = &g->worker[i];
        if (w->running && (!m || (w->gi == m->gi && w->ci == m->ci))) used += w->bytes;
    }
    return used;
}
typedef struct { u64 total, free, used; } Memory;
Return nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    BEGIN DEVICE
    memory->total = m ? m->total : g->total;
    memory->used = used_bytes(g, m);
    memory->free = memory->total - memory->used;
    GROW(memory);
    END
}
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;
Return nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *memory) {
    BEGIN DEVICE
    memory->total = m ? m->total : g->total;
    memory->used = used_bytes(g, m);
    memory->free = memory->total - memory->used;
    memory->reserved = 0;
    GROW(memory);
    END
}
typedef struct { u32 version, mode; } Addressing;
Return nvmlDeviceGetAddressingMode(void *device, Addressing *addressing) { BEGIN DEVICE addressing->mode = (u32)g->addressing; GROW(addressing);
    END }
typedef struct { u32 gpu, memory; } Utilization;
Return nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    BEGIN DEVICE
    if (m || g->migmode) REFUSE(NOT_SUPPORTED);
    rates->gpu = g->simulated ? load_now(g) / 10000 : g->util;
    rates->memory = g->memory_util;
    GROW(rates);
    END
}
Return nvmlDeviceGetPowerUsage(void *device, u32 *milliwatts) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    *milliwatts = g->simulated ? g->idle_milliwatts + (u32)((u64)g->extra_milliwatts * load_now(g) / 1000000) : g->milliwatts;
    GROW(milliwatts);
    END
}
Return nvmlDeviceGetTotalEnergyConsumption(void *device, u64 *millijoules) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    *millijoules = g->simulated ? g->microjoules / 1000 + g->energy_offset : g->millijoules;
    if (g->energy_wrap) *millijoules %= g->energy_wrap;
    GROW(millijoules);
    END
}
Return nvmlDeviceGetTemperature(void *device, u32 sensor, u32 *celsius) {
    BEGIN DEVICE
    if (m || sensor) REFUSE(m ? NOT_SUPPORTED : INVALID_ARGUMENT);
    *celsius = g->temperature;
    GROW(celsius);
    END
}
Return nvmlDeviceGetClockInfo(void *device, u32 type, u32 *mhz) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    if (type != 1 && type != 2) REFUSE(INVALID_ARGUMENT);
    *mhz = type == 1 ? g->sm_clock : g->memory_clock;
    GROW(mhz);
    END
}
Return nvmlDeviceGetTotalEccErrors(void *device, u32 error, u32 counter, u64 *count) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    if (error > 1 || counter) REFUSE(INVALID_ARGUMENT);
    *count = error ? g->ecc_uncorrected : g->ecc_corrected;
    GROW(count);
    END
}
Return nvmlDeviceGetRemappedRows(void *device, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    BEGIN DEVICE
    if (m || !g->remapping) REFUSE(NOT_SUPPORTED);
    *corrected = *uncorrected = 0;
    *pending = g->remap_pending;
    *failed = g->remap_failed;
    GROW(failed);
    END
}
typedef struct { u32 field, scope; long long timestamp, latency; u32 type; Return rc; union { u32 u; u64 ull; } value; } Field;
Return nvmlDeviceGetFieldValues(void *device, int count, Field *values) {
    BEGIN DEVICE
    for (int i = 0; i < count; i++) {
        values[i].rc = values[i].field == 230 && g->recovering && !m ? OK : NOT_SUPPORTED;
        values[i].type = 1;
        values[i].value.ull = values[i].rc ? 0 : g->recovery;
    }
    GROW(&values[count - 1]);
    END
}
Return nvmlDeviceGetCurrentClocksEventReasons(void *device, u64 *reasons) {
    BEGIN DEVICE
    if (m) REFUSE(NOT_SUPPORTED);
    *reasons = g->throttle;
    GROW(reasons);
    END
}
typedef struct { u64 at; union { double d; u32 u; u64 l; } value; } NvmlSample;
Return nvmlDeviceGetSamples(void *device, u32 type, u64 since, u32 *value_type, u32 *count, NvmlSample *samples) {
    BEGIN DEVICE
    if (m || g->migmode || type != 1) REFUSE(NOT_SUPPORTED);
    *value_type = 1;
    if (!samples) { *count = 120; goto out; }
    u32 n = 0;
    for (int i = 0; i < g->samples && n < *count; i++) {
        if (g->sample[i].at <= since) continue;
        samples[n].at = g->sample[i].at;
        samples[n].value.l = 0;
        samples[n++].value.u = (g->sample[i].util + 50) / 100;
    }
    *count = n;
    if (!n) rc = NOT_FOUND;
    if (n) GROW(&samples[n - 1]);
    END
}
