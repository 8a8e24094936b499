"""The CUDA driver (``libcuda``) through ctypes: one device, one stream.

Anything that exports the functions in ``_SIGNATURES`` will do; those of graphs may be absent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.cuda.launch import Launch

__all__ = ["LIBRARY", "CudaError", "Device", "DeviceInfo", "PreparedLaunch"]

#: What the NVIDIA driver installs.
LIBRARY = "libcuda.so.1"

# Status codes and attributes of cuda.h.
_OUT_OF_MEMORY = 2
_NO_DEVICE = 100
_NOT_SUPPORTED = 801
_MAJOR, _MINOR, _SM_COUNT, _L2_BYTES = 75, 76, 16, 38
_MAX_DYNAMIC_SMEM = 8
_CAPTURE_THREAD_LOCAL = 1

_POINTER_OUT = c_void_p  # the address of a result
_ADDRESS = c_ulonglong  # device memory

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_POINTER_OUT,),
    "cuDeviceGetCount": (_POINTER_OUT,),
    "cuDeviceGet": (_POINTER_OUT, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_POINTER_OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER_OUT, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_POINTER_OUT, c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (_ADDRESS, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, _ADDRESS, c_size_t),
    "cuModuleLoad": (_POINTER_OUT, c_char_p),
    "cuModuleGetFunction": (_POINTER_OUT, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuStreamCreate": (_POINTER_OUT, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuEventCreate": (_POINTER_OUT, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (_POINTER_OUT, c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _POINTER_OUT),
    "cuGraphInstantiateWithFlags": (_POINTER_OUT, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGetErrorName": (c_int, _POINTER_OUT),
    "cuGetErrorString": (c_int, _POINTER_OUT),
}


class CudaError(ToolFailed):
    """The driver refused a call; ``code`` is its ``CUresult``."""

    def __init__(self, message: str, code: int, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself.

    Args:
        name: Its name.
        arch: Its architecture, such as ``sm_90``.
        sms: Multiprocessors.
        driver: Version of CUDA that the driver is for, such as ``13.0``.
    """

    name: str
    arch: str
    sms: int
    driver: str


class PreparedLaunch:
    """A kernel with its arguments in place, to be launched again and again."""

    def __init__(self, kernel: Launch, function: c_void_p, values: Sequence[Any]) -> None:
        """Put the arguments in place.

        Args:
            kernel: How it is launched.
            function: From ``Device.find_kernel``.
            values: ctypes values of its parameters.
        """
        self.kernel = kernel
        self.function = function
        self.addresses = (c_void_p * len(values))(*map(ctypes.addressof, values))
        self._values = values  # what the addresses point at


class Device:
    """One GPU: memory, kernels, launches in order, events, graphs.

    Failures raise ``CudaError``.
    """

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        """Open a device.

        Args:
            ordinal: Number of the device, from 0.
            library: The driver's file, or a name for the system's loader.

        Raises:
            MissingDependency: There is no driver or no GPU.
            UsageError: There is no device of this number.
        """
        self._library = _load(library)
        self._start(ordinal)
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        # 0: a stream that waits for copies and fills, which go to the default stream.
        self._call("cuStreamCreate", ctypes.byref(stream), 0)
        self._stream = stream
        self.info = self._describe(device.value)
        self.l2_bytes = self._attribute(_L2_BYTES, device.value)

    def _start(self, ordinal: int) -> None:
        status = self._status("cuInit", 0)
        count = c_int()
        if status == 0:
            status = self._status("cuDeviceGetCount", ctypes.byref(count))
        if status == _NO_DEVICE or (status == 0 and count.value == 0):
            raise MissingDependency("the CUDA driver sees no NVIDIA GPU", _NO_GPU_HINT)
        if status != 0:
            raise MissingDependency(f"the CUDA driver does not start: {self._explain(status)}", _NO_GPU_HINT)
        if not 0 <= ordinal < count.value:
            raise UsageError(f"there is no device {ordinal}; wanted one below {count.value}")

    def _describe(self, device: int) -> DeviceInfo:
        name, version = ctypes.create_string_buffer(256), c_int()
        self._call("cuDeviceGetName", name, 256, device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        arch = f"sm_{self._attribute(_MAJOR, device)}{self._attribute(_MINOR, device)}"
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return DeviceInfo(
            name.value.decode(errors="replace"), arch, self._attribute(_SM_COUNT, device), driver
        )

    def _attribute(self, number: int, device: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    # --- memory ------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """The address of fresh device memory; at least one byte is taken."""
        address = _ADDRESS()
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), max(size_bytes, 1))
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            raise CudaError(
                f"the device is out of memory: {size_bytes} more bytes were wanted",
                error.code,
                "other programs may use it; `nvidia-smi` tells",
            ) from error
        return address.value

    def free(self, address: int) -> None:
        """Give memory back; after a failed kernel the driver refuses that as well, silently."""
        self._status("cuMemFree_v2", address)

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        """Set every byte of a piece of memory."""
        if size_bytes:
            self._call("cuMemsetD8_v2", address, byte, size_bytes)

    def upload(self, address: int, array: Array) -> None:
        """Copy an array to the device."""
        array = np.ascontiguousarray(array)
        if array.nbytes:
            self._call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)
            self.synchronize()

    def download(self, address: int, shape: tuple[int, ...], dtype: str) -> Array:
        """Copy an array from the device, once all work on it is done."""
        self.synchronize()
        array = np.empty(shape, dtype)
        if array.nbytes:
            self._call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)
        return array

    # --- kernels -----------------------------------------------------------------------------

    def load_module(self, file: Path) -> c_void_p:
        """Load a cubin or PTX file."""
        module = c_void_p()
        self._call("cuModuleLoad", ctypes.byref(module), str(file).encode())
        return module

    def find_kernel(self, module: c_void_p, symbol: str, smem_dynamic_bytes: int) -> c_void_p:
        """A kernel of a module, allowed the shared memory that it will get."""
        function = c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode(), about=symbol)
        if smem_dynamic_bytes:  # what a block gets without asking is less where the kernel declares some
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, smem_dynamic_bytes, about=symbol)
        return function

    def launch(self, prepared: PreparedLaunch) -> None:
        """Launch a kernel on this device's stream."""
        kernel = prepared.kernel
        sizes = (*kernel.grid, *kernel.block, kernel.smem_dynamic_bytes)
        arguments = prepared.function, *sizes, self._stream, prepared.addresses, None
        self._call("cuLaunchKernel", *arguments, about=kernel.symbol)

    def synchronize(self, about: str = "") -> None:
        """Wait until all work is done; ``about`` names it in messages."""
        self._call("cuCtxSynchronize", about=about)

    # --- time and graphs ---------------------------------------------------------------------

    def time(self, work: Callable[[], None], count: int) -> float:
        """Seconds between two events around ``count`` calls of ``work``, for one of them."""
        with self._event() as start, self._event() as end:
            self._call("cuEventRecord", start, self._stream)
            for _ in range(count):
                work()
            self._call("cuEventRecord", end, self._stream)
            self._call("cuEventSynchronize", end)
            elapsed_ms = c_float()
            self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), start, end)
        return elapsed_ms.value * 1e-3 / count

    @contextmanager
    def _event(self) -> Iterator[c_void_p]:
        event = c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        try:
            yield event
        finally:
            self._status("cuEventDestroy_v2", event)

    @contextmanager
    def captured(self, work: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """The launches that ``work`` makes, as one CUDA graph.

        Raises:
            CudaError: The driver cannot capture them, or cannot make a graph of them.
        """
        graph, executable = c_void_p(), c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_THREAD_LOCAL)
        try:
            work()
        finally:  # ends the capture in any case: the stream must be usable again
            status = self._status("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._check("cuStreamEndCapture", status)
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
            yield lambda: self._call("cuGraphLaunch", executable, self._stream)
            self.synchronize("CUDA graph")
        finally:
            if executable:
                self._status("cuGraphExecDestroy", executable)
            self._status("cuGraphDestroy", graph)

    # --- calls -------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any, about: str = "") -> None:
        self._check(name, self._status(name, *arguments), about)

    def _status(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, name, None)
        if function is None:
            return _NOT_SUPPORTED
        if function.argtypes is None:
            function.argtypes = _SIGNATURES[name]
        return int(function(*arguments))

    def _check(self, name: str, status: int, about: str = "") -> None:
        if status != 0:
            where = f" ({about})" if about else ""
            fault = self._read_fault() if name == "cuLaunchKernel" else ""
            raise CudaError(f"{name}{where} failed: {fault or self._explain(status)}", status)

    def _read_fault(self) -> str:
        """What the emulator's driver knows of a failed launch; others have no such function."""
        function = getattr(self._library, "tvm_fuse_emulator_fault", None)
        if function is None:
            return ""
        function.restype = c_char_p
        return str((function() or b"").decode(errors="replace"))

    def _explain(self, status: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if self._status(name, status, ctypes.byref(text)) == 0 and text.value:
                texts.append(text.value.decode(errors="replace"))
        return ", ".join(texts) or f"CUDA error {status}"


_NO_GPU_HINT = "run on a machine with an NVIDIA GPU, or try the kernels with --device emulator"


def _load(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise MissingDependency(
            f"the CUDA driver cannot be loaded: {error}",
            "install the NVIDIA driver on a machine with a GPU, or try the kernels with --device emulator",
        ) from error
