"""The kernels of a planned module as tasks to tune: those that reduce something.

They are the functions that are built (``kernel_functions``), so that a computation has the same workload key
when it is tuned and when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.cost import Parts, group_cost, time_s
from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.graph import ANCHOR_KINDS, Graph, Kind
from tvm_fuse.core.targets import Device
from tvm_fuse.core.tuning.digest import device_key
from tvm_fuse.core.tuning.task import Task
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.kernel_functions import KernelFunction, mark_function
from tvm_fuse.relay.target import is_cuda
from tvm_fuse.relay.tuned import Computation, TunedBuild, tuned_schedules

__all__ = [
    "TunedTask",
    "device_key_of",
    "find_tasks",
    "read_kernel_computation",
]


@dataclass(frozen=True)
class TunedTask:
    """A task, its function, and what it computes."""

    task: Task
    function: Any = field(compare=False, repr=False)
    computation: Computation = field(compare=False, repr=False)


def device_key_of(target: Any) -> str:
    """The key of the device that a target stands for.

    Args:
        target: A ``tvm.target.Target``.

    Returns:
        The architecture of a GPU; the LLVM name of a CPU and its cores: what the target says, or this
        machine's where it is this machine's CPU.
    """
    kind = str(target.kind.name)
    if is_cuda(target):
        return device_key(kind, str(target.arch))
    name = str(target.attrs.get("mcpu", "") or target.attrs.get("mtriple", ""))
    facts = read_cpu()
    cores = int(target.attrs.get("num-cores", 0)) or (facts.cores if name == facts.name else 0)
    return device_key(kind, name, cores)


def read_kernel_computation(function: Any, target: Any) -> Computation | None:
    """What is tuned of a kernel: the computation that it has when it is built with a record.

    Args:
        function: A primitive function.
        target: A ``tvm.target.Target``.

    Returns:
        The computation; None where TVM or AutoScheduler cannot express it, as with dynamic shapes.
    """
    compiler = tvm.relay.backend.te_compiler.get()
    compiler.clear()  # what it has built before it would not schedule again
    context = tvm.transform.PassContext(opt_level=3, config={"tir.disable_assert": True})
    marked = mark_function(function)
    with tuned_schedules(TunedBuild()) as build, target, context, suppress(RuntimeError):
        compiler.lower(marked, target)  # a TVMError comes as a RuntimeError
    compiler.clear()
    return next(iter(build.seen.values()), None)


def find_tasks(
    kernels: Iterable[KernelFunction], target: Any, device: Device | None, known: Mapping[str, str]
) -> tuple[TunedTask, ...]:
    """The kernels that can be tuned: those that reduce something.

    Args:
        kernels: The kernels.
        target: Their target.
        device: Whose peaks the roofline takes; None where none are known.
        known: Digest -> schedule of a record.

    Returns:
        The tasks, those with the most operations in an inference first.
    """
    found = []
    for kernel in kernels:
        computation = read_kernel_computation(kernel.function, target)
        if computation is None or not computation.has_reduction:
            continue
        cost = group_cost(kernel.graph, _parts(kernel.graph))
        task = Task(
            digest=kernel.digest,
            name=kernel.name,
            detail=str(kernel.graph.nodes[kernel.graph.outputs[0]].output),
            workload_key=computation.workload_key,
            flops=cost.flops,
            weight=kernel.weight,
            roofline_s=time_s(cost, device) - cost.launches * device.launch_s if device else 0.0,
            chain=kernel.chain,
            known=(known[kernel.digest],) if kernel.digest in known else (),
        )
        found.append(TunedTask(task, kernel.function, computation))
    return tuple(sorted(found, key=lambda one: -one.task.flops * one.task.weight))


def _parts(graph: Graph) -> Parts:
    nodes = [node for node in graph.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT)]
    anchors = [node.id for node in nodes if node.kind in ANCHOR_KINDS]
    return Parts(tuple(node.id for node in nodes), anchors[-1] if anchors else None)
