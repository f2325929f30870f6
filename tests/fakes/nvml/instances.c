/* NVML: MIG instances, and GPM, which is the only thing that can look inside them. */
#include "fake.h"

Return nvmlDeviceGetMigMode(void *device, u32 *mode, u32 *pending) { BEGIN DEVICE *mode = *pending = g->migmode != 0; GROW(pending);
    END }
Return nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) { BEGIN DEVICE *count = g->migmode == 1 ? 7 : (u32)g->migmode; GROW(count);
    END }
Return nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **instance) {
    BEGIN DEVICE
    if (index >= (u32)g->instances || g->mig[index].hole) REFUSE(NOT_FOUND);
    *instance = handle_of(g, &g->mig[index]);
    GROW(instance);
    END
}
Return nvmlDeviceGetGpuInstanceId(void *device, u32 *id) {
    BEGIN DEVICE
    if (!m) REFUSE(NOT_SUPPORTED);
    *id = (u32)m->gi;
    GROW(id);
    END
}
Return nvmlDeviceGetComputeInstanceId(void *device, u32 *id) {
    BEGIN DEVICE
    if (!m) REFUSE(NOT_SUPPORTED);
    *id = (u32)m->ci;
    GROW(id);
    END
}
typedef struct { u32 multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; u64 memory_mb; } Attributes;
Return nvmlDeviceGetAttributes_v2(void *device, Attributes *attributes) {
    BEGIN DEVICE
    if (!m) REFUSE(NOT_SUPPORTED);
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = (u32)m->gi_slices;
    attributes->compute_slices = (u32)m->slices;
    attributes->memory_mb = m->total >> 20;
    GROW(attributes);
    END
}

typedef struct { void *device; u32 id, profile_id, start, size; } InstanceInfo;
Return nvmlDeviceGetGpuInstanceById(void *device, u32 id, void **instance) {
    BEGIN DEVICE
    rc = NOT_FOUND;
    for (int i = 0; i < g->instances; i++) {
        if (g->mig[i].hole || (u32)g->mig[i].gi != id) continue;
        *instance = handle_of(g, &g->mig[i]);
        rc = OK;
        break;
    }
    GROW(instance);
    END
}
Return nvmlGpuInstanceGetInfo(void *device, InstanceInfo *info) {
    BEGIN DEVICE
    if (!m) REFUSE(INVALID_ARGUMENT);
    *info = (InstanceInfo){handle_of(g, NULL), (u32)m->gi, (u32)m->profile_id, (u32)m->start, (u32)m->gi_slices};
    GROW(info);
    END
}

/* --- GPM: the average between two samples ----------------------------------------------------------------- */

typedef struct { u64 at; Engine engine; } GpmSample;
typedef struct { u32 id; Return rc; double value; char *names[3]; } GpmMetric;
typedef struct { u32 version, count; GpmSample *first, *second; GpmMetric metric[]; } GpmQuery;
typedef struct { u32 version, supported; } GpmSupport;

Return nvmlGpmQueryDeviceSupport(void *device, GpmSupport *support) { BEGIN DEVICE support->supported = (u32)g->gpm; GROW(support);
    END }
Return nvmlGpmSampleAlloc(GpmSample **sample) { BEGIN *sample = calloc(1, sizeof **sample); GROW(sample);
    END }
Return nvmlGpmSampleFree(GpmSample *sample) { BEGIN free(sample); END }
Return nvmlGpmSampleGet(void *device, GpmSample *sample) {
    BEGIN DEVICE
    if (!g->gpm || g->migmode) REFUSE(NOT_SUPPORTED);
    *sample = (GpmSample){now_us, g->engine[0]};
    END
}
Return nvmlGpmMigSampleGet(void *device, u32 gi, GpmSample *sample) {
    BEGIN DEVICE
    if (!g->gpm) REFUSE(NOT_SUPPORTED);
    rc = INVALID_ARGUMENT;
    for (int i = 0; i < g->instances; i++) {
        if (g->mig[i].hole || (u32)g->mig[i].gi != gi) continue;
        *sample = (GpmSample){now_us, g->engine[gi % MAX_MIG]};
        rc = OK;
    }
    END
}
Return nvmlGpmMetricsGet(GpmQuery *query) {
    BEGIN
    const GpmSample *a = query->first, *b = query->second;
    double span = b->at > a->at ? (double)(b->at - a->at) : 0;
    for (u32 i = 0; i < query->count; i++) {
        GpmMetric *metric = &query->metric[i];
        u64 sum = metric->id == 1   ? b->engine.busy - a->engine.busy
                  : metric->id == 2 ? b->engine.sm - a->engine.sm
                  : metric->id == 5 ? b->engine.tensor - a->engine.tensor
                                    : 0;
        metric->rc = span >= 100000 ? OK : INVALID_ARGUMENT;
        metric->value = metric->rc ? 0 : (double)sum / 1e4 / span;
    }
    END
}
