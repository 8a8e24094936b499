/* A stand-in for libcuda.so.1 on machines without the NVIDIA driver.
 *
 * A TVM built with CUDA links against the driver, so without one even generating CUDA code is
 * impossible. This library lets it load: every entry point answers CUDA_ERROR_NO_DEVICE, so
 * the CUDA runtime and TVM report "no device" in their usual way. It never pretends to run
 * anything, and it is loaded only when no real driver can be.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define STUB __attribute__((visibility("default")))

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  NO_DEVICE = 100,
  ADVERTISED_DRIVER_VERSION = 12090, /* what the CUDA 12 runtime wants to see: no "driver too old" */
};

/* Marks this library as the stand-in; tvm_fuse looks for the symbol. */
STUB const int tvm_fuse_driver_stub = 1;

/* Arguments are ignored: in the x86-64 calling convention the caller owns them. */
#define ANSWER_NO_DEVICE(name) STUB int name(void) { return NO_DEVICE; }

/* Set-up and device queries (used by libcudart and by callers of the driver API). */
ANSWER_NO_DEVICE(cuInit)
ANSWER_NO_DEVICE(cuCtxCreate_v2)
ANSWER_NO_DEVICE(cuCtxDestroy_v2)
ANSWER_NO_DEVICE(cuCtxGetCurrent)
ANSWER_NO_DEVICE(cuCtxGetDevice)
ANSWER_NO_DEVICE(cuCtxPopCurrent_v2)
ANSWER_NO_DEVICE(cuCtxPushCurrent_v2)
ANSWER_NO_DEVICE(cuCtxSetCurrent)
ANSWER_NO_DEVICE(cuCtxSynchronize)
ANSWER_NO_DEVICE(cuDeviceGet)
ANSWER_NO_DEVICE(cuDeviceGetAttribute)
ANSWER_NO_DEVICE(cuDeviceGetName)
ANSWER_NO_DEVICE(cuDeviceGetUuid)
ANSWER_NO_DEVICE(cuDevicePrimaryCtxRelease_v2)
ANSWER_NO_DEVICE(cuDevicePrimaryCtxRetain)
ANSWER_NO_DEVICE(cuDeviceTotalMem_v2)

/* Memory, modules and launches (the first six and the tensor maps are linked by TVM). */
ANSWER_NO_DEVICE(cuFuncSetAttribute)
ANSWER_NO_DEVICE(cuLaunchKernel)
ANSWER_NO_DEVICE(cuMemsetD32_v2)
ANSWER_NO_DEVICE(cuModuleGetFunction)
ANSWER_NO_DEVICE(cuModuleGetGlobal_v2)
ANSWER_NO_DEVICE(cuModuleLoadData)
ANSWER_NO_DEVICE(cuModuleLoadDataEx)
ANSWER_NO_DEVICE(cuModuleUnload)
ANSWER_NO_DEVICE(cuFuncGetAttribute)
ANSWER_NO_DEVICE(cuMemAlloc_v2)
ANSWER_NO_DEVICE(cuMemFree_v2)
ANSWER_NO_DEVICE(cuMemcpyDtoH_v2)
ANSWER_NO_DEVICE(cuMemcpyHtoD_v2)
ANSWER_NO_DEVICE(cuTensorMapEncodeIm2col)
ANSWER_NO_DEVICE(cuTensorMapEncodeTiled)
ANSWER_NO_DEVICE(cuGetExportTable)

STUB int cuDriverGetVersion(int *version) {
  if (version == NULL) return INVALID_VALUE;
  *version = ADVERTISED_DRIVER_VERSION;
  return SUCCESS;
}

STUB int cuDeviceGetCount(int *count) {
  if (count != NULL) *count = 0;
  return NO_DEVICE;
}

static int describe(int error, const char **text, const char *success, const char *no_device) {
  if (text == NULL) return INVALID_VALUE;
  *text = error == SUCCESS ? success : error == NO_DEVICE ? no_device : NULL;
  return *text == NULL ? INVALID_VALUE : SUCCESS;
}

STUB int cuGetErrorName(int error, const char **text) {
  int status = describe(error, text, "CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE");
  if (text != NULL && *text == NULL) *text = "CUDA_ERROR_UNKNOWN"; /* TVM prints it unchecked */
  return status;
}

STUB int cuGetErrorString(int error, const char **text) {
  return describe(error, text, "no error", "no NVIDIA driver is installed (tvm-fuse driver stub)");
}

/* Entry points that we do not name still get an answer, never a null pointer. */
static int answer_no_device(void) { return NO_DEVICE; }

STUB int cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version, uint64_t flags,
                             int *status);

STUB int cuGetProcAddress(const char *symbol, void **function, int cuda_version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, cuda_version, flags, NULL);
}

STUB int cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version, uint64_t flags,
                             int *status) {
  (void)flags;
  if (symbol == NULL || function == NULL) return INVALID_VALUE;
  *function = (void *)answer_no_device;
  if (strcmp(symbol, "cuDriverGetVersion") == 0) *function = (void *)cuDriverGetVersion;
  if (strcmp(symbol, "cuDeviceGetCount") == 0) *function = (void *)cuDeviceGetCount;
  if (strcmp(symbol, "cuGetErrorName") == 0) *function = (void *)cuGetErrorName;
  if (strcmp(symbol, "cuGetErrorString") == 0) *function = (void *)cuGetErrorString;
  if (strcmp(symbol, "cuGetProcAddress") == 0) {
    /* The name means the five-argument version from CUDA 12 on. */
    *function = cuda_version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
  }
  if (status != NULL) *status = 0; /* CU_GET_PROC_ADDRESS_SUCCESS */
  return SUCCESS;
}
