/* A fake libcuda.so.1 whose process appears on the fake NVML library: contexts, memory and a kernel that spins.
 *
 * The process is shown with its own number, CONTEXT_BYTES for its context and what it allocates, on the first
 * simulated GPU (or on instance FAKE_CUDA_GI/FAKE_CUDA_CI of it), fully busy between a launch and the next
 * synchronisation. FAKE_CUDA_UUID: 32 hex digits of the device. FAKE_CUDA_FAIL: "FUNCTION CODE".
 * FAKE_CUDA_HIDDEN: nothing of it is shown, as if the agent looked at another machine.
 *
 * Build: cc -O1 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fakecuda.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500 };
#define CONTEXT_BYTES (300ull << 20)
#define GRANULE (2ull << 20)
#define DEVICE_BYTES (64ull << 30)

static unsigned long long held;
static int context, module, function, load;
static char error_text[64];

static int fails(const char *name) {
    const char *text = getenv("FAKE_CUDA_FAIL");
    char wanted[64] = "";
    int code = 0;
    if (text) sscanf(text, "%63s %d", wanted, &code);
    return strcmp(wanted, name) ? OK : code;
}
#define CALL do { int code = fails(__func__); if (code) return code; } while (0)

static void show(void) {
    char line[160], place[32] = "";
    void (*tell)(const char *) = NULL;
    void *nvml = dlopen(getenv("FAKE_NVML_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
    if (nvml) tell = (void (*)(const char *))dlsym(nvml, "fakeNvmlTell");
    if (!tell || getenv("FAKE_CUDA_HIDDEN")) return;
    if (getenv("FAKE_CUDA_GI")) snprintf(place, sizeof place, " %s %s", getenv("FAKE_CUDA_GI"), getenv("FAKE_CUDA_CI"));
    if (context) snprintf(line, sizeof line, "on 0\nload %d %d %llu%s", getpid(), load, CONTEXT_BYTES + held, place);
    else snprintf(line, sizeof line, "on 0\nexit %d", getpid());
    tell(line);
}

int cuInit(unsigned flags) { (void)flags; CALL; return OK; }
int cuDeviceGet(int *device, int ordinal) { CALL; *device = 0; return ordinal ? 101 : OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    CALL;
    *value = attribute == 16 ? 132 : 0;
    return OK;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    const char *digits = getenv("FAKE_CUDA_UUID");
    (void)device;
    CALL;
    for (int i = 0; i < 16; i++) {
        unsigned byte = 0;
        if (digits) sscanf(digits + 2 * i, "%2x", &byte);
        uuid[i] = (unsigned char)byte;
    }
    return OK;
}
int cuCtxCreate_v2(void **handle, unsigned flags, int device) {
    (void)flags, (void)device;
    CALL;
    context = 1;
    *handle = &context;
    show();
    return OK;
}
int cuCtxDestroy_v2(void *handle) {
    if (handle != &context) return INVALID;
    context = load = 0;
    held = 0;
    show();
    return OK;
}
int cuMemAlloc_v2(unsigned long long *address, size_t size) {
    CALL;
    if (!context) return 201;
    if (size > DEVICE_BYTES) return OUT_OF_MEMORY;
    held += (size + GRANULE - 1) / GRANULE * GRANULE;
    *address = 1ull << 32;
    show();
    return OK;
}
int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t size) {
    (void)value, (void)size;
    CALL;
    return address ? OK : INVALID;
}
int cuModuleLoadData(void **handle, const char *image) {
    CALL;
    *handle = &module;
    return strstr(image, ".entry spin(") ? OK : 218;
}
int cuModuleGetFunction(void **handle, void *of, const char *name) {
    CALL;
    *handle = &function;
    return of == &module && !strcmp(name, "spin") ? OK : NOT_FOUND;
}
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    CALL;
    if (kernel != &function || gx * gy * gz == 0 || bx * by * bz == 0 || shared || stream || extra) return INVALID;
    if (!*(unsigned long long *)parameters[0]) return INVALID;
    load = 1000000;
    show();
    return OK;
}
int cuCtxSynchronize(void) {
    CALL;
    load = 0;
    show();
    return OK;
}
int cuGetErrorString(int code, const char **text) {
    snprintf(error_text, sizeof error_text, "%s", code == OUT_OF_MEMORY ? "out of memory" : "");
    *text = code == OUT_OF_MEMORY ? error_text : NULL;
    return code == OUT_OF_MEMORY ? OK : INVALID;
}
