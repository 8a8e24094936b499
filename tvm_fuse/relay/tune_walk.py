"""The kernels of lowered TIR, each with its accesses to memory, its loops and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm_fuse.relay.base import tvm

__all__ = ["BINARY", "WORD_BYTES", "Access", "Kernel", "Loop", "walk_kernels"]

tir = tvm.tir

WORD_BYTES = 4
#: Loops of at most so many steps, all together, are unrolled by the compiler on its own.
_SMALL_REGION = 32

#: Clocks of what is no multiply-add: a division is a reciprocal and corrections; functions take the special
#: unit.
_DIVISION, _FUNCTION = 8, 16
_FUNCTIONS = frozenset(f"tir.{name}" for name in "exp exp2 tanh sigmoid sqrt rsqrt erf pow log log2".split())
#: Integer divisions by constants are multiplications and shifts.
_INTEGER_CLOCKS = {tir.FloorDiv: 4, tir.FloorMod: 4, tir.Div: 4, tir.Mod: 4}
#: Arithmetic with two operands.
BINARY = (tir.Add, tir.Sub, tir.Mul, tir.FloorDiv, tir.Div, tir.FloorMod, tir.Mod, tir.Min, tir.Max)


def walk_kernels(module: Any) -> list[Kernel]:
    """The kernels of a module of lowered functions, in the order of the code."""
    walker = _Walker()
    for function in module.functions.values():
        if isinstance(function, tir.PrimFunc):
            walker.visit(function.body)
    return walker.kernels


class Loop(NamedTuple):
    """A loop, and whether it is marked to be unrolled."""

    var: Any
    extent: int
    is_unrolled: bool


class Access(NamedTuple):
    """A load or store, and the loops around it, the outermost first."""

    buffer: Any
    index: Any
    dtype: str
    loops: tuple[Loop, ...]
    is_store: bool

    @property
    def scope(self) -> str:
        """``global``, ``shared`` or ``local``."""
        return str(self.buffer.scope()).partition(".")[0]

    @property
    def size_bytes(self) -> int:
        """Bytes that one thread moves."""
        kind = tvm.DataType(self.dtype)
        return int(max(1, kind.bits // 8) * kind.lanes)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the buffer."""
        return int(max(1, tvm.DataType(self.buffer.dtype).bits // 8))

    @property
    def cut(self) -> int:
        """How many of the loops are around the unrolled region."""
        steps, cut = 1, len(self.loops)
        while cut and (
            self.loops[cut - 1].is_unrolled or steps * self.loops[cut - 1].extent <= _SMALL_REGION
        ):
            cut -= 1
            steps *= self.loops[cut].extent
        return cut

    @property
    def trips(self) -> int:
        """How often the unrolled region is run through."""
        return math.prod(loop.extent for loop in self.loops[: self.cut])


@dataclass
class Kernel:
    """What was read of one launch."""

    extents: dict[str, int] = field(default_factory=dict)
    threads: dict[str, list[Any]] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    operations: float = 0.0
    special: float = 0.0
    integer: float = 0.0
    smem_bytes: int = 0
    local_words: int = 0

    def size_of(self, prefix: str) -> int:
        """Blocks of the grid, or threads of a block."""
        return math.prod(self.extents.get(f"{prefix}.{axis}", 1) for axis in "xyz")


class _Walker:
    """Collects the kernels of a function's body."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._kernel: Kernel | None = None
        self._loops: list[Loop] = []

    def visit(self, statement: Any) -> None:
        """Read a statement and all that is in it."""
        if isinstance(statement, tir.SeqStmt):
            for inner in statement.seq:
                self.visit(inner)
        elif isinstance(statement, tir.AttrStmt) and statement.attr_key == "thread_extent":
            self._visit_thread(statement)
        elif isinstance(statement, tir.For):
            extent = int(statement.extent) if isinstance(statement.extent, tir.IntImm) else 1
            is_unrolled = statement.kind == tir.ForKind.UNROLLED
            self._loops.append(Loop(statement.loop_var, extent, is_unrolled))
            self.visit(statement.body)
            self._loops.pop()
        elif isinstance(statement, tir.IfThenElse):
            self.visit(statement.then_case)
            if statement.else_case is not None:
                self.visit(statement.else_case)
        elif isinstance(statement, tir.BufferStore):
            self._visit_store(statement)
        elif isinstance(statement, tir.Allocate):
            self._visit_allocate(statement)
            self.visit(statement.body)
        elif hasattr(statement, "body"):
            self.visit(statement.body)

    def _visit_thread(self, statement: Any) -> None:
        is_outermost = self._kernel is None
        if is_outermost:
            self._kernel = Kernel()
            self.kernels.append(self._kernel)
        kernel, tag = self._kernel, str(statement.node.thread_tag)
        assert kernel is not None
        kernel.extents[tag] = int(statement.value)
        kernel.threads.setdefault(tag, []).append(statement.node.var)
        self.visit(statement.body)
        if is_outermost:
            self._kernel = None

    def _visit_allocate(self, statement: Any) -> None:
        if self._kernel is None:
            return
        kind = tvm.DataType(statement.dtype)
        size = math.prod(int(extent) for extent in statement.extents) * max(1, kind.bits // 8) * kind.lanes
        scope = str(statement.buffer_var.type_annotation.storage_scope)
        if scope.startswith("shared"):
            self._kernel.smem_bytes += size
        elif scope == "local":
            self._kernel.local_words += -(-size // WORD_BYTES)

    def _visit_store(self, store: Any) -> None:
        kernel = self._kernel
        if kernel is None:
            return
        loops = tuple(self._loops)
        steps = math.prod(loop.extent for loop in loops)
        found: list[Any] = []
        tir.stmt_functor.post_order_visit(store.value, found.append)
        accesses = [Access(store.buffer, store.indices[-1], str(store.value.dtype), loops, True)]
        for node in found:
            if isinstance(node, tir.BufferLoad):
                accesses.append(Access(node.buffer, node.indices[-1], str(node.dtype), loops, False))
            elif isinstance(node, BINARY) and str(node.dtype).startswith("float"):
                lanes = tvm.DataType(node.dtype).lanes
                kernel.operations += steps * lanes
                kernel.special += steps * lanes * _DIVISION * isinstance(node, tir.Div)
            elif isinstance(node, tir.Call) and getattr(node.op, "name", "") in _FUNCTIONS:
                kernel.special += steps * _FUNCTION
        kernel.accesses += accesses
        kernel.integer += sum(_integer_clocks(one, steps) for one in accesses if one.scope == "global")


def _integer_clocks(access: Access, steps: int) -> int:
    """Clocks of an access's index: what the unrolled loops change every time, the rest once a pass."""
    inner = {hash(loop.var) for loop in access.loops[access.cut :] if loop.extent > 1}
    changing: set[int] = set()
    clocks = 0

    def visit(node: Any) -> None:
        nonlocal clocks
        if isinstance(node, tir.Var):
            is_changing = hash(node) in inner
        elif isinstance(node, BINARY):
            is_changing = hash(node.a) in changing or hash(node.b) in changing
            clocks += _INTEGER_CLOCKS.get(type(node), 1) * (steps if is_changing else access.trips)
        else:
            is_changing = any(
                hash(getattr(node, part, None)) in changing for part in ("value", "base", "condition")
            )
        if is_changing:
            changing.add(hash(node))

    tir.stmt_functor.post_order_visit(access.index, visit)
    return clocks
