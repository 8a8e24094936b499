"""The kernels in CUDA C as TVM writes it: each definition ends with a brace in the first column."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["KernelSource", "read_kernels"]

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
