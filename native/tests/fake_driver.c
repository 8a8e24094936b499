// The stand-in of the Python runner's tests, with the calls that only the C++ runner makes.
#include "fake_cuda.c"

int cuCtxPushCurrent_v2(void *context) { (void)context; FAIL(NULL); return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuModuleLoadData(void **module, const void *image) { (void)image; FAIL(NULL); *module = (void *)1; return 0; }
int cuModuleUnload(void *module) { (void)module; return 0; }
int cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
