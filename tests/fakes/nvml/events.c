/* NVML: events. Each set has one queue; a wait of 0 ms takes what is there. */
#include "fake.h"
#include <time.h>

typedef struct { void *device; u64 type, data; u32 gi, ci; } Event;
typedef struct { u64 wanted[MAX_GPUS]; Event queue[MAX_XIDS]; int count, used; } Set;

static Set sets[4];

void void_events(void) { memset(sets, 0, sizeof sets); }

void raise_event(Gpu *g, u64 type, u64 data) {
    for (int i = 0; i < 4; i++) {
        Set *s = &sets[i];
        if (!s->used || !(s->wanted[g->index] & type) || s->count == MAX_XIDS) continue;
        s->queue[s->count++] = (Event){handle_of(g, NULL), type, data, ~0u, ~0u};
    }
    pthread_cond_broadcast(&released);
}

static Set *known(void *set) {
    for (int i = 0; i < 4; i++) if (set == &sets[i] && sets[i].used) return &sets[i];
    return NULL;
}
Return nvmlEventSetCreate(void **set) {
    BEGIN
    rc = INSUFFICIENT_SIZE;
    for (int i = 0; i < 4 && rc; i++) {
        if (sets[i].used) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].used = 1;
        *set = &sets[i];
        rc = OK;
    }
    GROW(set);
    END
}
Return nvmlEventSetFree(void *set) {
    BEGIN
    if (!known(set)) REFUSE(INVALID_ARGUMENT);
    known(set)->used = 0;
    END
}
Return nvmlDeviceGetSupportedEventTypes(void *device, u64 *types) { BEGIN DEVICE *types = 0x8 | 0x100; GROW(types);
    END }
Return nvmlDeviceRegisterEvents(void *device, u64 types, void *set) {
    BEGIN DEVICE
    if (!known(set)) REFUSE(INVALID_ARGUMENT);
    known(set)->wanted[g->index] |= types;
    END
}
Return nvmlEventSetWait_v2(void *set, Event *event, u32 milliseconds) {
    BEGIN
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += milliseconds % 1000 * 1000000l;
    if (until.tv_nsec >= 1000000000l) { until.tv_sec++; until.tv_nsec -= 1000000000l; }
    Set *s = known(set);
    while (s && s->used && !s->count && milliseconds && !pthread_cond_timedwait(&released, &mutex, &until)) {}
    if (!s || !s->used) REFUSE(INVALID_ARGUMENT);
    if (!s->count) REFUSE(TIMEOUT);
    *event = s->queue[0];
    memmove(s->queue, s->queue + 1, sizeof s->queue[0] * (size_t)--s->count);
    GROW(event);
    END
}
