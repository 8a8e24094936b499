"""Hand-written kernels, each with one trait, and how they are launched."""

from __future__ import annotations

from tvm_fuse.cuda.launch import Launch, Parameter

__all__ = ["LAUNCHES", "SOURCE"]

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(128) plain(float* a, const float* b) {
  a[blockIdx.x * 128 + threadIdx.x] = 2 * b[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(256) shared_memory(float* a) {
  __shared__ float tile[1000];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = tile[255 - threadIdx.x];
}

extern "C" __global__ void dynamic_shared_memory(float* a) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = tile[63 - threadIdx.x];
}

// An array that is indexed at run time cannot live in registers.
extern "C" __global__ void stack(float* a, int n, double x) {
  float local[64];
  for (int i = 0; i < 64; ++i) local[i] = a[i];
  for (int i = 0; i < n; ++i) local[(i * 7) & 63] += a[i];
  a[threadIdx.x] = local[n & 63] + x;
}

// 1024 threads leave 64 registers to each; this one wants 128 and more.
extern "C" __global__ void __launch_bounds__(1024) spill(float* a, const float* b) {
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = b[i * 1024 + threadIdx.x];
  for (int k = 0; k < 100; ++k) {
#pragma unroll
    for (int i = 0; i < 128; ++i) v[i] = v[i] * v[(i + 1) % 128] + b[k];
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += v[i] * (i + 1);
  a[threadIdx.x] = sum;
}

__device__ __noinline__ float helper(const float* p, int n) {
  float local[32];
  for (int i = 0; i < n; ++i) local[i & 31] += p[i];
  return local[n & 31];
}

extern "C" __global__ void calls(float* a, int n) {
  a[0] = helper(a, n);
}

extern "C" __global__ void no_parameters() {
}
"""

_A, _B, _N = Parameter("a", "float32"), Parameter("b", "float32"), Parameter("n", "int32", 4, False)

LAUNCHES = (
    Launch("plain", (10, 1, 1), (128, 1, 1), parameters=(_A, _B)),
    Launch("shared_memory", (1, 1, 1), (16, 16, 1), parameters=(_A,)),
    Launch("dynamic_shared_memory", (1, 1, 1), (64, 1, 1), 30_000, (_A,)),
    Launch("stack", (1, 1, 1), (32, 1, 1), parameters=(_A, _N, Parameter("x", "float64", 8, False))),
    Launch("spill", (1, 1, 1), (1024, 1, 1), parameters=(_A, _B)),
    Launch("calls", (1, 1, 1), (1, 1, 1), parameters=(_A, _N)),
    Launch("no_parameters", (1, 1, 1), (1, 1, 1)),
)
