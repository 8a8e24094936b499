"""CUDA kernels of a build with their launches, read from TVM's IR.

The place to look is after ``tir.SplitHostDevice``: there each kernel is a function of its own with its
parameters in final order, and the extents of its grid and blocks are still in its body::

    with T.launch_thread("blockIdx.x", 56):
        ...

Later they are arguments of a packed call. What is read is compared with the C that is generated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.errors import InternalError
from tvm_fuse.cuda.launch import Dim3, Launch, Parameter, check_launches
from tvm_fuse.cuda.source import read_kernels
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.build import Artifact, build_fused
from tvm_fuse.relay.cuda_choice import Choice
from tvm_fuse.relay.kernel_choices import ChoiceRecorder
from tvm_fuse.relay.target import is_cuda
from tvm_fuse.relay.tuned import TunedSchedule

__all__ = ["KernelBuild", "SplitRecorder", "build_kernels", "read_callers", "read_launches"]

_AXES = ("x", "y", "z")


@dataclass(frozen=True)
class KernelBuild:
    """A model built for CUDA.

    Args:
        artifact: The build.
        launches: One for each kernel, in the order of the source.
        calls: Symbol -> how often one inference calls the operator that launches it; 0 for a reshape that
            turned out to do nothing.
        computed: Kernels without one: their launch depends on values that the host computes, as in sorting.
        choices: Symbol of a kernel with an anchor -> its schedule, and why it is no better one.
        modules: The IR after ``tir.SplitHostDevice``, host functions included.
    """

    artifact: Artifact
    launches: tuple[Launch, ...]
    calls: Mapping[str, int]
    computed: tuple[str, ...]
    choices: Mapping[str, Choice]
    modules: tuple[Any, ...] = field(compare=False, repr=False)


def build_kernels(
    module: Any, target: Any, schedules: Mapping[str, TunedSchedule] | None = None
) -> KernelBuild:
    """Builds a module for CUDA, and reads how each kernel is launched.

    Args:
        module: What ``FuseChains`` returned for the same target.
        target: A ``tvm.target.Target`` for CUDA.
        schedules: As of ``build_fused``.

    Returns:
        The build and its launches.

    Raises:
        ToolFailed: TVM cannot build it.
        InternalError: The IR and the CUDA C disagree.
    """
    recorder, chooser = SplitRecorder(), ChoiceRecorder(target)
    artifact = build_fused(module, target, (recorder, chooser), schedules)
    found, sources = read_launches(recorder.modules), read_kernels(artifact.cuda_source)
    if found.keys() != sources.keys():
        raise InternalError(
            f"kernels in the IR {sorted(found)} are not those of the source {sorted(sources)}"
        )
    launches = tuple(launch for launch in map(found.__getitem__, sources) if launch is not None)
    check_launches(launches, sources)
    computed = tuple(symbol for symbol in sources if found[symbol] is None)
    callers, called = read_callers(recorder.modules), Counter(call.function for call in artifact.calls)
    calls = {symbol: called[callers[symbol]] for symbol in sources}
    choices = {
        symbol: chooser.choices[callers[symbol]] for symbol in sources if callers[symbol] in chooser.choices
    }
    return KernelBuild(artifact, launches, calls, computed, choices, tuple(recorder.modules))


@tvm.instrument.pass_instrument
class SplitRecorder:
    """Keeps the modules in which host and device functions have just been separated."""

    def __init__(self) -> None:
        self.modules: list[Any] = []

    def run_after_pass(self, module: Any, info: Any) -> None:
        """Called by TVM after each pass."""
        if info.name == "tir.SplitHostDevice":
            self.modules.append(module)


def read_launches(modules: Iterable[Any]) -> dict[str, Launch | None]:
    """Reads the launch of every CUDA kernel.

    Args:
        modules: As they are after ``tir.SplitHostDevice``.

    Returns:
        Symbol -> the launch; None when it depends on values that are known at run time only.
    """
    return {
        str(symbol.name_hint): _read_launch(str(symbol.name_hint), function)
        for module in modules
        for symbol, function in module.functions.items()
        if _is_kernel(function)
    }


def read_callers(modules: Iterable[Any]) -> dict[str, str]:
    """Kernel -> the host function that launches it."""
    callers: dict[str, str] = {}
    for module in modules:
        for symbol, function in module.functions.items():
            if isinstance(function, tvm.tir.PrimFunc) and not _is_kernel(function):
                found: list[Any] = []
                tvm.tir.stmt_functor.post_order_visit(function.body, found.append)
                callees = (node.op for node in found if isinstance(node, tvm.tir.Call))
                names = (str(callee.name_hint) for callee in callees if isinstance(callee, tvm.ir.GlobalVar))
                callers.update(dict.fromkeys(names, str(symbol.name_hint)))
    return callers


def _is_kernel(function: Any) -> bool:
    """Whether a function runs on the GPU: its target has lost the host."""
    if not isinstance(function, tvm.tir.PrimFunc) or "target" not in (function.attrs or {}):
        return False
    target = function.attrs["target"]
    return is_cuda(target) and target.host is None


def _read_launch(symbol: str, function: Any) -> Launch | None:
    found: list[Any] = []
    tvm.tir.stmt_functor.post_order_visit(function.body, found.append)
    try:
        extents = _read_extents(symbol, found)
        dynamic_bytes = sum(_read_bytes(node) for node in found if _is_dynamic_memory(node))
    except _UnknownSizeError:
        return None
    grid, block = (_dim3(extents, prefix) for prefix in ("blockIdx", "threadIdx"))
    return Launch(symbol, grid, block, dynamic_bytes, tuple(map(_read_parameter, function.params)))


def _read_extents(symbol: str, nodes: Iterable[Any]) -> dict[str, int]:
    """Thread tag, such as ``blockIdx.x``, -> its extent."""
    extents: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, tvm.tir.AttrStmt) and node.attr_key == "thread_extent":
            tag, extent = str(node.node.thread_tag), _read_size(node.value)
            if extents.setdefault(tag, extent) != extent:
                raise InternalError(f"{symbol}: {tag} has the extents {extents[tag]} and {extent}")
    return extents


def _dim3(extents: dict[str, int], prefix: str) -> Dim3:
    x, y, z = (extents.get(f"{prefix}.{axis}", 1) for axis in _AXES)
    return x, y, z


class _UnknownSizeError(Exception):
    """A size that is known at run time only."""


def _read_size(expression: Any) -> int:
    size = tvm.arith.Analyzer().simplify(expression)
    if not isinstance(size, tvm.tir.IntImm):
        raise _UnknownSizeError(str(size))
    return int(size)


def _is_dynamic_memory(node: Any) -> bool:
    if not isinstance(node, tvm.tir.Allocate):
        return False
    return getattr(node.buffer_var.type_annotation, "storage_scope", "") == "shared.dyn"


def _read_bytes(allocate: Any) -> int:
    return math.prod(map(_read_size, allocate.extents)) * _size_bytes(allocate.dtype)


def _read_parameter(variable: Any) -> Parameter:
    kind = variable.type_annotation
    if isinstance(kind, tvm.ir.PointerType):
        return Parameter(str(variable.name), str(kind.element_type.dtype))
    return Parameter(str(variable.name), str(variable.dtype), _size_bytes(variable.dtype), False)


def _size_bytes(dtype: Any) -> int:
    kind = tvm.DataType(dtype)
    return int((kind.bits * kind.lanes + 7) // 8)
