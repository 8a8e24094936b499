"""A model as CUDA kernels, and all that is needed to run it with the driver alone.

::

    bundle.json            what this module describes
    kernels.cu             CUDA C++ of all kernels
    kernels.sm_90.cubin    machine code, one file for each architecture
    kernels.sm_75.ptx      for drivers of devices that no cubin fits
    params.npz             weights; absent where a seed stands for them
    golden.npz             one input, and the unfused model's outputs for it

The graph is a list of operators in the order of execution, each a list of kernel launches. Tensors
lie in storages, which later tensors take over from earlier ones; workspaces, which are private to
an operator, lie in one arena.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

import numpy as np

from tvm_fuse.core.manifest import Source
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.cuda.launch import Launch

__all__ = [
    "DTYPES",
    "Bundle",
    "Call",
    "Draw",
    "FileRecord",
    "Image",
    "Operand",
    "Operator",
    "Output",
    "Port",
    "Provenance",
    "Tensor",
    "Workspace",
]

#: The dtypes of tensors; each is one of NumPy's.
DTYPES = frozenset(
    "bool float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)  # fmt: skip


#: An index, or the value of an immediate; `make` reads annotations, which Python 3.9 cannot with ``|``.
Number = Union[int, float]


@dataclass(frozen=True)
class Operand:
    """What a launch passes for one parameter of the kernel.

    Args:
        kind: ``tensor``, ``workspace`` or ``immediate``.
        value: Index into ``Bundle.tensors`` or ``Bundle.workspaces``; an immediate's number.
    """

    kind: str
    value: Number


@dataclass(frozen=True)
class Call:
    """One launch of a kernel: its symbol, and what it gets."""

    symbol: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Operator:
    """A node of the graph: the name of TVM's function, and the kernels it launches, in order."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Tensor:
    """A value of the graph, and the storage it lies in."""

    shape: tuple[int, ...]
    dtype: str
    storage: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one operator: a piece of the arena that all operators share."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Port:
    """An input or a parameter: a name for a tensor, by its index."""

    name: str
    tensor: int


@dataclass(frozen=True)
class Output:
    """An output: a name for a tensor, by its index, and how far it may be from the golden one."""

    name: str
    tensor: int
    tolerance: Tolerance


@dataclass(frozen=True)
class Draw:
    """How a parameter is drawn: normal with the real one's mean and spread, inside its range.

    Integers are drawn uniformly from the range.
    """

    minimum: float
    maximum: float
    mean: float
    deviation: float


@dataclass(frozen=True)
class Image:
    """The kernels as a driver loads them.

    Args:
        arch: The architecture that it was compiled for, such as ``sm_90``.
        form: ``cubin`` or ``ptx``.
        file: Name of the file.
    """

    arch: str
    form: str
    file: str


@dataclass(frozen=True)
class FileRecord:
    """A file of the bundle, as it was written."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """Where a bundle comes from.

    Args:
        source: The model's files.
        versions: Program -> version: ``tvm-fuse``, ``tvm``, ``numpy``, the compiler.
        target: TVM's target.
    """

    source: Source
    versions: Mapping[str, str]
    target: str


@dataclass(frozen=True)
class Bundle:
    """A model as CUDA kernels.

    Args:
        model: Its name.
        provenance: Where it comes from.
        inputs: What a caller supplies.
        outputs: What it computes.
        parameters: Its weights.
        seed: Of the golden input, and of the parameters where they are drawn.
        draws: For each parameter how it is drawn; empty where ``params.npz`` holds them.
        operators: The graph, in the order of execution.
        kernels: The kernels, and how each is launched.
        tensors: The values of the graph.
        storages: Bytes of each storage.
        workspaces: The pieces of the arena.
        images: Machine code, and PTX.
        files: All files but ``bundle.json``.
    """

    model: str
    provenance: Provenance
    inputs: tuple[Port, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[Port, ...]
    seed: int
    draws: tuple[Draw, ...]
    operators: tuple[Operator, ...]
    kernels: tuple[Launch, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[int, ...]
    workspaces: tuple[Workspace, ...]
    images: tuple[Image, ...]
    files: tuple[FileRecord, ...] = field(default=())

    @property
    def is_seeded(self) -> bool:
        """Whether the parameters are drawn from the seed, for timing only."""
        return bool(self.draws)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that holds the workspaces."""
        return max((space.offset_bytes + space.size_bytes for space in self.workspaces), default=0)

    @property
    def launch_count(self) -> int:
        """Kernel launches of one inference."""
        return sum(len(operator.calls) for operator in self.operators)
