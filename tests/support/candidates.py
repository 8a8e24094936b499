"""A package of candidates without TVM: ways to add one to eight numbers, right and wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.core.tuning.test_score import TILED
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.core.tuning.score import ScoreConstants
from tvm_fuse.cuda.bundle import Call, Operand, Workspace
from tvm_fuse.cuda.candidate_files import save_package
from tvm_fuse.cuda.candidates import Candidate, CandidateTask, Package, Value, draw_operands
from tvm_fuse.cuda.launch import Launch, Parameter

__all__ = ["make_package", "make_task"]

_SIZE = 8
#: What the kernels compute; the last three are mutants.
BODIES = {
    "right": "y[threadIdx.x] = x[threadIdx.x] + 1.0f;",
    "wrong": "y[threadIdx.x] = x[threadIdx.x] - 1.0f;",
    "missing": "if (threadIdx.x < 5) y[threadIdx.x] = x[threadIdx.x] + 1.0f;",
    "crashing": "y[threadIdx.x] = *(float*)(16 + threadIdx.x);",
    "hanging": "volatile int forever = 1; while (forever) {} y[threadIdx.x] = x[threadIdx.x];",
}


def _source(symbol, body):
    return (
        f'extern "C" __global__ void __launch_bounds__({_SIZE}) {symbol}'
        f"(float* __restrict__ x, float* __restrict__ y) {{\n  {body}\n}}\n"
    )


def _candidate(name, kind, predicted_s, threads=_SIZE):
    symbol = f"add_{kind}"
    parameters = Parameter("x", "float32"), Parameter("y", "float32")
    return Candidate(
        id=name,
        schedule="" if name.endswith("b") else f'{{"i": ["{name}"], "r": [[0.0], 0, 0, 0]}}',
        kernels=(Launch(symbol, (1, 1, 1), (threads, 1, 1), 0, parameters),),
        calls=(Call(symbol, (Operand("tensor", 0), Operand("tensor", 1))),),
        workspaces=(Workspace(0, 16),),
        profiles=(replace(TILED, blocks=len(name) + int(predicted_s * 1e6)),),
        predicted_s=predicted_s,
    )


def make_task(number, kinds):
    """A task whose baseline is right, with candidates of some kinds."""
    return CandidateTask(
        digest=f"{number:012x}",
        name="add",
        chain=("input x", "add"),
        workload_key=f'["add", {number}]',
        weight=2,
        seed=number,
        inputs=(Value((2, 4), "float32"),),
        outputs=(Value((2, 4), "float32"),),
        tolerances=(Tolerance(1e-5, 1e-5, "a test"),),
        baseline=_candidate(f"t{number:02d}b", "right", 5e-6),
        candidates=tuple(
            _candidate(f"t{number:02d}c{index}", kind, (index + 1) * 1e-6) for index, kind in enumerate(kinds)
        ),
    )


def make_package(folder, *tasks, arch="sm_80", constants=None):
    """Write a package of tasks; kinds of candidates are as in ``BODIES``."""
    package = Package(
        model="net",
        target=f"cuda -arch={arch}",
        device=f"cuda-{arch}",
        arch=arch,
        card="a100" if arch == "sm_80" else "h100",
        versions={"tvm-fuse": "0"},
        constants=constants or ScoreConstants(),
        tasks=tasks,
    )
    reference, sources = {}, {}
    for task in tasks:
        (operand,) = draw_operands(task.inputs, task.seed)
        reference[task.digest] = [(operand + np.float32(1)).reshape(-1)]
        for one in task.all:
            symbol = one.kernels[0].symbol
            sources[one.id] = _source(symbol, BODIES[symbol.removeprefix("add_")])
    return save_package(folder, package, reference, dict.fromkeys(sources, b"cubin"), sources)
