"""What ptxas says about each kernel when it runs with ``-v``.

For example::

    ptxas info    : Compiling entry function 'f' for 'sm_90'
    ptxas info    : Function properties for f
    ptxas         .     400 bytes stack frame, 744 bytes spill stores, 744 bytes spill loads
    ptxas info    : Used 64 registers, used 1 barriers, 400 bytes cumulative stack size, 4000 bytes smem

Functions that a kernel calls have properties of their own after it; nvcc's lines have other margins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_fuse.core.errors import ToolFailed

__all__ = ["PtxasReport", "read_ptxas_log"]

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>[^']+)' for '(?P<arch>[^']+)'")
_FUNCTION = re.compile(r"Function properties for (?P<symbol>\S+)")
_STACK = re.compile(
    r"(?P<frame>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SMEM = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


@dataclass(frozen=True)
class PtxasReport:
    """One kernel in ptxas' report.

    Args:
        symbol: Its name.
        arch: What it was compiled for.
        registers_per_thread: Registers.
        frame_bytes: Stack of the kernel itself, for each thread.
        spill_store_bytes: Bytes of instructions that save registers to memory, for each thread.
        spill_load_bytes: Bytes of instructions that load them again.
        smem_static_bytes: Shared memory of a block that the kernel declares.
        barriers: Named barriers.
    """

    symbol: str
    arch: str
    registers_per_thread: int
    frame_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_static_bytes: int
    barriers: int


def read_ptxas_log(log: str) -> dict[str, PtxasReport]:
    """Reads the report.

    Args:
        log: Everything the compiler said.

    Returns:
        Symbol -> its report, for every kernel.

    Raises:
        ToolFailed: A kernel's report is incomplete: this ptxas writes it in another form.
    """
    reports = (_read_entry(lines) for lines in _split(log))
    return {report.symbol: report for report in reports}


def _split(log: str) -> Iterator[list[str]]:
    """The lines of each kernel."""
    lines: list[str] = []
    for line in log.splitlines():
        if _ENTRY.search(line) and lines:
            yield lines
            lines = []
        if lines or _ENTRY.search(line):
            lines.append(line)
    if lines:
        yield lines


def _read_entry(lines: list[str]) -> PtxasReport:
    entry = _ENTRY.search(lines[0])
    assert entry is not None
    symbol, function = entry["symbol"], ""
    stack = used = None
    for line in lines[1:]:
        properties = _FUNCTION.search(line)
        function = properties["symbol"] if properties else function
        if function == symbol:
            stack = stack or _STACK.search(line)
            used = used or _USED.search(line)
    if stack is None or used is None:
        raise ToolFailed(f"ptxas' report on kernel {symbol} cannot be read:\n  " + "\n  ".join(lines))
    barriers, smem = _BARRIERS.search(used.string), _SMEM.search(used.string)
    return PtxasReport(
        symbol=symbol,
        arch=entry["arch"],
        registers_per_thread=int(used["registers"]),
        frame_bytes=int(stack["frame"]),
        spill_store_bytes=int(stack["stores"]),
        spill_load_bytes=int(stack["loads"]),
        smem_static_bytes=sum(int(part or 0) for part in smem.groups()) if smem else 0,
        barriers=int(barriers[1]) if barriers else 0,
    )
