"""How a kernel is launched: its grid, its blocks and its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tvm_fuse.core.errors import InternalError
from tvm_fuse.cuda.source import KernelSource

__all__ = ["Dim3", "Launch", "Parameter", "check_launches"]

#: Sizes in x, y and z.
Dim3 = tuple[int, int, int]

_POINTER_BYTES = 8


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Args:
        name: Its name.
        dtype: Of the value, or of what is pointed at.
        size_bytes: Size of the parameter itself.
        is_pointer: Whether it points to device memory.
    """

    name: str
    dtype: str
    size_bytes: int = _POINTER_BYTES
    is_pointer: bool = True


@dataclass(frozen=True)
class Launch:
    """The static launch of one kernel.

    Args:
        symbol: The kernel.
        grid: Blocks in x, y and z.
        block: Threads of a block in x, y and z.
        smem_dynamic_bytes: Shared memory that the launch adds to what the kernel declares.
        parameters: In the kernel's order.
    """

    symbol: str
    grid: Dim3
    block: Dim3
    smem_dynamic_bytes: int = 0
    parameters: tuple[Parameter, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of the whole grid."""
        return math.prod(self.grid)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters, each aligned to its own size."""
        end = 0
        for parameter in self.parameters:
            end = -(-end // parameter.size_bytes) * parameter.size_bytes + parameter.size_bytes
        return end


def check_launches(launches: Iterable[Launch], sources: Mapping[str, KernelSource]) -> None:
    """Compares launches with the CUDA C that was generated.

    Args:
        launches: As read from the IR.
        sources: Symbol -> the kernel's source.

    Raises:
        InternalError: They disagree.
    """
    for launch in launches:
        symbol, source = launch.symbol, sources.get(launch.symbol)
        if source is None:
            raise InternalError(
                f"kernel {symbol} is in the IR and not in the source, which has {sorted(sources)}"
            )
        names = [parameter.name for parameter in launch.parameters]
        if len(names) != len(source.parameters) or not all(map(_is_renamed, names, source.parameters)):
            raise InternalError(f"{symbol}: parameters in the IR {names}, in the source {source.parameters}")
        if source.launch_bounds not in (None, launch.threads_per_block):
            raise InternalError(
                f"{symbol}: blocks of {launch.threads_per_block} threads in the IR, "
                f"of {source.launch_bounds} in the source (__launch_bounds__)"
            )


def _is_renamed(name: str, emitted: str) -> bool:
    """Code generation makes names legal in C, and numbers those that are taken."""
    legal = "".join(char if char.isalnum() else "_" for char in name)
    return emitted == legal or (emitted.startswith(f"{legal}_") and emitted[len(legal) + 1 :].isdigit())
