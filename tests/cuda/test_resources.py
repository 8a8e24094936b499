"""What kernels use: the report, the cubin, their agreement, and what is told when they differ."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.support.cuda_kernels import LAUNCHES, SOURCE
from tvm_fuse.core.errors import InternalError, ToolFailed, UsageError
from tvm_fuse.core.gpu import GPUS, Limit
from tvm_fuse.cuda.compile import CompiledModule, compile_cuda
from tvm_fuse.cuda.cubin import read_cubin
from tvm_fuse.cuda.ptxas import read_ptxas_log
from tvm_fuse.cuda.resources import read_resources

ARCHS = tuple(GPUS)

needs_nvrtc = pytest.mark.cuda_codegen


@functools.cache
def compiled(arch):
    return compile_cuda(SOURCE, arch)


@pytest.fixture(autouse=True)
def empty_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_each_trait_is_seen(arch):
    used = {kernel.symbol: kernel for kernel in read_resources(compiled(arch), LAUNCHES)}
    assert [name for name, kernel in used.items() if kernel.spill_bytes] == ["spill"]
    assert used["spill"].spill_store_bytes > 100 < used["spill"].spill_load_bytes
    assert used["spill"].registers_per_thread == 64
    assert [name for name, kernel in used.items() if kernel.stack_bytes] == ["stack", "spill", "calls"]
    assert used["stack"].stack_bytes == 256
    assert used["calls"].stack_bytes >= 128
    assert used["shared_memory"].smem_static_bytes == 4000
    assert used["dynamic_shared_memory"].smem_dynamic_bytes == 30_000
    assert used["dynamic_shared_memory"].limited_by == (Limit.SHARED_MEMORY,)
    assert [name for name, kernel in used.items() if kernel.barriers] == [
        "shared_memory",
        "dynamic_shared_memory",
    ]
    assert used["plain"].smem_static_bytes == used["plain"].stack_bytes == 0
    assert used["shared_memory"].threads_per_block == 256
    assert {kernel.arch for kernel in used.values()} == {arch}


@needs_nvrtc
def test_occupancy_counts_the_shared_memory_of_the_launch():
    """sm_80: 30000 bytes and the driver's 1024 are 243 units of 128; 5 of them fit into 164 KiB."""
    launch = next(launch for launch in LAUNCHES if launch.symbol == "dynamic_shared_memory")
    (kernel,) = read_resources(compiled("sm_80"), [launch])
    assert (kernel.blocks_per_sm, kernel.occupancy_ratio) == (5, 5 * 2 / 64)


@needs_nvrtc
def test_worst_are_spills_then_stack_then_low_occupancy():
    kernels = sorted(
        read_resources(compiled("sm_80"), LAUNCHES), key=lambda kernel: kernel.badness, reverse=True
    )
    assert [kernel.symbol for kernel in kernels[:4]] == ["spill", "stack", "calls", "dynamic_shared_memory"]


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_cubin_alone(arch):
    kernels = read_cubin(compiled(arch).cubin)
    assert kernels.keys() == {launch.symbol for launch in LAUNCHES}
    assert {kernel.arch for kernel in kernels.values()} == {int(arch[3:])}
    assert [kernels[launch.symbol].parameter_bytes for launch in LAUNCHES] == [16, 8, 8, 24, 16, 12, 0]
    assert [kernels[launch.symbol].max_threads for launch in LAUNCHES] == [128, 256, 0, 0, 1024, 0, 0]


@needs_nvrtc
def test_shared_memory_of_a_cubin_without_any():
    source = 'extern "C" __global__ void f(float* a) {\n  a[0] = 1;\n}\n'
    for arch in ("sm_80", "sm_90"):
        assert read_cubin(compile_cuda(source, arch).cubin)["f"].smem_static_bytes == 0


# --- the report ----------------------------------------------------------------------------------

NVCC_LOG = """\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 2 barriers, 8 bytes cumulative stack size, 4000+16 bytes smem
ptxas info    : Compile time = 35.348 ms
ptxas info    : Function properties for helper
    400 bytes stack frame, 700 bytes spill stores, 700 bytes spill loads
ptxas info    : Compiling entry function 'g' for 'sm_90'
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, 360 bytes cmem[0]
"""


def test_report_in_nvccs_form():
    f, g = read_ptxas_log(NVCC_LOG).values()
    assert (f.symbol, f.arch, f.registers_per_thread, f.barriers, f.smem_static_bytes) == (
        "f",
        "sm_90",
        64,
        2,
        4016,
    )
    assert (f.frame_bytes, f.spill_store_bytes, f.spill_load_bytes) == (8, 12, 16)
    assert (g.symbol, g.registers_per_thread, g.barriers, g.smem_static_bytes) == ("g", 10, 0, 0)


@pytest.mark.parametrize("gone", ["Used 64 registers", "8 bytes stack frame"])
def test_report_that_is_incomplete(gone):
    lines = [line for line in NVCC_LOG.splitlines() if gone not in line]
    with pytest.raises(ToolFailed, match="kernel f cannot be read"):
        read_ptxas_log("\n".join(lines))


def test_no_report():
    assert read_ptxas_log("") == read_ptxas_log("kernels.cu(3): warning\n") == {}


# --- disagreement --------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Used 64 registers", "Used 65 registers", "spill: registers_per_thread is 65 .* 64 in the cubin"),
        ("256 bytes stack frame", "0 bytes stack frame", "stack: frame_bytes is 0 .* 256 in the cubin"),
        (
            "4000 bytes smem",
            "4004 bytes smem",
            "shared_memory: smem_static_bytes is 4004 .* 4000 in the cubin",
        ),
        ("for 'sm_80'", "for 'sm_86'", "arch is sm_86"),
        ("function 'plain'", "function 'other'", "other"),
    ],
)
def test_report_and_cubin_that_differ(before, after, message):
    log = compiled("sm_80").log.replace(before, after)
    log = log.replace("properties for plain", "properties for other") if after == "function 'other'" else log
    with pytest.raises(InternalError, match=message):
        read_resources(replace(compiled("sm_80"), log=log), LAUNCHES)


@needs_nvrtc
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (64, 1, 1)}, "64 threads in the launch and 128 in the cubin"),
        ({"parameters": LAUNCHES[1].parameters}, "8 bytes in the launch and 16 in the cubin"),
        ({"symbol": "other"}, "other was not compiled"),
    ],
)
def test_launch_that_differs(change, message):
    with pytest.raises(InternalError, match=message):
        read_resources(compiled("sm_80"), [replace(LAUNCHES[0], **change)])


@needs_nvrtc
def test_a_cubin_for_another_architecture():
    with pytest.raises(InternalError, match=r"arch is 80 .* 90 in the cubin"):
        read_resources(replace(compiled("sm_80"), cubin=compiled("sm_90").cubin), LAUNCHES[:1])


def test_ptx_alone_has_no_resources():
    with pytest.raises(ToolFailed, match="only PTX"):
        read_resources(CompiledModule("sm_990", "NVRTC 12.9", b"", "//", ""), LAUNCHES)


@needs_nvrtc
def test_architecture_without_limits():
    with pytest.raises(UsageError, match="sm_61"):
        read_resources(compiled("sm_61"), LAUNCHES)


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02" + bytes(60), b"//\n.version 8.8\n" + bytes(64)])
def test_no_cubin(data):
    with pytest.raises(ToolFailed, match="no cubin"):
        read_cubin(data)


@needs_nvrtc
@pytest.mark.parametrize("kept", [20, 64, 4000, -700])
def test_damaged_cubin(kept):
    with pytest.raises(ToolFailed, match="cannot be read"):
        read_cubin(compiled("sm_80").cubin[:kept])
