// A libcuda for tests of the runner: host memory, and three kernels in C that stand for the machine code.
//
// FAKE_CUDA_FAIL="name:status" makes a function fail; "name@symbol:status" only for that kernel, and for
// cuCtxSynchronize after its launch. FAKE_CUDA_ARCH="86" is the device's. A capture records the launches.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { const char *symbol; void (*run)(void **, unsigned); } Kernel;
typedef struct { const Kernel *kernel; unsigned threads; void *values[4]; } Launch;
typedef struct { int count; Launch launches[4096]; } Graph;

// (out, in): out = in + 1
static void add_one(void **a, unsigned n) {
  float *out = *(float **)a[0], *in = *(float **)a[1];
  for (unsigned i = 0; i < n; ++i) out[i] = in[i] + 1.0f;
}
// (out, in, weight, scale): out = in * weight * scale
static void scale(void **a, unsigned n) {
  float *out = *(float **)a[0], *in = *(float **)a[1], *weight = *(float **)a[2];
  for (unsigned i = 0; i < n; ++i) out[i] = in[i] * weight[i] * *(float *)a[3];
}
// (out): nothing is written
static void idle(void **a, unsigned n) { (void)a, (void)n; }

static const Kernel kernels[] = {{"add_one", add_one}, {"scale", scale}, {"idle", idle}};
static const int parameters[] = {2, 4, 1};
static const Kernel *last;
static Graph *capturing;

static int fails(const char *name, const char *symbol) {
  const char *rule = getenv("FAKE_CUDA_FAIL");
  char wanted[128];
  snprintf(wanted, sizeof wanted, symbol ? "%s@%s:" : "%s:", name, symbol);
  if (rule && !strncmp(rule, wanted, strlen(wanted))) return atoi(rule + strlen(wanted));
  return symbol ? fails(name, NULL) : 0;
}
#define FAIL(symbol) do { int status = fails(__func__, symbol); if (status) return status; } while (0)

int cuInit(unsigned flags) { (void)flags; last = NULL; FAIL(NULL); return 0; }
int cuDriverGetVersion(int *version) { *version = 12090; return 0; }
int cuDeviceGetCount(int *count) { *count = getenv("FAKE_CUDA_NO_DEVICE") ? 0 : 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "Fake GPU", size); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  (void)device;
  const char *text = getenv("FAKE_CUDA_ARCH");
  int arch = text ? atoi(text) : 90;
  *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : 7;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuCtxSynchronize(void) { FAIL(last ? last->symbol : NULL); return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { FAIL(NULL); *address = (uint64_t)malloc(bytes); return 0; }
int cuMemFree_v2(uint64_t address) { free((void *)address); return 0; }
int cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t bytes) { memset((void *)address, byte, bytes); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuModuleLoad(void **module, const char *file) { (void)file; FAIL(NULL); *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *symbol) {
  (void)module;
  for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; ++i)
    if (!strcmp(kernels[i].symbol, symbol)) { *function = (void *)&kernels[i]; return 0; }
  return 500;
}
int cuFuncSetAttribute(void *function, int which, int value) { (void)which, (void)value; FAIL(((Kernel *)function)->symbol); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = (void *)1; return 0; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  (void)shared, (void)stream, (void)extra;
  last = function;
  FAIL(last->symbol);
  if (!capturing) { last->run(arguments, gx * gy * gz * bx * by * bz); return 0; }
  Launch *launch = &capturing->launches[capturing->count++];
  launch->kernel = last;
  launch->threads = gx * gy * gz * bx * by * bz;
  for (int i = 0; i < parameters[last - kernels]; ++i) launch->values[i] = arguments[i];
  return 0;
}
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = calloc(1, sizeof(struct timespec)); return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream) { (void)stream; clock_gettime(CLOCK_MONOTONIC, event); return 0; }
int cuEventSynchronize(void *event) { (void)event; return 0; }
int cuEventElapsedTime(float *ms, struct timespec *start, struct timespec *end) {
  *ms = (end->tv_sec - start->tv_sec) * 1e3f + (end->tv_nsec - start->tv_nsec) * 1e-6f;
  return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream, (void)mode; FAIL(NULL); capturing = calloc(1, sizeof(Graph)); return 0; }
int cuStreamEndCapture(void *stream, void **graph) { (void)stream; *graph = capturing; capturing = NULL; FAIL(NULL); return 0; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) { (void)flags; FAIL(NULL); *executable = graph; return 0; }
int cuGraphLaunch(void *executable, void *stream) {
  (void)stream;
  FAIL(NULL);
  Graph *graph = executable;
  for (int i = 0; i < graph->count; ++i) {
    void **values = graph->launches[i].values;
    graph->launches[i].kernel->run(values, graph->launches[i].threads);
  }
  return 0;
}
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *executable) { (void)executable; return 0; }
int cuGetErrorName(int status, const char **text) { *text = status == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == 719 ? "unspecified launch failure" : "some failure"; return status == 801; }
