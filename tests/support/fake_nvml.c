/* An NVML that is made up: FAKE_NVML says which cards there are, as words with commas between them.
 *
 *   card            healthy: 24 GiB, 1 GiB used, PCIe 4.0 x16
 *   busy            21 GiB used by three processes, one of which is in both lists
 *   hidden          21 GiB used, and no process to be seen
 *   narrow          PCIe 3.0 x4, of 4.0 x16
 *   bare            everything that may be unsupported is
 *   hot             its clocks are held down for heat, as a driver of the new name for the reasons tells
 *   old             the same by the reasons' old name
 *   empty           its memory is 0 bytes
 *   15@nvmlCall     this call returns 15
 * FAKE_NVML_INIT is what nvmlInitWithFlags returns. Once a call has returned 1 (uninitialised), all do, until the next start.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { char old_id[16]; unsigned domain, bus, device, model, subsystem; char id[32]; } pci_t;
typedef char *device_t;

static const unsigned long long GIB = 1ull << 30;
static int dead;

static char words[16][64];

static device_t card(unsigned index) {
    const char *at = getenv("FAKE_NVML");
    unsigned i = 0;
    for (; at && *at && i < 16; i++) {
        size_t length = strcspn(at, ",");
        snprintf(words[i], sizeof words[i], "%.*s", (int)length, at);
        at += length + (at[length] == ',');
    }
    return index < i ? words[index] : NULL;
}

static int is(device_t d, const char *word) { return !strcmp(d, word); }

static int answer(device_t d, const char *call, int optional) {
    char *at = strchr(d, '@');
    int code = 0;
    if (dead) return 1;
    if (at && !strcmp(at + 1, call)) code = atoi(d);
    if (optional && is(d, "bare")) code = 3;
    if (code == 1) dead = 1;
    return code;
}

#define ASK(optional) int code = answer(d, __func__, optional); if (code) return code
#define TEXT(...) return snprintf(text, size, __VA_ARGS__) < 0

int nvmlInitWithFlags(unsigned flags) {
    const char *code = getenv("FAKE_NVML_INIT");
    (void)flags;
    dead = 0;
    return code ? atoi(code) : 0;
}
int nvmlShutdown(void) { return dead; }
const char *nvmlErrorString(int code) { (void)code; return "a made-up error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { TEXT("575.57.08"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12090; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { for (*count = 0; card(*count); ++*count); return dead; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) { device_t d = *device = card(index); ASK(0); return 0; }
int nvmlDeviceGetName(device_t d, char *text, unsigned size) { ASK(0); TEXT("NVIDIA GeForce RTX 4090"); }
int nvmlDeviceGetUUID(device_t d, char *text, unsigned size) { ASK(1); TEXT("GPU-%08x", (unsigned)strlen(d)); }
int nvmlDeviceGetPciInfo_v3(device_t d, pci_t *p) {
    ASK(1);
    memset(p, 0, sizeof *p);
    p->domain = 0xf; p->bus = 0xc1 + (unsigned)(d - words[0]) / sizeof *words;
    return 0;
}
int nvmlDeviceGetMemoryInfo(device_t d, memory_t *m) {
    ASK(0);
    memset(m, 0, sizeof *m);
    if (is(d, "empty")) return 0;
    m->total = 24 * GIB; m->used = (is(d, "busy") || is(d, "hidden") ? 21 : 1) * GIB; m->free = m->total - m->used;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(device_t d, int *major, int *minor) { ASK(1); *major = 8; *minor = 9; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t d, unsigned *out) { ASK(1); *out = is(d, "narrow") ? 3 : 4; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(device_t d, unsigned *out) { ASK(1); *out = 1; return 0; }
int nvmlDeviceGetGpuMaxPcieLinkGeneration(device_t d, unsigned *out) { ASK(1); *out = 4; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(device_t d, unsigned *out) { ASK(1); *out = is(d, "narrow") ? 4 : 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(device_t d, unsigned *out) { ASK(1); *out = 16; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(device_t d, unsigned long long *mj) {
    static unsigned long long used;
    ASK(1); *mj = used += 1500; return 0; /* 1.5 J for each time that it is asked */
}
int nvmlDeviceGetCurrentClocksEventReasons(device_t d, unsigned long long *out) {
    ASK(1);
    if (is(d, "old")) return 13; /* FUNCTION_NOT_FOUND */
    *out = is(d, "hot") ? 0x24 : 0x5; /* idle and the power limit are no throttling */
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t d, unsigned long long *out) { ASK(1); *out = 0x48; return 0; }
int nvmlDeviceGetUtilizationRates(device_t d, utilization_t *u) { ASK(1); u->gpu = 37; u->memory = 5; return 0; }

static int processes(device_t d, unsigned *count, process_t *out, unsigned first, unsigned last) {
    static const process_t all[] = {{4242, 17ull << 30, 0, 0}, {77, 3ull << 30, 0, 0}, {88, -1ull, 0, 0}};
    if (!is(d, "busy")) { *count = 0; return 0; }
    if (!out) { *count = last - first; return 7; /* INSUFFICIENT_SIZE */ }
    memcpy(out, all + first, (last - first) * sizeof *out);
    *count = last - first;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t d, unsigned *count, process_t *out) { ASK(1); return processes(d, count, out, 0, 2); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t d, unsigned *count, process_t *out) { ASK(1); return processes(d, count, out, 1, 3); }
int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size) {
    if (pid == 77) return 6; /* NOT_FOUND: another container's */
    if (pid == 88) TEXT("\xff\xfe");
    TEXT("/usr/bin/blender");
}
