"""Arguments of a launch in memory of their own, between guards that show writes beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.emulator.translate import EmulatedKernel
from tvm_fuse.cuda.launch import Parameter

__all__ = ["Buffer", "Values", "place"]

#: 16-bit words that make a quiet NaN of any width, which arithmetic passes on: these bits, and any of the
#: lower six. Every guard has a word of its own, so that what was read beside one array shows beside another.
_NAN = 0xFFC0
_POISON = 0xFFFF  # what nothing has written
_FIRST_GUARD, _GUARD_WORDS = 1, 62  # 0 would be the NaN of invalid arithmetic

_GUARD_BYTES = 4096
_ALIGNMENT = 256  # as cuMemAlloc's


@dataclass(frozen=True)
class Buffer:
    """One array's copy.

    Args:
        array: The caller's.
        memory: Guard, copy, guard.
        start: Where the copy begins.
        guard: What the guards hold, as 16-bit words.
        is_output: Whether the copy began as poison.
    """

    array: np.ndarray
    memory: np.ndarray
    start: int
    guard: int
    is_output: bool

    @property
    def address(self) -> int:
        """Of the copy."""
        return int(self.memory.ctypes.data) + self.start

    @property
    def copy(self) -> np.ndarray:
        """The bytes of the copy."""
        return self.memory[self.start : self.start + self.array.nbytes]

    @property
    def result(self) -> np.ndarray:
        """The copy in the array's form."""
        return self.copy.view(self.array.dtype).reshape(self.array.shape)

    def broken_guard(self) -> str:
        """``before`` or ``after``, where something was written; else empty."""
        end = self.start + self.array.nbytes
        pattern = _pattern(self.guard, self.memory.size)
        if (self.memory[: self.start] != pattern[: self.start]).any():
            return "before"
        return "after" if (self.memory[end:] != pattern[end:]).any() else ""

    def count_poison(self) -> int:
        """Elements of a floating-point output that are still poison, or were computed from poison."""
        if not self.is_output or self.array.dtype.kind != "f":
            return 0
        words = self.copy.view(np.uint16).reshape(-1, self.array.itemsize // 2)
        return int(np.count_nonzero(((words & _NAN) == _NAN).all(axis=1)))


def _pattern(word: int, size_bytes: int) -> np.ndarray:
    return np.full(-(-size_bytes // 2), word, np.uint16).view(np.uint8)[:size_bytes]


def _make_buffer(array: np.ndarray, position: int, is_output: bool) -> Buffer:
    guard = _NAN | (_FIRST_GUARD + position % _GUARD_WORDS)
    memory = _pattern(guard, array.nbytes + 2 * _GUARD_BYTES + _ALIGNMENT)
    start = _GUARD_BYTES + -(memory.ctypes.data + _GUARD_BYTES) % _ALIGNMENT
    buffer = Buffer(array, memory, start, guard, is_output)
    buffer.copy[:] = _pattern(_POISON, array.nbytes) if is_output else array.reshape(-1).view(np.uint8)
    return buffer


@dataclass(frozen=True)
class Values:
    """Values of all parameters, ready to pass.

    Args:
        buffers: Of the pointer parameters, by position; one array given twice has one buffer.
        slots: Every parameter's value.
    """

    buffers: dict[int, Buffer]
    slots: tuple[ctypes.Array[ctypes.c_char], ...]


def place(kernel: EmulatedKernel, args: Sequence[object], outputs: Sequence[int]) -> Values:
    """Copies arguments to where a kernel may work on them.

    Args:
        kernel: Says what it takes.
        args: Arrays for its pointers, numbers for the rest.
        outputs: Positions of the arrays that it is to fill.

    Raises:
        UsageError: The arguments do not fit the parameters.
    """
    if len(args) != len(kernel.parameters):
        raise UsageError(f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(args)}")
    output_ids = {id(args[position]) for position in outputs}
    by_id: dict[int, Buffer] = {}
    buffers, slots = {}, []
    for position, (parameter, value) in enumerate(zip(kernel.parameters, args)):
        if parameter.is_pointer:
            array = _require_array(kernel.name, parameter, value)
            if id(value) not in by_id:
                by_id[id(value)] = _make_buffer(array, position, id(value) in output_ids)
            buffers[position] = by_id[id(value)]
            slots.append(_make_slot(np.uint64(buffers[position].address)))
        else:
            slots.append(_make_slot(np.dtype(parameter.dtype).type(value)))  # type: ignore[call-overload]
    return Values(buffers, tuple(slots))


def _require_array(kernel: str, parameter: Parameter, value: object) -> np.ndarray:
    wanted = np.dtype(parameter.dtype)
    if not isinstance(value, np.ndarray) or not value.flags.c_contiguous or not _fits(value.dtype, wanted):
        got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise UsageError(f"{kernel}: {parameter.name} wants a contiguous array of {wanted}, got {got}")
    return value


def _fits(dtype: np.dtype, wanted: np.dtype) -> bool:
    """TVM passes booleans as bytes."""
    return dtype == wanted or (dtype.kind == "b" and wanted.itemsize == 1)


def _make_slot(value: np.generic) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(value.tobytes(), value.nbytes)
