"""Schedules of a model's kernels that wait for a GPU, and all that is needed to measure them there.

::

    candidates.json        what this module describes
    reference.npz          sampled results of the unfused operators, for each task
    kernels/t03c2.cubin    machine code of one candidate; t03b is the kernel that the build makes without any
    sources.zip            CUDA C++ of all of them
    run.py                 checks and times them; needs NumPy and the driver
    lib/                   what it needs of tvm-fuse

Operands are drawn from a seed on both sides, so that no tensors travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.parity import Tolerance, default_tolerance
from tvm_fuse.core.tuning.score import KernelProfile, ScoreConstants
from tvm_fuse.cuda.bundle import Call, FileRecord, Workspace
from tvm_fuse.cuda.launch import Launch

__all__ = [
    "SAMPLES",
    "Candidate",
    "CandidateTask",
    "Package",
    "Value",
    "choose_positions",
    "draw_operands",
    "scaled_tolerance",
]

#: Results that are compared, of each output.
SAMPLES = 4096


@dataclass(frozen=True)
class Value:
    """Shape and dtype of an operand or a result."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Candidate:
    """One way to compute a task.

    Args:
        id: Names its files.
        schedule: Text of the code generator; empty for the kernel that the build makes without a record.
        kernels: How its kernels are launched.
        calls: Its launches, in order; a tensor is an index into inputs, then outputs, of the task.
        workspaces: Scratch memory between its kernels.
        profiles: What its kernels do; empty where that is not known.
        predicted_s: Seconds by the score; 0 where it has none.
    """

    id: str
    schedule: str
    kernels: tuple[Launch, ...]
    calls: tuple[Call, ...]
    workspaces: tuple[Workspace, ...]
    profiles: tuple[KernelProfile, ...]
    predicted_s: float

    @property
    def arena_bytes(self) -> int:
        """Bytes that hold its workspaces."""
        return max((space.offset_bytes + space.size_bytes for space in self.workspaces), default=0)


@dataclass(frozen=True)
class CandidateTask:
    """A kernel of the model, and its candidates.

    Args:
        digest: Of its chain.
        name: Its chain, for people.
        chain: The lines that the digest was made of.
        workload_key: What the code generator calls its computation.
        weight: Calls in an inference.
        seed: Of its operands.
        inputs: Its operands, in the order of the kernel's function.
        outputs: Its results.
        tolerances: How far each result may be from the reference.
        baseline: The kernel that the build makes without a record.
        candidates: Those to try instead, the best by score first.
    """

    digest: str
    name: str
    chain: tuple[str, ...]
    workload_key: str
    weight: int
    seed: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    tolerances: tuple[Tolerance, ...]
    baseline: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def all(self) -> tuple[Candidate, ...]:
        """The baseline, then the others."""
        return (self.baseline, *self.candidates)


@dataclass(frozen=True)
class Package:
    """Candidates for one architecture.

    Args:
        model: Name of the model.
        target: Target string.
        device: Key of the device that records will be for.
        arch: Architecture that the machine code is for.
        card: Short name of the card that they were drafted for.
        versions: Program -> version.
        constants: Of the score that chose them.
        tasks: The kernels, those with the most time in an inference first.
        files: All other files.
    """

    model: str
    target: str
    device: str
    arch: str
    card: str
    versions: Mapping[str, str]
    constants: ScoreConstants
    tasks: tuple[CandidateTask, ...]
    files: tuple[FileRecord, ...] = field(default=())

    def find(self, candidate: str) -> tuple[CandidateTask, Candidate]:
        """A candidate by its id, with its task.

        Raises:
            KeyError: There is none.
        """
        for task in self.tasks:
            for one in task.all:
                if one.id == candidate:
                    return task, one
        raise KeyError(candidate)


def draw_operands(values: Iterable[Value], seed: int) -> Iterator[Array]:
    """Operands from a seed, the same with every version of NumPy.

    Args:
        values: Shape and dtype of each.
        seed: Of the one stream that all are drawn from, in order.

    Yields:
        Standard normal floats, integers and booleans 0 or 1.
    """
    stream = np.random.RandomState(seed)  # its stream is frozen
    for value in values:
        if np.dtype(value.dtype).kind == "f":
            yield np.asarray(stream.standard_normal(value.shape), value.dtype)
        else:
            yield np.asarray(stream.randint(0, 2, value.shape), value.dtype)


def choose_positions(size: int, seed: int) -> Array:
    """Which results are compared: all of them where they are few.

    Args:
        size: Number of results.
        seed: Of the task.

    Returns:
        Positions in the flat result, ascending, int64.
    """
    if size <= SAMPLES:
        return np.arange(size, dtype=np.int64)
    inner = np.random.RandomState(seed).randint(0, size, SAMPLES - 2, dtype=np.int64)
    return np.sort(np.concatenate([inner, np.array([0, size - 1], np.int64)]))


def scaled_tolerance(wanted: Array) -> Tolerance:
    """The default for a result's dtype; absolute errors scale with the largest value, as those of sums do."""
    default = default_tolerance(str(wanted.dtype))
    finite = np.abs(wanted[np.isfinite(wanted)]) if wanted.dtype.kind == "f" else np.zeros(0)
    return Tolerance(default.atol * max(1.0, float(finite.max(initial=0.0))), default.rtol, default.why)
