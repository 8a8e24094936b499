"""The description of a bundle as JSON, and what must hold in one that is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from tvm_fuse.core.errors import ModelError
from tvm_fuse.cuda.bundle import DTYPES, Bundle, Operand, Output, Port
from tvm_fuse.cuda.launch import Launch, Parameter
from tvm_fuse.cuda.plain import make

__all__ = ["SCHEMA", "from_json", "to_json"]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/cuda-bundle", "version": 1}

_MOST_THREADS = 1024  # of a block, on every architecture

_HINT = "`tvm-fuse export MODEL -o BUNDLE` writes one"


def to_json(bundle: Bundle) -> str:
    """The bundle as one JSON document."""
    return json.dumps({"schema": SCHEMA, **asdict(bundle)}, indent=1, allow_nan=False)


def from_json(text: str | bytes, where: str) -> Bundle:
    """Read a bundle's description.

    Args:
        text: What ``to_json`` wrote.
        where: What it was found in, for messages.

    Raises:
        ModelError: It is no bundle, of another version, or contradicts itself.
    """
    try:
        document = json.loads(text)
        schema = document.pop("schema")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{where}: not a bundle of tvm-fuse: {error!r}", _HINT) from error
    if schema != SCHEMA:
        raise ModelError(
            f"{where}: the bundle is {schema}; wanted {SCHEMA}", "use the tvm-fuse that wrote it"
        )
    try:
        bundle: Bundle = make(Bundle, document, "")
    except ValueError as error:
        raise ModelError(f"{where}: the bundle is damaged: {error}", _HINT) from error
    for fault in _find_faults(bundle):
        raise ModelError(f"{where}: the bundle is damaged: {fault}", _HINT)
    return bundle


# --- what must hold between the parts --------------------------------------------------------


def _find_faults(bundle: Bundle) -> Iterator[str]:
    """What the types of the fields do not say."""
    for kernel in bundle.kernels:
        yield from _find_kernel_faults(kernel)
    yield from _find_memory_faults(bundle)
    yield from _find_port_faults(bundle)
    yield from _find_call_faults(bundle)
    yield from _find_file_faults(bundle)
    if bundle.draws and len(bundle.draws) != len(bundle.parameters):
        yield f"it draws {len(bundle.draws)} of {len(bundle.parameters)} parameters"


def _find_file_faults(bundle: Bundle) -> Iterator[str]:
    names = {record.name for record in bundle.files}
    yield from (f"the file name {name!r} has a folder in it" for name in names if not _is_bare(name))
    for image in bundle.images:
        if image.form not in ("cubin", "ptx") or not re.fullmatch(r"sm_\d{2,3}[af]?", image.arch):
            yield f"unknown machine code {image.form!r} for {image.arch!r}"
        if image.file not in names:
            yield f"{image.file} is not among its files"
    if not bundle.images:
        yield "it has no machine code"


def _is_bare(name: str) -> bool:
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def _find_kernel_faults(kernel: Launch) -> Iterator[str]:
    if min(*kernel.grid, *kernel.block) < 1 or kernel.threads_per_block > _MOST_THREADS:
        yield f"{kernel.symbol} cannot be launched as {kernel.grid} blocks of {kernel.block} threads"
    if kernel.smem_dynamic_bytes < 0:
        yield f"{kernel.symbol} has {kernel.smem_dynamic_bytes} bytes of shared memory"
    for parameter in kernel.parameters:
        if parameter.dtype not in DTYPES:
            yield f"{kernel.symbol} takes {parameter.name!r} of the unknown dtype {parameter.dtype!r}"


def _find_memory_faults(bundle: Bundle) -> Iterator[str]:
    if min(bundle.storages, default=0) < 0:
        yield "a storage has less than no bytes"
    for index, tensor in enumerate(bundle.tensors):
        if tensor.dtype not in DTYPES or min(tensor.shape, default=0) < 0:
            yield f"tensor {index} is {tensor}"
        elif not 0 <= tensor.storage < len(bundle.storages):
            yield f"tensor {index} lies in storage {tensor.storage} of {len(bundle.storages)}"
        elif tensor.size_bytes > bundle.storages[tensor.storage]:
            got = bundle.storages[tensor.storage]
            yield f"tensor {index} has {tensor.size_bytes} bytes, its storage {got}"
    for index, space in enumerate(bundle.workspaces):
        if min(space.offset_bytes, space.size_bytes) < 0:
            yield f"workspace {index} is {space}"


def _find_port_faults(bundle: Bundle) -> Iterator[str]:
    groups: dict[str, Sequence[Port | Output]] = {
        "inputs or parameters": (*bundle.inputs, *bundle.parameters),
        "outputs": bundle.outputs,
    }
    for what, ports in groups.items():
        names = [port.name for port in ports]
        yield from (f"two {what} are called {name!r}" for name in names if names.count(name) > 1)
        for port in ports:
            if not 0 <= port.tensor < len(bundle.tensors):
                yield f"{port.name!r} is tensor {port.tensor} of {len(bundle.tensors)}"
    if not bundle.outputs:
        yield "it has no output"


def _find_call_faults(bundle: Bundle) -> Iterator[str]:
    kernels = {kernel.symbol: kernel for kernel in bundle.kernels}
    if len(kernels) < len(bundle.kernels):
        yield "two kernels have one symbol"
    for operator in bundle.operators:
        for call in operator.calls:
            kernel = kernels.get(call.symbol)
            if kernel is None:
                yield f"{operator.name} launches {call.symbol!r}, which is no kernel of it"
            elif len(call.operands) != len(kernel.parameters):
                got = len(call.operands)
                yield f"{operator.name} passes {got} of {len(kernel.parameters)} parameters to {call.symbol}"
            else:
                for parameter, operand in zip(kernel.parameters, call.operands):
                    fault = _find_operand_fault(bundle, parameter, operand)
                    if fault:
                        yield f"{operator.name} passes {fault} for {parameter.name!r} to {call.symbol}"


def _find_operand_fault(bundle: Bundle, parameter: Parameter, operand: Operand) -> str:
    counts = {"tensor": len(bundle.tensors), "workspace": len(bundle.workspaces)}
    if operand.kind not in (*counts, "immediate"):
        return f"the unknown kind {operand.kind!r}"
    if (operand.kind == "immediate") is parameter.is_pointer:
        return f"the {operand.kind} {operand.value}"
    count = counts.get(operand.kind)
    if count is not None and not (isinstance(operand.value, int) and 0 <= operand.value < count):
        return f"{operand.kind} {operand.value} of {count}"
    if operand.kind == "tensor":
        tensor = bundle.tensors[int(operand.value)]
        if np.dtype(tensor.dtype).itemsize != np.dtype(parameter.dtype).itemsize:
            return f"tensor {operand.value} of {tensor.dtype}, wanted {parameter.dtype},"
    return ""
