"""The report on kernels as text, from values made by hand. Needs no TVM."""

from __future__ import annotations

import json
from dataclasses import replace

from tvm_fuse.core.gpu import Limit
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.resources import KernelResources
from tvm_fuse.render import render_kernels
from tvm_fuse.report import Kernel, KernelReport, to_json

SMALL = KernelResources(
    "tvmgen_default_f", "sm_90", 10, 0, 0, 0, 8, 0, 1, 1, 32, 0.5, (Limit.BLOCKS,)
)  # fmt: skip
FULL = replace(SMALL, symbol="g", threads_per_block=256, occupancy_ratio=1.0, limited_by=(Limit.THREADS,))
WORST = replace(
    SMALL, symbol="h", spill_store_bytes=700, spill_load_bytes=744, stack_bytes=400, smem_dynamic_bytes=1000,
    threads_per_block=64, blocks_per_sm=0, occupancy_ratio=0.0,
    limited_by=(Limit.REGISTERS, Limit.SHARED_MEMORY),
)  # fmt: skip


def make_report(*used, computed=()):
    kernels = tuple(
        Kernel(Launch(row.symbol, (56, 8, 1), (row.threads_per_block, 1, 1)), row, 2) for row in used
    )
    return KernelReport("net", "cuda -arch=sm_90", "sm_90", "NVRTC 12.9", kernels, computed)


def test_table():
    lines = render_kernels(make_report(WORST, SMALL, FULL)).splitlines()
    assert lines[:3] == ["net for sm_90    (NVRTC 12.9)", "3 CUDA kernels, 1 with spills, 1 with a stack", ""]
    assert [line.split() for line in lines[4:7]] == [
        "2 1444 400 10 1008 56x8x1 64x1x1 NO FIT registers, shared memory h".split(),
        "2 0 0 10 8 56x8x1 1x1x1 50% blocks f".split(),
        "2 0 0 10 8 56x8x1 256x1x1 100% g".split(),
    ]
    assert len({line.rindex(name) for line, name in zip(lines[3:7], ("kernel", "h", "f", "g"))}) == 1


def test_notes():
    text = render_kernels(make_report(SMALL, FULL, computed=("tvmgen_default_sort",)))
    assert "note: 1 kernels have blocks of fewer than 32 threads" in text
    assert "at run time: sort" in text
    assert "note" not in render_kernels(make_report(FULL))


def test_no_kernels():
    assert "0 CUDA kernels" in render_kernels(make_report())


def test_worst_first():
    rows = (SMALL, replace(SMALL, stack_bytes=8), replace(SMALL, spill_load_bytes=4), FULL, WORST)
    assert sorted(rows, key=lambda row: row.badness, reverse=True) == [WORST, rows[2], rows[1], SMALL, FULL]


def test_json_names_units_and_limits():
    document = json.loads(to_json(make_report(WORST)))
    assert document["kernels"][0]["resources"]["limited_by"] == ["registers", "shared memory"]
    assert document["kernels"][0]["launch"]["grid"] == [56, 8, 1]
    assert document["kernels"][0]["calls"] == 2


def test_schedules_and_why_not_another():
    reason = Reason(Code.SCHEDULE_DTYPE, "conv1", "float32 operands and result", "float64")
    report = make_report(SMALL, FULL)
    first, second = report.kernels
    first = replace(first, schedule="one element a thread", fallback=reason)
    second = replace(second, schedule="blocked product")
    text = render_kernels(replace(report, kernels=(first, second)))
    assert "one element a thread  f" in text
    assert "blocked product       g" in text
    assert "note: f has one element a thread: schedule-dtype at conv1: wanted float32" in text
    assert text.count("note: f") == 1
    assert "note: g" not in text
    document = json.loads(to_json(replace(report, kernels=(first,))))
    assert document["kernels"][0]["schedule"] == "one element a thread"
    assert document["kernels"][0]["fallback"]["code"] == "schedule-dtype"
