// The part of the CUDA driver API that a runner needs, declared here so that it builds without a CUDA toolkit.
// Source: CUDA Driver API reference, https://docs.nvidia.com/cuda/cuda-driver-api/ (CUDA 11.4 and newer). All of
// CUresult, CUdevice and the enumerations are int in its ABI, handles are pointers, CUdeviceptr has 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tvm_fuse {

using CudaStatus = int;        // CUresult
using CudaAddress = uint64_t;  // CUdeviceptr
using CudaHandle = void*;      // CUcontext, CUmodule, CUfunction, CUstream, CUevent, CUgraph, CUgraphExec

enum : CudaStatus {
  kCudaSuccess = 0,
  kCudaOutOfMemory = 2,
  kCudaNoDevice = 100,
  kCudaNotSupported = 801,
};

enum : int {
  kMultiprocessors = 16,      // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  kComputeMajor = 75,         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  kComputeMinor = 76,         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
  kMaxDynamicSharedSize = 8,  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  kCaptureThreadLocal = 1,    // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
};

// X(name, parameters): what every driver has ...
#define TVM_FUSE_CUDA_FUNCTIONS(X)                                                                     \
  X(cuInit, (unsigned flags))                                                                          \
  X(cuDriverGetVersion, (int* version))                                                                \
  X(cuDeviceGetCount, (int* count))                                                                    \
  X(cuDeviceGet, (int* device, int ordinal))                                                           \
  X(cuDeviceGetName, (char* name, int size, int device))                                               \
  X(cuDeviceGetAttribute, (int* value, int attribute, int device))                                     \
  X(cuDevicePrimaryCtxRetain, (CudaHandle * context, int device))                                      \
  X(cuDevicePrimaryCtxRelease_v2, (int device))                                                        \
  X(cuCtxPushCurrent_v2, (CudaHandle context))                                                         \
  X(cuCtxPopCurrent_v2, (CudaHandle * context))                                                        \
  X(cuCtxSynchronize, ())                                                                              \
  X(cuMemAlloc_v2, (CudaAddress * address, size_t bytes))                                              \
  X(cuMemFree_v2, (CudaAddress address))                                                               \
  X(cuMemsetD8_v2, (CudaAddress address, unsigned char byte, size_t count))                            \
  X(cuMemcpyHtoD_v2, (CudaAddress to, const void* from, size_t bytes))                                 \
  X(cuMemcpyDtoH_v2, (void* to, CudaAddress from, size_t bytes))                                       \
  X(cuModuleLoadData, (CudaHandle * module, const void* image))                                        \
  X(cuModuleUnload, (CudaHandle module))                                                               \
  X(cuModuleGetFunction, (CudaHandle * function, CudaHandle module, const char* name))                 \
  X(cuFuncSetAttribute, (CudaHandle function, int attribute, int value))                               \
  X(cuStreamCreate, (CudaHandle * stream, unsigned flags))                                             \
  X(cuStreamDestroy_v2, (CudaHandle stream))                                                           \
  X(cuLaunchKernel, (CudaHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,           \
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,      \
                     CudaHandle stream, void** arguments, void** extra))                               \
  X(cuEventCreate, (CudaHandle * event, unsigned flags))                                               \
  X(cuEventRecord, (CudaHandle event, CudaHandle stream))                                              \
  X(cuEventSynchronize, (CudaHandle event))                                                            \
  X(cuEventElapsedTime, (float* milliseconds, CudaHandle start, CudaHandle end))                       \
  X(cuEventDestroy_v2, (CudaHandle event))                                                             \
  X(cuGetErrorName, (CudaStatus status, const char** text))                                            \
  X(cuGetErrorString, (CudaStatus status, const char** text))

// ... and what those without CUDA graphs lack: nothing else depends on it.
#define TVM_FUSE_CUDA_GRAPH_FUNCTIONS(X)                                                               \
  X(cuStreamBeginCapture_v2, (CudaHandle stream, int mode))                                            \
  X(cuStreamEndCapture, (CudaHandle stream, CudaHandle * graph))                                       \
  X(cuGraphInstantiateWithFlags, (CudaHandle * executable, CudaHandle graph, unsigned long long flags)) \
  X(cuGraphLaunch, (CudaHandle executable, CudaHandle stream))                                         \
  X(cuGraphDestroy, (CudaHandle graph))                                                                \
  X(cuGraphExecDestroy, (CudaHandle executable))

struct CudaApi {
#define TVM_FUSE_DECLARE(name, parameters) CudaStatus(*name) parameters = nullptr;
  TVM_FUSE_CUDA_FUNCTIONS(TVM_FUSE_DECLARE)
  TVM_FUSE_CUDA_GRAPH_FUNCTIONS(TVM_FUSE_DECLARE)
#undef TVM_FUSE_DECLARE
  bool is_emulated = false;                 // the CPU emulator's driver
  const char* (*emulator_fault)() = nullptr;  // what it knows of a launch that failed
  bool has_graphs() const;
};

}  // namespace tvm_fuse
