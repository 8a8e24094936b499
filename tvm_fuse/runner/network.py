"""A bundle on a device: memory for its tensors, its kernels, its graph."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.bundle import Bundle, Image, Operand, Operator, Tensor
from tvm_fuse.cuda.launch import Parameter
from tvm_fuse.runner.driver import Device, PreparedLaunch

__all__ = ["POISON", "Network", "Step", "choose_image", "immediate"]

#: dtype of a parameter that is a number -> its C type.
_C_TYPES: Mapping[str, Callable[[Any], Any]] = {
    "bool": ctypes.c_bool,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    **{
        f"{sign}int{bits}": getattr(ctypes, f"c_{sign}int{bits}")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}

#: As float32 or float16 every value is then no number, until a kernel writes it.
POISON = 0xFF


def immediate(parameter: Parameter, value: float) -> Any:
    """A number as a launch passes it, of the parameter's C type."""
    if parameter.dtype == "float16":
        return ctypes.c_uint16(int(np.float16(value).view(np.uint16)))
    return _C_TYPES[parameter.dtype](value)


def choose_image(bundle: Bundle, arch: str) -> Image:
    """The machine code for a device: made for it, else for an older one of its kind, else PTX.

    Args:
        bundle: The bundle.
        arch: The device's architecture.

    Returns:
        The image.

    Raises:
        UsageError: None of them runs on the device.
    """
    number = _number(arch)
    suitable = [image for image in bundle.images if _suits(image, number)]
    if not suitable:
        got = ", ".join(f"{image.form} for {image.arch}" for image in bundle.images)
        raise UsageError(
            f"the bundle has no machine code for {arch}; it has {got}",
            f"export it with --arch {arch} as well",
        )
    return max(suitable, key=lambda image: (image.form == "cubin", _number(image.arch), image.arch))


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _suits(image: Image, number: int) -> bool:
    """A cubin runs on newer devices of its major version, PTX on all newer ones; code for sm_90a on that."""
    made_for = _number(image.arch)
    if not image.arch[-1].isdigit():
        return made_for == number
    return made_for <= number and (image.form == "ptx" or made_for // 10 == number // 10)


@dataclass(frozen=True)
class Step:
    """One launch of the graph, and the operator that it belongs to."""

    operator: str
    launch: PreparedLaunch

    @property
    def symbol(self) -> str:
        """The kernel."""
        return self.launch.kernel.symbol


class Network:
    """A bundle that is ready to run; ``close`` gives its memory back."""

    def __init__(self, device: Device, bundle: Bundle, image: Path) -> None:
        """Load the kernels and allocate memory.

        Args:
            device: Where it runs.
            bundle: The bundle.
            image: File with the kernels, as the device's driver loads them.

        Raises:
            CudaError: The kernels cannot be loaded, or memory runs out.
        """
        self._device = device
        self._bundle = bundle
        self._storages: list[int] = []
        self._arena = 0
        module = device.load_module(image)
        kernels = {kernel.symbol: kernel for kernel in bundle.kernels}
        functions = {
            symbol: device.find_kernel(module, symbol, kernel.smem_dynamic_bytes)
            for symbol, kernel in kernels.items()
        }
        self._allocate()

        def prepare(operator: Operator) -> list[Step]:
            steps = []
            for call in operator.calls:
                kernel = kernels[call.symbol]
                values = list(map(self._value, kernel.parameters, call.operands))
                launch = PreparedLaunch(kernel, functions[call.symbol], values)
                steps.append(Step(operator.name, launch))
            return steps

        self.steps = tuple(step for operator in bundle.operators for step in prepare(operator))

    @property
    def memory_bytes(self) -> int:
        """Device memory of all tensors and workspaces."""
        return sum(self._bundle.storages) + self._bundle.arena_bytes

    def _allocate(self) -> None:
        try:
            for size_bytes in self._bundle.storages:
                self._storages.append(self._device.allocate(size_bytes))
            self._arena = self._device.allocate(self._bundle.arena_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free all memory; the network cannot run any more."""
        for address in filter(None, (*self._storages, self._arena)):
            self._device.free(address)
        self._storages, self._arena = [], 0

    def _value(self, parameter: Parameter, operand: Operand) -> Any:
        """What a launch passes: an address or a number."""
        if operand.kind == "tensor":
            return ctypes.c_uint64(self._address(self._bundle.tensors[int(operand.value)]))
        if operand.kind == "workspace":
            return ctypes.c_uint64(self._arena + self._bundle.workspaces[int(operand.value)].offset_bytes)
        return immediate(parameter, operand.value)

    def _address(self, tensor: Tensor) -> int:
        return self._storages[tensor.storage]

    # --- tensors -----------------------------------------------------------------------------

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Copy inputs or parameters to the device.

        Raises:
            UsageError: There is no such input, or it has another shape.
        """
        ports = {port.name: port for port in (*self._bundle.parameters, *self._bundle.inputs)}
        for name, array in arrays.items():
            if name not in ports:
                raise UsageError(f"there is no input {name!r}; wanted one of {', '.join(ports)}")
            tensor = self._bundle.tensors[ports[name].tensor]
            if array.shape != tensor.shape or str(array.dtype) != tensor.dtype:
                raise UsageError(f"{name!r}: wanted {tensor}, got {array.dtype}{list(array.shape)}")
            self._device.upload(self._address(tensor), array)

    def outputs(self) -> dict[str, Array]:
        """Copy all outputs from the device, by name."""
        return {port.name: self.read(port.tensor) for port in self._bundle.outputs}

    def read(self, index: int) -> Array:
        """Copy a tensor from the device: what lies in its storage now."""
        tensor = self._bundle.tensors[index]
        return self._device.download(self._address(tensor), tensor.shape, tensor.dtype)

    def poison(self) -> None:
        """Fill all memory but inputs and parameters with NaN, which a missing write leaves there."""
        ports = (*self._bundle.parameters, *self._bundle.inputs)
        kept = {self._bundle.tensors[port.tensor].storage for port in ports}
        for index, (address, size_bytes) in enumerate(zip(self._storages, self._bundle.storages)):
            if index not in kept:
                self._device.fill(address, POISON, size_bytes)
        self._device.fill(self._arena, POISON, self._bundle.arena_bytes)

    # --- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Launch everything, without waiting for it."""
        for step in self.steps:
            self._device.launch(step.launch)

    def run_checked(self) -> None:
        """Launch kernel by kernel, each waited for, so that a failure names the one it is in.

        Raises:
            CudaError: A kernel cannot be launched, or fails.
        """
        for step in self.steps:
            self._run_step(step)

    def run_operators(self) -> Iterator[int]:
        """Launch operator by operator.

        Yields:
            The index of each in the bundle, once all that it writes is there.

        Raises:
            CudaError: A kernel cannot be launched, or fails.
        """
        steps = iter(self.steps)
        for index, operator in enumerate(self._bundle.operators):
            for _ in operator.calls:
                self._run_step(next(steps))
            yield index

    def _run_step(self, step: Step) -> None:
        self._device.launch(step.launch)
        self._device.synchronize(about=step.symbol)
