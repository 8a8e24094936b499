"""The emulator by hand-written kernels, one for each feature, checked by value with and without checks."""

from __future__ import annotations

import math
import subprocess

import numpy as np
import pytest

from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.cuda.emulator import KernelFault, build_emulator
from tvm_fuse.cuda.emulator.compiler import INCLUDE, find_compiler

RNG = np.random.default_rng(3)

SOURCE = r"""
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(64)
sum_rows(const float* __restrict__ x, float* __restrict__ y, int n) {
  __shared__ float sums[64];
  int t = threadIdx.x;
  float sum = 0;
  for (int i = t; i < n; i += 64) sum += x[blockIdx.x * n + i];
  sums[t] = sum;
  __syncthreads();
  #pragma unroll
  for (int k = 32; k > 0; k >>= 1) {
    if (t < k) sums[t] += sums[t + k];
    __syncthreads();
  }
  if (t == 0) y[blockIdx.x] = sums[0];
}

// One warp for a row: every kind of shuffle.
__global__ void sum_by_shuffles(const float* x, float* y) {
  float down = x[blockIdx.x * 32 + threadIdx.x], up = down, cross = down;
  for (int k = 16; k > 0; k >>= 1) {
    down += __shfl_down_sync(__activemask(), down, k);
    cross += __shfl_xor_sync(0xffffffff, cross, k);
    float below = __shfl_up_sync(0xffffffff, up, k, 32);
    if (threadIdx.x >= k) up += below;
  }
  float first = __shfl_sync(0xffffffff, down, 32 * threadIdx.y, 32);
  float last = __shfl_sync(0xffffffff, up, 31);
  y[blockIdx.x * 96 + threadIdx.x] = first;
  y[blockIdx.x * 96 + 32 + threadIdx.x] = cross;
  y[blockIdx.x * 96 + 64 + threadIdx.x] = last;
}

__global__ void segments(const int* x, int* y) {
  int t = threadIdx.x, v = x[t];
  y[t] = __shfl_sync(0xffffffff, v, 1, 8);
  y[32 + t] = __shfl_down_sync(0xffffffff, v, 3, 8);
  y[64 + t] = __shfl_up_sync(0xffffffff, v, 3, 8);
  y[96 + t] = __ballot_sync(0xffffffff, v % 3 == 0);
  y[128 + t] = __any_sync(0xffffffff, v == 31) + 2 * __all_sync(0xffffffff, v < 31);
}

// Half the lanes of each warp take part, as in TVM's sums over more than one warp.
__global__ void sum_by_two_warps(const float* x, float* y) {
  __shared__ float staging[2];
  float v = x[threadIdx.x];
  for (int k = 16; k > 0; k >>= 1) v += __shfl_down_sync(0xffffffff, v, k, 32);
  if (threadIdx.x % 32 == 0) staging[threadIdx.x >> 5] = v;
  __syncthreads();
  float w[1];
  if (threadIdx.x < 2) w[0] = staging[threadIdx.x];
  w[0] += __shfl_down_sync(__activemask() & 3, w[0], 1, 32);
  if (threadIdx.x == 0) y[0] = w[0];
}

__global__ void sum_in_one_warp(const float* x, float* y) {
  __shared__ float sums[32];
  int t = threadIdx.x;
  sums[t] = x[t];
  __syncwarp();
  for (int k = 16; k > 0; k >>= 1) {
    float sum = t < k ? sums[t] + sums[t + k] : 0.0f;
    __syncwarp();
    if (t < k) sums[t] = sum;
    __syncwarp();
  }
  y[t] = sums[0];
}

extern "C" __global__ void reverse(const float* __restrict__ x, float* __restrict__ y, int n) {
  extern __shared__ unsigned char memory[];
  ((float*)memory)[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = ((float*)memory)[n - 1 - threadIdx.x];
}

__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[16][17];
  int column = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = x[row * columns + column];
  __syncthreads();
  column = blockIdx.x * 16 + threadIdx.y;
  row = blockIdx.y * 16 + threadIdx.x;
  if (row < rows && column < columns) y[column * rows + row] = tile[threadIdx.x][threadIdx.y];
}

__global__ void histogram(const int* x, int* counts, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&counts[x[i]], 1);
}

__global__ void extremes(const float* x, float* sum, int* most, int* least, unsigned* swapped) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(sum, x[threadIdx.x]);
  atomicMax(most, (int)x[threadIdx.x]);
  atomicMin(least, (int)x[threadIdx.x]);
  atomicAdd(&total, 1);
  atomicCAS(swapped, 7u, 8u);
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(&swapped[1], total);
}

__global__ void vectors(const float* __restrict__ x, const int* k, float* __restrict__ y) {
  float4 v = *(float4*)(x + threadIdx.x * 4);
  int2 s = *(const int2*)(k + 2 * threadIdx.x);
  *(float4*)(y + threadIdx.x * 4) = make_float4(v.w * s.x, v.z * s.y, v.y, __ldg(x + threadIdx.x * 4));
}

__global__ void pointers(const float* x, float* y) {
  const float* row = x + blockIdx.x * 8;
  float2* pair = reinterpret_cast<float2*>(y + blockIdx.x * 8);
  pair[threadIdx.x] = make_float2(row[2 * threadIdx.x], -row[2 * threadIdx.x + 1]);
}

__global__ void half_arithmetic(const half* a, const half* b, half* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = a[i] + b[i];
  y[n + i] = a[i] - b[i];
  y[2 * n + i] = a[i] * b[i];
  y[3 * n + i] = a[i] / b[i];
  y[4 * n + i] = __hgt(a[i], b[i]) ? a[i] : b[i];
  y[5 * n + i] = hsqrt(__habs(a[i]));
  y[6 * n + i] = __float2half_rn(__half2float(a[i]) * 3.0f);
  half z = a[i];
  z += b[i];
  y[7 * n + i] = -z;
}

__global__ void half_pairs(const half* x, half* y) {
  half2 v = *(half2*)(x + threadIdx.x * 2);
  half2 w = make_half2(v.y, (half)((float)v.x + 1.0f));
  *(half2*)(y + threadIdx.x * 2) = __hadd2(v, w);
}

__global__ void half_conversions(const float* x, unsigned short* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __half_as_ushort(__float2half(x[i]));
  y[n + i] = emu::half_bits_portable(x[i]);
}

__global__ void half_values(const unsigned short* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __half2float(__ushort_as_half(x[i]));
  y[65536 + i] = emu::half_value_portable(x[i]);
}

__global__ void doubles_to_half(const double* x, half* y) { y[threadIdx.x] = __double2half(x[threadIdx.x]); }

__global__ void math(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __expf(x[i]);
  y[n + i] = rsqrtf(x[i]);
  y[2 * n + i] = max(x[i], 0.5f) + min(x[i], 0.25f);
  y[3 * n + i] = tanhf(x[i]);
  y[4 * n + i] = erff(x[i]);
  y[5 * n + i] = __fdividef(1.0f, x[i]) + __logf(x[i]);
  y[6 * n + i] = __powf(x[i], 3.0f) + fmaf(x[i], 2.0f, 1.0f);
  y[7 * n + i] = max(nanf(""), x[i]) + min(x[i], nanf(""));
}

__global__ void integers(const int* x, long long* y) {
  int t = threadIdx.x;
  y[t] = max(x[t], 3) + min((unsigned)t, 5u);
  y[32 + t] = __dp4a(x[t], x[t], 1) + __popc(x[t]) + __clz(x[t]);
  y[64 + t] = (long long)x[t] * 1000000007;
}

__global__ void fill(int* y, int value, float scale, bool twice) {
  int i = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  int n = blockDim.x * blockDim.y * blockDim.z;
  y[i * n + t] = value + (int)(scale * (i * n + t)) * (twice ? 2 : 1);
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return build_emulator(SOURCE, folder=tmp_path_factory.mktemp("emulator"))


@pytest.fixture(params=[False, True], ids=["plain", "checked"])
def run(module, request):
    """Runs a kernel; three orders of threads must agree."""

    def launch(kernel, grid, block, args, **options):
        module.launch(kernel, grid, block, args, checks=request.param, seeds=(0, 1, 2), **options)

    return launch


def floats(*shape):
    return RNG.normal(size=shape).astype("float32")


# --- barriers, warps, shared memory ------------------------------------------------------------------


def test_a_sum_with_barriers(run):
    x, y = floats(5, 300), np.empty(5, "float32")
    run("sum_rows", (5,), (64,), [x, y, 300], outputs=[1])
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)


def test_shuffles(run):
    x, y = floats(3, 32), np.empty((3, 3, 32), "float32")
    run("sum_by_shuffles", (3,), (32,), [x, y], outputs=[1])
    np.testing.assert_allclose(y, np.broadcast_to(x.sum(1)[:, None, None], y.shape), rtol=1e-4, atol=1e-5)


def test_shuffles_in_parts_of_a_warp_and_votes(run):
    x, y = np.arange(32, dtype="int32"), np.empty((5, 32), "int32")
    run("segments", (1,), (32,), [x, y], outputs=[1])
    first = x // 8 * 8
    assert y[0].tolist() == (first + 1).tolist()
    assert y[1].tolist() == np.where(x % 8 + 3 < 8, x + 3, x).tolist()
    assert y[2].tolist() == np.where(x % 8 >= 3, x - 3, x).tolist()
    assert set(y[3].view("uint32")) == {sum(1 << lane for lane in range(0, 32, 3))}
    assert set(y[4]) == {1}


def test_a_sum_over_two_warps(run):
    x, y = floats(64), np.empty(1, "float32")
    run("sum_by_two_warps", (1,), (64,), [x, y], outputs=[1])
    np.testing.assert_allclose(y[0], x.sum(), rtol=1e-5)


def test_a_warp_needs_no_barrier(run):
    x, y = floats(32), np.empty(32, "float32")
    run("sum_in_one_warp", (1,), (32,), [x, y], outputs=[1])
    np.testing.assert_allclose(y, x.sum(), rtol=1e-5)


def test_dynamic_shared_memory(run):
    x, y = floats(100), np.empty(100, "float32")
    run("reverse", (1,), (100,), [x, y, 100], outputs=[1], smem_dynamic_bytes=400)
    assert (y == x[::-1]).all()


def test_blocks_in_two_dimensions(run):
    x, y = floats(40, 50), np.empty((50, 40), "float32")
    run("transpose", (4, 3), (16, 16), [x, y, 40, 50], outputs=[1])
    assert (y == x.T).all()


# --- memory ------------------------------------------------------------------------------------------


def test_a_histogram_by_atomics(run):
    x, counts = RNG.integers(0, 10, 1000).astype("int32"), np.zeros(10, "int32")
    run("histogram", (4,), (256,), [x, counts, 1000])
    assert counts.tolist() == np.bincount(x, minlength=10).tolist()


def test_other_atomics(run):
    x = np.arange(-8, 24, dtype="float32")
    arrays = [np.zeros(1, "float32"), np.zeros(1, "int32"), np.zeros(1, "int32"), np.array([7, 0], "uint32")]
    run("extremes", (1,), (32,), [x, *arrays])
    assert [array.tolist() for array in arrays] == [[x.sum()], [23], [-8], [8, 32]]


def test_vectors(run):
    x, k, y = floats(8, 4), np.arange(16, dtype="int32").reshape(8, 2), np.empty((8, 4), "float32")
    run("vectors", (1,), (8,), [x, k, y], outputs=[2])
    factors = k.astype("float32")
    assert (y == np.stack([x[:, 3] * factors[:, 0], x[:, 2] * factors[:, 1], x[:, 1], x[:, 0]], 1)).all()


def test_local_pointers(run):
    x, y = floats(3, 8), np.empty((3, 8), "float32")
    run("pointers", (3,), (4,), [x, y], outputs=[1])
    assert (y == x * np.tile([1, -1], 4)).all()


def test_scalars_and_three_dimensions(run):
    y = np.empty(2 * 3 * 4 * 24, "int32")
    run("fill", (2, 3, 4), (4, 3, 2), [y, 100, 0.5, True], outputs=[0])
    assert y.tolist() == (100 + (0.5 * np.arange(y.size)).astype(int) * 2).tolist()


def test_one_array_for_two_parameters(run):
    x, k = floats(8, 4), np.ones((8, 2), "int32")
    y = x.copy()
    run("vectors", (1,), (8,), [y, k, y])
    assert (y == x[:, ::-1]).all()


# --- arithmetic --------------------------------------------------------------------------------------


def test_half_arithmetic_is_that_of_numpy(run):
    n = 4000
    a, b = (RNG.normal(scale=s, size=n).astype("float16") for s in (1, 30))
    a[:4], b[:4] = [0, 65504, 6e-8, -np.inf], [1, 65504, 3, 2]
    y = np.empty((8, n), "float16")
    run("half_arithmetic", (16,), (256,), [a, b, y, n], outputs=[2])
    with np.errstate(over="ignore", divide="ignore"):
        wanted = [a + b, a - b, a * b, a / b, np.maximum(a, b), np.sqrt(abs(a)), a * np.float16(3), -(a + b)]
    assert (y == wanted).all()


def test_pairs_of_halves(run):
    x, y = RNG.normal(size=(8, 2)).astype("float16"), np.empty((8, 2), "float16")
    run("half_pairs", (1,), (8,), [x, y], outputs=[1])
    assert (y == x + np.stack([x[:, 1], x[:, 0] + np.float16(1)], 1)).all()


def test_rounding_to_half(run):
    """Floats of all sizes, the middle between any two neighbouring halves, and the floats beside it."""
    halves = np.arange(0x7C00, dtype="uint16").view("float16").astype("float32")
    middles = (halves[1:] + halves[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(end)) for end in (0, 9e9)]
    bits = RNG.integers(0, 2**32, 20000, dtype="uint32").view("float32")
    special = np.float32([65519, 65520, 1e9, np.inf, 0, 1e-30])
    x = np.concatenate([middles, *beside, bits[~np.isnan(bits)], special])
    x = np.concatenate([x, -x])
    y = np.empty((2, x.size), "uint16")
    run("half_conversions", (-(-x.size // 1024),), (1024,), [x, y, x.size], outputs=[1])
    with np.errstate(over="ignore"):
        wanted = x.astype("float16").view("uint16")
    assert (y == wanted).all()


def test_all_halves_as_floats(run):
    x, y = np.arange(65536, dtype="uint32").astype("uint16"), np.empty((2, 65536), "float32")
    run("half_values", (64,), (1024,), [x, y], outputs=[])
    wanted = x.view("float16").astype("float32")
    np.testing.assert_array_equal(y[0], wanted)
    np.testing.assert_array_equal(y[1], wanted)


def test_doubles_are_rounded_to_half_once(run):
    """The nearest float of these lies in the middle between two halves."""
    x = (1 + 2.0**-11) * np.ones(32) + np.where(np.arange(32) % 2, 1, -1) * 2.0**-40
    y = np.empty(32, "float16")
    run("doubles_to_half", (1,), (32,), [x, y], outputs=[1])
    assert (y == x.astype("float16")).all()
    assert len(set(y.tolist())) == 2


def test_math(run):
    n = 200
    x = RNG.uniform(0.01, 3, n).astype("float32")
    y = np.empty((8, n), "float32")
    run("math", (1,), (256,), [x, y, n], outputs=[1])
    d = x.astype("float64")
    erf = [math.erf(v) for v in d]
    wanted = [np.exp(d), d**-0.5, np.maximum(d, 0.5) + np.minimum(d, 0.25), np.tanh(d), erf,
              1 / d + np.log(d), d**3 + 2 * d + 1, 2 * d]  # fmt: skip
    np.testing.assert_allclose(y, wanted, rtol=2e-6)


def test_integers(run):
    x, y = RNG.integers(1, 2**31 - 1, 32).astype("int32"), np.empty((3, 32), "int64")
    run("integers", (1,), (32,), [x, y], outputs=[1])
    lanes = x.view("int8").reshape(32, 4).astype(int)
    binary = [format(v, "032b") for v in x.tolist()]
    assert y[0].tolist() == (np.maximum(x, 3).astype("int64") + np.minimum(np.arange(32), 5)).tolist()
    assert y[1].tolist() == [
        (row**2).sum() + 1 + text.count("1") + text.index("1") for row, text in zip(lanes, binary)
    ]
    assert y[2].tolist() == (x.astype("int64") * 1000000007).tolist()


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.zeros(300, "float32")], "takes 3 arguments, not 1"),
        (
            [np.zeros(300, "float64"), np.zeros(1, "float32"), 300],
            "x wants a contiguous array of float32, got float64",
        ),
        ([np.zeros(300, "float32"), 1.0, 300], "y wants a contiguous array of float32, got float"),
        ([np.zeros(600, "float32")[::2], np.zeros(1, "float32"), 300], "x wants a contiguous array"),
    ],
)
def test_arguments_that_do_not_fit(module, args, message):
    with pytest.raises(UsageError, match=message):
        module.launch("sum_rows", (1,), (64,), args)


def test_an_unknown_kernel(module):
    with pytest.raises(UsageError, match="no kernel 'sums'; there are sum_rows, "):
        module.launch("sums", (1,), (1,), [])


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((1,), (128,), 0, "launch: blocks of 128 threads, the most is 64"),
        ((0,), (64,), 0, "launch: an empty grid or block"),
        ((1,), (64,), 240_000, "launch: 240256 bytes of shared memory, the most is 232448"),
    ],
)
def test_launches_that_no_gpu_takes(module, grid, block, shared, message):
    args = [floats(1, 300), np.empty(1, "float32"), 300]
    with pytest.raises(KernelFault, match=message) as caught:
        module.launch("sum_rows", grid, block, args, smem_dynamic_bytes=shared)
    assert caught.value.block is None


def test_a_parameter_of_an_unknown_type():
    with pytest.raises(ToolFailed, match=r"k: the emulator does not know the parameter 'texture\* t'"):
        build_emulator("__global__ void k(texture* t) {}")


def test_what_does_not_compile(tmp_path):
    module = build_emulator("__global__ void k(float* y) { nvcuda::wmma::fill_fragment(y[0], 0.0f); }")
    with pytest.raises(ToolFailed, match=r"kernels.cu:1:.*wmma|nvcuda"):
        module.launch("k", (1,), (1,), [np.zeros(1, "float32")])


def test_no_compiler(monkeypatch):
    module = build_emulator("__global__ void k(float* y) {}", cxx="no-such-compiler")
    with pytest.raises(MissingDependency, match="there is no no-such-compiler"):
        module.library()


def test_the_compiler_may_be_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependency):
        find_compiler()


# --- the emulator itself -----------------------------------------------------------------------------


def test_a_library_is_found_again(tmp_path):
    source = "__global__ void k(float* y) { y[0] = 1; }"
    first = build_emulator(source, folder=tmp_path).library()
    time = first.stat().st_mtime_ns
    assert build_emulator(source, folder=tmp_path).library().stat().st_mtime_ns == time
    assert build_emulator(source, folder=tmp_path).library(checked=True) != first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".so", ".so"]


@pytest.mark.parametrize("options", [[], ["-DEMU_CHECKED"], ["-DEMU_USE_UCONTEXT"]])
def test_the_code_has_no_warnings(tmp_path, options):
    file = tmp_path / "all.cpp"
    driver = INCLUDE.parent / "driver.cpp"
    file.write_text(f'#include "emulator/launch.h"\n#include "cuda_fp16.h"\n#include "{driver}"\n')
    command = [find_compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *options]
    result = subprocess.run(
        [*command, f"-I{INCLUDE}", str(file)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_contexts_of_other_processors(monkeypatch):
    """ucontext, which other processors than x86-64 use, does the same."""
    monkeypatch.setattr(
        "tvm_fuse.cuda.emulator.compiler._COMMON", ("-std=c++17", "-fPIC", "-w", "-DEMU_USE_UCONTEXT")
    )
    x, y = floats(5, 300), np.empty(5, "float32")
    build_emulator(SOURCE).launch("sum_rows", (5,), (64,), [x, y, 300], outputs=[1], checks=False)
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)
