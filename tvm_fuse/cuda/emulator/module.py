"""Emulated kernels in a shared library, and launching them."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Union

import numpy as np

from tvm_fuse.core.errors import ToolFailed, UsageError
from tvm_fuse.cuda.emulator.buffers import Values, place
from tvm_fuse.cuda.emulator.compiler import build_library
from tvm_fuse.cuda.emulator.translate import EmulatedKernel, read_signatures, translate

__all__ = ["EmulatedModule", "KernelFault", "build_emulator"]

#: What a launch takes for a parameter.
Argument = Union[np.ndarray, int, float, np.generic]

Index = tuple[int, int, int]


class KernelFault(ToolFailed):
    """A kernel did what no kernel may do.

    Args:
        kernel: Its name.
        what: The fault: its kind, a colon, and what happened.
        block: Index of the block; None where it is not known.
        thread: Index of the thread in the block; None where it is not known.
    """

    def __init__(
        self, kernel: str, what: str, block: Index | None = None, thread: Index | None = None
    ) -> None:
        where = f" (block {block}, thread {thread})" if block is not None else ""
        super().__init__(f"{kernel}: {what}{where}")
        self.kernel = kernel
        self.what = what
        self.block = block
        self.thread = thread

    @property
    def kind(self) -> str:
        """Such as ``out of bounds``, ``race`` or ``unwritten``."""
        return self.what.partition(":")[0]


class _Extent(ctypes.Structure):
    """``emu::Extent``."""

    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_ulong), ("is_initialized", ctypes.c_int32))


class _Request(ctypes.Structure):
    """``emu::Request``."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extents", ctypes.POINTER(_Extent)),
    )


class _Fault(ctypes.Structure):
    """``emu::Fault``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("what", ctypes.c_char * 256),
    )


#: Faults that no thread commits: kBadLaunch and kUnwritten of ``emu::FaultKind``.
_THREADLESS = frozenset({1, 8})


def build_emulator(source: str, *, folder: Path | None = None, cxx: str | None = None) -> EmulatedModule:
    """Prepares CUDA kernels to run on the CPU.

    Args:
        source: CUDA C++ of the kind that TVM generates.
        folder: Where libraries are kept and found again; None for one that goes with the module.
        cxx: The C++ compiler; None for ``$CXX`` or the first that there is.

    Returns:
        The module. It compiles at the first launch, once with and once without checks.

    Raises:
        ToolFailed: The source holds what the emulator does not know.
    """
    return EmulatedModule(source, folder, cxx)


class EmulatedModule:
    """The kernels of one source.

    A *checked* launch looks at every access to memory: bounds, alignment, reads of what nothing
    wrote, conflicts that no barrier orders, outputs left out. Without checks kernels run several
    times as fast, and only what is left in memory afterwards is looked at.
    """

    def __init__(self, source: str, folder: Path | None, cxx: str | None) -> None:
        self._source = source
        self._cxx = cxx
        self._kernels = read_signatures(source)
        self._folder = folder if folder is not None else _make_folder(self)
        self._loaded: dict[bool, ctypes.CDLL] = {}
        self._lock = threading.Lock()

    @property
    def kernels(self) -> Mapping[str, EmulatedKernel]:
        """By name."""
        return MappingProxyType(self._kernels)

    def library(self, *, checked: bool = False) -> Path:
        """The shared library, which the emulated driver loads as a module; compiled if need be.

        Args:
            checked: Which of the two.

        Raises:
            MissingDependency: There is no C++ compiler.
            ToolFailed: The source does not compile.
        """
        text = translate(self._source, checked=checked)
        return build_library(text, self._folder, checked=checked, cxx=self._cxx)

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        *,
        outputs: Sequence[int] = (),
        smem_dynamic_bytes: int = 0,
        checks: bool = True,
        seeds: Sequence[int] = (0,),
    ) -> None:
        """Runs a kernel; what it writes is in the arrays afterwards.

        Args:
            kernel: Its name.
            grid: Blocks in x, y and z; what is left out is 1.
            block: Threads of a block likewise.
            args: Contiguous arrays for its pointers, numbers for the rest.
            outputs: Positions of arrays that count as unwritten before, and must be full after.
            smem_dynamic_bytes: Dynamic shared memory.
            checks: Whether every access to memory is looked at.
            seeds: Orders of threads and blocks to run it in, 0 for the natural one; the results must
                be the same to the bit.

        Raises:
            KernelFault: The kernel, or the launch, is at fault; the arrays are as before.
            UsageError: The arguments do not fit the kernel.
        """
        if kernel not in self._kernels:
            raise UsageError(f"no kernel {kernel!r}; there are {', '.join(self._kernels)}")
        signature = self._kernels[kernel]
        first: Values | None = None
        for seed in seeds:
            values = place(signature, args, outputs)
            request = _make_request(values, signature, grid, block, smem_dynamic_bytes, seed)
            self._run(kernel, request, checks)
            _check_results(kernel, signature, values)
            if first is not None:
                _compare(kernel, signature, first, values, seed)
            first = first or values
        for buffer in first.buffers.values() if first is not None else ():
            if buffer.array.flags.writeable:
                buffer.array[...] = buffer.result

    def _run(self, kernel: str, request: _Request, checked: bool) -> None:
        fault = _Fault()
        index = list(self._kernels).index(kernel)
        with self._lock:
            if self._load(checked).emu_launch(index, ctypes.byref(request), ctypes.byref(fault)) == 0:
                return
        what = fault.what.decode(errors="replace")
        if fault.kind in _THREADLESS:
            raise KernelFault(kernel, what)
        raise KernelFault(kernel, what, tuple(fault.block), tuple(fault.thread))

    def _load(self, checked: bool) -> ctypes.CDLL:
        if checked not in self._loaded:
            self._loaded[checked] = ctypes.CDLL(str(self.library(checked=checked)))
        return self._loaded[checked]


def _make_folder(owner: object) -> Path:
    """A folder that goes when its owner does; what is loaded from it stays loaded."""
    folder = tempfile.mkdtemp(prefix="tvm_fuse_emulator_")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _make_request(
    values: Values,
    signature: EmulatedKernel,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    seed: int,
) -> _Request:
    count = len(values.slots)
    addresses = (ctypes.c_void_p * (count + 1))(*map(ctypes.addressof, values.slots))
    extents = (_Extent * (count + 1))()
    for position, buffer in values.buffers.items():
        extents[position] = _Extent(buffer.address, buffer.array.nbytes, not buffer.is_output)
    sizes = [(ctypes.c_uint32 * 3)(*_fill(size, signature.name)) for size in (grid, block)]
    return _Request(*sizes, shared_bytes, seed, addresses, extents)


def _fill(sizes: Sequence[int], kernel: str) -> tuple[int, ...]:
    if not 1 <= len(sizes) <= 3 or not all(0 <= size < 2**31 for size in sizes):
        raise UsageError(f"{kernel}: wanted one to three sizes, got {tuple(sizes)}")
    return (*sizes, 1, 1)[:3]


def _check_results(kernel: str, signature: EmulatedKernel, values: Values) -> None:
    """What shows afterwards, and so without checks as well."""
    for position, buffer in values.buffers.items():
        name = signature.parameters[position].name
        side = buffer.broken_guard()
        if side:
            raise KernelFault(kernel, f"out of bounds: something was written {side} {name}")
        count = buffer.count_poison()
        if count:
            raise KernelFault(
                kernel,
                f"unwritten: {count} of {buffer.array.size} elements of {name} were never written, "
                "or computed from what was not",
            )


def _compare(kernel: str, signature: EmulatedKernel, first: Values, now: Values, seed: int) -> None:
    for position, buffer in now.buffers.items():
        differing = np.count_nonzero(buffer.copy != first.buffers[position].copy)
        if differing:
            name = signature.parameters[position].name
            raise KernelFault(
                kernel,
                f"order: {differing} bytes of {name} differ when threads run in the order of seed {seed}",
            )
