"""The kernels in CUDA C as TVM writes it: each definition ends with a brace in the first column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_fuse.core.errors import UsageError

__all__ = ["KernelSource", "choose_kernel", "keep_registers", "read_kernels", "short_name", "sort_kernels"]

#: A kernel's definition; TVM also writes a declaration of each, which ends in ";".
_DEFINITION = re.compile(
    r'^[ \t]*(?:extern\s+"C"\s+)?__global__\s+void\s+(?:__launch_bounds__\((?P<bounds>\d+)(?:, \d+)?\)\s+)?'
    r"(?P<symbol>\w+)\s*\((?P<parameters>[^;{)]*)\)\s*\{",
    re.M,
)
_END = re.compile(r"^\}", re.M)
#: TVM declares all kernels, then defines them.
_DECLARATION = re.compile(r'^extern "C" __global__ void [^\n{]*?(?P<symbol>\w+)\([^\n{(]*\);$', re.M)
#: In kernels that hold the sums of a product in registers.
_PRODUCT = re.compile(r"__shared__ float4? product_left\[")


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


def keep_registers(source: str) -> str:
    """Lets ptxas give blocked products all the registers they need.

    Without a least number of blocks in the launch bounds ptxas aims at an occupancy of its own choice, and
    spills a few registers for it (12 of 336 kernels of random convolutions; none of them with it).

    Args:
        source: CUDA C as TVM writes it.

    Returns:
        The source, with one block as the least number for these kernels; one that is there is left alone.
    """
    for kernel in read_kernels(source).values():
        if _PRODUCT.search(kernel.text):
            bounds = rf"(__launch_bounds__\(\d+)(?=\)\s+{kernel.symbol}\()"
            source = re.sub(bounds, r"\1, 1", source)
    return source


def sort_kernels(source: str) -> str:
    """Puts kernels in the order of their names; TVM writes them in the order of their addresses in memory.

    Args:
        source: CUDA C as TVM writes it: declarations of all kernels, then their definitions.

    Returns:
        The source, the same for every build of one model.
    """
    declared = list(_DECLARATION.finditer(source))
    kernels = read_kernels(source)
    if not kernels or len(declared) != len(kernels):
        return source
    lines = sorted((match["symbol"], match.group()) for match in declared)
    texts = (kernels[symbol].text for symbol in sorted(kernels))
    head = source[: declared[0].start()]
    return head + "\n".join(line for _, line in lines) + "\n" + "\n\n".join(texts) + "\n"


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
