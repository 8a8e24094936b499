"""Occupancy: values worked by hand, and NVIDIA's own calculator where its header and g++ are there."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.gpu import GPUS, Limit, blocks_per_sm, find_gpu

THREADS, REGISTERS, SMEM, BLOCKS = Limit.THREADS, Limit.REGISTERS, Limit.SHARED_MEMORY, Limit.BLOCKS


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_bytes", "blocks", "ratio", "limited_by"),
    [
        # 8 warps of 64; 32 x 32 = 1024 registers a warp, 16384 / 1024 = 16 warps on each of 4 parts.
        ("sm_80", 256, 32, 0, 8, 1.0, (THREADS, REGISTERS)),
        # 65 x 32 = 2080, given out as 2304: 7 warps on each part, 28 in all.
        ("sm_80", 256, 65, 0, 3, 0.375, (REGISTERS,)),
        # 20000 bytes are given out as 79 x 256 = 20224: three times in 65536.
        ("sm_75", 128, 40, 20000, 3, 0.375, (SMEM,)),
        # 48 KiB and the reserved KiB are 50176 bytes, 392 units of 128: twice in 100 KiB.
        ("sm_86", 96, 100, 48 * 1024, 2, 0.125, (SMEM,)),
        # One warp a block: the SM is out of blocks with half of its 64 warps.
        ("sm_90", 1, 10, 8, 32, 0.5, (BLOCKS,)),
        ("sm_89", 32, 10, 0, 24, 0.5, (BLOCKS,)),
        # 64 x 32 = 2048 registers a warp: 8 on each part, one block of 32 warps.
        ("sm_70", 1024, 64, 0, 1, 0.5, (REGISTERS,)),
        # 2304 x 32 = 73728 registers: more than a block may have.
        ("sm_80", 1024, 65, 0, 0, 0.0, (REGISTERS,)),
        # 5 warps count as 8 in the check of a block's registers: 8192 x 8 is all that there is.
        ("sm_80", 160, 255, 0, 1, 5 / 64, (REGISTERS,)),
        ("sm_80", 1025, 1, 0, 0, 0.0, (THREADS,)),
        ("sm_80", 32, 256, 0, 0, 0.0, (REGISTERS,)),
        ("sm_89", 32, 16, 99 * 1024, 1, 1 / 48, (SMEM,)),
        ("sm_89", 32, 16, 99 * 1024 + 1, 0, 0.0, (SMEM,)),
        ("sm_120", 1536 // 3, 0, 0, 3, 1.0, (THREADS,)),
    ],
)
def test_values_worked_by_hand(arch, threads, registers, smem_bytes, blocks, ratio, limited_by):
    occupancy = blocks_per_sm(find_gpu(arch), threads, registers, smem_bytes)
    assert (occupancy.blocks_per_sm, occupancy.limited_by) == (blocks, limited_by)
    assert occupancy.occupancy_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("wrong", [(0, 1, 0), (32, -1, 0), (32, 1, -1)])
def test_impossible_kernels(wrong):
    with pytest.raises(ValueError, match="impossible"):
        blocks_per_sm(find_gpu("sm_80"), *wrong)


def test_more_of_anything_never_helps():
    rng = random.Random(0)
    for gpu in GPUS.values():
        for _ in range(200):
            threads, registers, smem = rng.randint(1, 1024), rng.randint(1, 255), rng.randint(0, 60000)
            here = blocks_per_sm(gpu, threads, registers, smem).blocks_per_sm
            for more in ((32, 0, 0), (0, 8, 0), (0, 0, 500)):
                used = [a + b for a, b in zip((threads, registers, smem), more)]
                assert blocks_per_sm(gpu, *used).blocks_per_sm <= here


def test_suffixes_of_an_architecture():
    assert find_gpu("sm_90a") is find_gpu("sm_90")
    with pytest.raises(UsageError, match="sm_20") as caught:
        find_gpu("sm_20")
    assert "sm_80" in str(caught.value)


# --- NVIDIA's calculator -----------------------------------------------------------------------

ORACLE = r"""
#include "cuda_occupancy.h"
#include <stdio.h>
int main() {
  int major, minor, threads_sm, smem_sm, optin, reserved, threads, regs, smem;
  while (scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &threads_sm, &smem_sm, &optin, &reserved,
               &threads, &regs, &smem) == 9) {
    cudaOccDeviceProp p = cudaOccDeviceProp();
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024; p.warpSize = 32;
    p.maxThreadsPerMultiprocessor = threads_sm; p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = smem_sm; p.numSms = 1;
    p.sharedMemPerBlockOptin = optin; p.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes a = cudaOccFuncAttributes();
    a.maxThreadsPerBlock = 1024; a.numRegs = regs; a.maxDynamicSharedSizeBytes = smem;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    cudaOccDeviceState s = cudaOccDeviceState();
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r = cudaOccResult();
    int status = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, smem);
    printf("%d %u %d\n", r.activeBlocksPerMultiprocessor, r.limitingFactors, status);
  }
}
"""
#: Bits of ``limitingFactors``.
BITS = {THREADS: 1, REGISTERS: 2, SMEM: 4, BLOCKS: 8}


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    include = next(
        (path for path in (Path(f, "cuda_runtime/include") for f in folders) if path.is_dir()), None
    )
    compiler = shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("needs g++ and the headers of nvidia-cuda-runtime-cu12")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "oracle.cpp").write_text(ORACLE)
    command = [compiler, "-w", f"-I{include}", str(folder / "oracle.cpp"), "-o", str(folder / "oracle")]
    subprocess.run(command, check=True)
    return folder / "oracle"


def test_same_as_nvidias_calculator(calculator):
    rng = random.Random(1)
    cases, questions = [], []
    for gpu in GPUS.values():
        version = gpu.arch[3:]
        for _ in range(500):
            used = rng.randint(1, 1024), rng.randint(1, 255), rng.choice([0, rng.randint(0, 110_000)])
            limits = (
                gpu.threads_per_sm,
                gpu.smem_per_sm_bytes,
                gpu.smem_per_block_bytes,
                gpu.smem_reserved_bytes,
            )
            cases.append((gpu, used))
            questions.append(" ".join(map(str, (version[:-1], version[-1], *limits, *used))))
    answers = subprocess.run(
        [calculator], input="\n".join(questions), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(answers) == len(cases) == 500 * len(GPUS)
    for (gpu, used), answer in zip(cases, answers):
        got = blocks_per_sm(gpu, *used)
        bits = sum(BITS[limit] for limit in got.limited_by)
        assert (got.blocks_per_sm, bits, 0) == tuple(map(int, answer.split())), (gpu.arch, used)
