"""The kernels in CUDA C as TVM writes it: each definition ends with a brace in the first column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_fuse.core.errors import UsageError

__all__ = ["KernelSource", "choose_kernel", "read_kernels", "short_name"]

#: A kernel's definition; TVM also writes a declaration of each, which ends in ";".
_DEFINITION = re.compile(
    r'^[ \t]*(?:extern\s+"C"\s+)?__global__\s+void\s+(?:__launch_bounds__\((?P<bounds>\d+)\)\s+)?'
    r"(?P<symbol>\w+)\s*\((?P<parameters>[^;{)]*)\)\s*\{",
    re.M,
)
_END = re.compile(r"^\}", re.M)


@dataclass(frozen=True)
class KernelSource:
    """One kernel's CUDA C.

    Args:
        symbol: Its name.
        parameters: Names of its parameters.
        launch_bounds: Threads of a block that it states; None when it states none.
        text: The whole definition.
    """

    symbol: str
    parameters: tuple[str, ...]
    launch_bounds: int | None
    text: str = field(repr=False)


def short_name(symbol: str) -> str:
    """A kernel's name without what TVM puts before every one."""
    return symbol.removeprefix("tvmgen_default_")


def choose_kernel(kernels: Mapping[str, KernelSource], name: str) -> KernelSource:
    """The kernel that a user means.

    Args:
        kernels: Symbol -> the kernel.
        name: Its symbol, its short name, or a part of it that no other kernel has.

    Returns:
        The kernel.

    Raises:
        UsageError: None or several match.
    """
    exact = [kernel for symbol, kernel in kernels.items() if name in (symbol, short_name(symbol))]
    matches = exact or [kernel for symbol, kernel in kernels.items() if name in symbol]
    if len(matches) != 1:
        known = ", ".join(sorted(short_name(kernel.symbol) for kernel in matches or kernels.values()))
        count = "several kernels have" if matches else "no kernel has"
        raise UsageError(f"{count} {name!r} in the name: {known}", "give the whole name of one")
    return matches[0]


def read_kernels(source: str) -> dict[str, KernelSource]:
    """Finds the kernels that a source defines.

    Args:
        source: CUDA C.

    Returns:
        Symbol -> the kernel, in the order of the source.
    """
    kernels = {}
    for match in _DEFINITION.finditer(source):
        end = _END.search(source, match.end())
        text = source[match.start() : end.end() if end is not None else len(source)].strip()
        parameters = tuple(re.findall(r"(\w+)\s*(?:,|$)", match["parameters"]))
        bounds = int(match["bounds"]) if match["bounds"] else None
        kernels[match["symbol"]] = KernelSource(match["symbol"], parameters, bounds, text)
    return kernels
