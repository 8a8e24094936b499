"""What a kernel may not do, and how the emulator finds it: mutants of correct kernels, one fault each."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tvm_fuse.cuda.emulator import KernelFault, build_emulator

#: Each is correct. The first sums rows, 64 numbers at a time; the second has two elements a thread.
KERNELS = {
    "sums": r"""
__global__ void __launch_bounds__(64) sums(const float* __restrict__ x, float* __restrict__ y, int n) {
  __shared__ float parts[64];
  int t = threadIdx.x;
  float sum[1];
  sum[0] = 0.0f;
  for (int i = t; i < n; i += 64) {
    sum[0] += x[(int)blockIdx.x * n + i];
  }
  parts[t] = sum[0];
  __syncthreads();
  for (int k = 32; k > 0; k >>= 1) {
    if (t < k) {
      parts[t] += parts[t + k];
    }
    __syncthreads();
  }
  if (t == 0) {
    y[blockIdx.x] = parts[0];
  }
}
""",
    "scale": r"""
__global__ void scale(const float* __restrict__ x, const int* divisor, float* __restrict__ y, int n) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (i < n) {
    float2 v = *(float2*)(x + i);
    *(float2*)(y + i) = make_float2(v.x / (24 / divisor[0]), v.y);
  }
}
""",
    "count": r"""
__global__ void count(const int* x, int* bins, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    atomicAdd(&bins[x[i]], 1);
  }
}
""",
    "neighbours": r"""
__global__ void neighbours(const float* x, float* y) {
  __shared__ float copy[64];
  copy[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = copy[threadIdx.x ^ 1];
}
""",
    "lanes": r"""
__global__ void lanes(const float* x, float* y) {
  float v = x[threadIdx.x];
  v += __shfl_xor_sync(0xffffffff, v, 1);
  y[threadIdx.x] = v;
}
""",
    "dynamic": r"""
__global__ void dynamic(const float* x, float* y) {
  extern __shared__ float memory[];
  memory[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = memory[63 - threadIdx.x];
}
""",
}

ROWS, N = 5, 100


def arguments(kernel):
    """Grid, block, arguments, positions of the outputs, and what the last array is to hold."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, N)).astype("float32")
    row, warps = x[0], x.reshape(-1)[:64]
    if kernel == "sums":
        return (ROWS,), (64,), [x, np.empty(ROWS, "float32"), N], [1], x.sum(1)
    if kernel == "scale":
        divisor, y = np.full(1, 3, "int32"), np.empty(N, "float32")
        return (2,), (32,), [row, divisor, y, N], [2], row / np.tile([8, 1], N // 2)
    if kernel == "count":
        index, bins = np.arange(N, dtype="int32") % 7, np.zeros(7, "int32")
        return (4,), (32,), [index, bins, N], [], np.bincount(index)
    y = np.empty(64, "float32")
    if kernel == "neighbours":
        return (1,), (64,), [warps, y], [1], warps.reshape(32, 2)[:, ::-1].reshape(-1)
    if kernel == "lanes":
        return (1,), (64,), [warps, y], [1], warps.reshape(32, 2).sum(1).repeat(2)
    return (1,), (64,), [warps, y], [1], warps[::-1]


def run(module, kernel, symbol, checks, *, smaller_by=0, shared=256, seeds=(0, 1, 2)):
    """How a launch ends: with a fault, with ``wrong values``, or with an empty string."""
    (blocks,), block, args, outputs, wanted = arguments(kernel)
    options = {"outputs": outputs, "smem_dynamic_bytes": shared if kernel == "dynamic" else 0}
    try:
        module.launch(symbol, (blocks - smaller_by,), block, args, checks=checks, seeds=seeds, **options)
    except KernelFault as fault:
        return fault.what
    got = [array for array in args if isinstance(array, np.ndarray)][-1]
    return "" if np.allclose(got, wanted, rtol=1e-4, atol=1e-5) else "wrong values"


ANY = ".*"  # whatever lies in memory

# kernel, old text, new text, how it ends with checks, how without
MUTANTS = {
    "no barrier after the store": (
        "sums", "parts[t] = sum[0];\n  __syncthreads();", "parts[t] = sum[0];",
        r"uninitialized: reads parts\[32\]", "unwritten: "),
    "no barrier in the loop": (
        "sums", "    __syncthreads();\n", "",
        r"race: (reads|writes) parts\[\d+\], which .* (wrote|read) since the last barrier", ANY),
    "a barrier that half the threads reach": (
        "sums", "parts[t] += parts[t + k];", "parts[t] += parts[t + k]; __syncthreads();",
        "divergent barrier: this thread waits at line", "divergent barrier: this thread waits at line"),
    "threads that leave before a barrier": (
        "sums", "int t = threadIdx.x;", "int t = threadIdx.x; if (t > 60) return;",
        "divergent barrier: this thread ends while all", "divergent barrier: this thread ends while all"),
    "a barrier for one warp": (
        "sums", "if (t == 0) {", "if (t < 32) __syncthreads();\n  if (t == 0) {",
        "divergent barrier: ", "divergent barrier: "),
    "reads one further": (
        "sums", "n + i]", "n + i + 1]",
        r"out of bounds: 4 bytes at x\[500\], which has 500 elements", "unwritten: 1 of 5 elements of y"),
    "reads one before": (
        "sums", "n + i]", "n + i - 1]",
        r"out of bounds: 4 bytes at x\[-1\], which has 500 elements", "unwritten: 1 of 5 elements of y"),
    "writes one further": (
        "sums", "y[blockIdx.x]", "y[blockIdx.x + 1]",
        r"out of bounds: 4 bytes at y\[5\]", "out of bounds: something was written after y"),
    "writes one before": (
        "sums", "y[blockIdx.x]", "y[(int)blockIdx.x - 1]",
        r"out of bounds: 4 bytes at y\[-1\]", "out of bounds: something was written before y"),
    "reads far away": (
        "sums", "n + i]", "n + i + 20000000000000]",
        r"out of bounds: 4 bytes at x\[20000000000000\]", "out of bounds: address .* is no memory"),
    "shared memory one further": (
        "sums", "parts[t] = sum[0]", "parts[t + 1] = sum[0]",
        r"out of bounds: 4 bytes at parts\[64\]", ANY),
    "shared memory one before": (
        "sums", "parts[t] = sum[0]", "parts[t - 1] = sum[0]",
        r"out of bounds: 4 bytes at parts\[-1\]", ANY),
    "a local array one further": (
        "sums", "parts[t] = sum[0]", "parts[t] = sum[t / 63]",
        r"out of bounds: element 1 of an array, line \d+", ANY),
    "shared memory that is not written": (
        "sums", "parts[t] = sum[0]", "if (t != 40) parts[t] = sum[0]",
        r"uninitialized: reads parts\[40\]", "unwritten: "),
    "a sum that does not begin with 0": (
        "sums", "sum[0] = 0.0f;", "",
        "wrong values", ANY),
    "blocks that write one place": (
        "sums", "y[blockIdx.x]", "y[0]",
        r"race: writes y\[0\], which another block wrote", "unwritten: 4 of 5|order: "),
    "no guard of the tail": (
        "scale", "if (i < n)", "if (true)",
        r"out of bounds: 8 bytes at x\[100\]", "out of bounds: something was written after y"),
    "a guard that lets one more in": (
        "scale", "if (i < n)", "if (i <= n)",
        r"out of bounds: 8 bytes at x\[100\]", "out of bounds: something was written after y"),
    "a guard that keeps one out": (
        "scale", "if (i < n)", "if (i + 2 < n)",
        r"unwritten: y\[98\] and 1 others of 100 elements", "unwritten: 2 of 100 elements of y"),
    "a vector that is not aligned": (
        "scale", "(float2*)(x + i)", "(float2*)(x + i + 1)",
        r"misaligned: 8 bytes at x\[1\], wanted at a multiple of 8 bytes", "unwritten: 1 of 100"),
    "a division by zero": (
        "scale", "divisor[0]", "(divisor[0] - 3)",
        r"division by zero, line \d+", "division by zero"),
    "an addition that is not atomic": (
        "count", "atomicAdd(&bins[x[i]], 1);", "bins[x[i]] += 1;",
        r"race: reads bins\[\d\], which thread \(\d+, 0, 0\) wrote", ANY),
    "an atomic addition beside a read": (
        "count", "atomicAdd(&bins[x[i]], 1);", "if (bins[x[i]] >= 0) atomicAdd(&bins[x[i]], 1);",
        r"race: reads bins\[\d\], which thread \(\d+, 0, 0\) wrote", ANY),
    "neighbours of another warp": (
        "neighbours", "threadIdx.x ^ 1", "threadIdx.x ^ 32",
        r"race: reads copy\[\d+\], which thread|uninitialized: reads copy\[32\]", ANY),
    "no order within the warp": (
        "neighbours", "__syncwarp();", "",
        r"uninitialized: reads copy\[1\]", "unwritten: "),
    "a lane that does not come": (
        "lanes", "v += __shfl_xor_sync", "if (threadIdx.x != 3) v += __shfl_xor_sync",
        "unwritten: 1 of 64 elements of y", "unwritten: 1 of 64 elements of y"),
    "a lane that waits elsewhere": (
        "lanes", "v += __shfl_xor_sync", "if (threadIdx.x == 3) __syncthreads(); else v += __shfl_xor_sync",
        "deadlock: ", "deadlock: "),
    "masks that differ": (
        "lanes", "0xffffffff", "(threadIdx.x % 2 ? 0xffffffff : 0x7fffffff)",
        "warp operation: masks", "warp operation: masks"),
    "the wrong neighbour": (
        "lanes", "v, 1)", "v, 2)",
        "wrong values", "wrong values"),
    "dynamic shared memory one further": (
        "dynamic", "memory[63 -", "memory[64 -",
        r"out of bounds: 4 bytes at dynamic shared memory\[256\], which has 256 elements", ANY),
}  # fmt: skip


def symbol_of(name):
    return "mutant_" + re.sub(r"\W", "_", name)


def source_of(name):
    kernel, old, new, *_ = MUTANTS[name]
    assert KERNELS[kernel].count(old) == 1, name
    return KERNELS[kernel].replace(old, new).replace(f" {kernel}(", f" {symbol_of(name)}(")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """All kernels and all mutants."""
    source = "".join([*KERNELS.values(), *map(source_of, MUTANTS)])
    return build_emulator(source, folder=tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_are_correct(module, kernel, checks):
    assert run(module, kernel, kernel, checks, seeds=(0, 1, 2, 3)) == ""


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(module, name, checks):
    kernel, _, _, checked, plain = MUTANTS[name]
    found = run(module, kernel, symbol_of(name), checks)
    assert re.match(checked if checks else plain, found), found


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("kernel", ["sums", "scale"])
def test_a_missing_block(module, kernel, checks):
    assert re.match("unwritten: ", run(module, kernel, kernel, checks, smaller_by=1))


def test_orders_of_threads_find_races_without_checks(module):
    symbol = symbol_of("no barrier in the loop")
    assert run(module, "sums", symbol, False, seeds=range(6)).startswith("order: ")


def test_too_little_dynamic_shared_memory(module):
    assert run(module, "dynamic", "dynamic", True, shared=252).startswith("out of bounds: 4 bytes at dynamic")


# --- what a fault tells, and what it leaves ----------------------------------------------------------


def test_a_fault_names_kernel_block_and_thread(module):
    grid, block, args, outputs, _ = arguments("sums")
    symbol = symbol_of("reads one further")
    with pytest.raises(KernelFault) as caught:
        module.launch(symbol, grid, block, args, outputs=outputs)
    fault = caught.value
    assert (fault.kernel, fault.kind, fault.block) == (symbol, "out of bounds", (4, 0, 0))
    assert fault.thread == (35, 0, 0)  # 99 = 64 + 35
    assert str(fault).startswith(f"{symbol}: out of bounds: 4 bytes at x[500]")
    assert str(fault).endswith("(block (4, 0, 0), thread (35, 0, 0))")


def test_a_fault_leaves_arrays_as_they_were(module):
    grid, block, args, _, _ = arguments("sums")
    args[1][:] = 7
    with pytest.raises(KernelFault):
        module.launch(symbol_of("writes one further"), grid, block, args)
    assert (args[1] == 7).all()


@pytest.mark.parametrize("checks", [True, False])
def test_after_a_fault_the_module_works(module, checks):
    for name in ("reads far away", "a barrier for one warp", "a division by zero"):
        assert run(module, MUTANTS[name][0], symbol_of(name), checks)
    for kernel in KERNELS:
        assert run(module, kernel, kernel, checks) == ""
