"""The kernels of a planned module, each once, as tasks to tune.

They are taken from what is built: after folding, layouts and grouping, with TVM's own FuseOps for the rest,
so that a computation has the same workload key when it is tuned and when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.cost import Parts, group_cost, time_s
from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.graph import ANCHOR_KINDS, Graph, Kind
from tvm_fuse.core.targets import Device
from tvm_fuse.core.tuning.digest import chain_digest, describe_chain, device_key
from tvm_fuse.core.tuning.task import Task
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.read import COMPOSITE_PREFIX, read_function
from tvm_fuse.relay.target import is_cuda
from tvm_fuse.relay.tuned import Computation, TunedBuild, tuned_schedules

__all__ = [
    "KernelFunction",
    "TunedTask",
    "device_key_of",
    "find_kernels",
    "find_tasks",
    "read_kernel_computation",
]


@dataclass(frozen=True)
class KernelFunction:
    """A primitive function of a module.

    Args:
        digest: Of its chain.
        name: For people.
        chain: The lines that the digest was made of.
        weight: How often ``main`` calls it.
        function: The ``relay.Function``.
        graph: Its graph.
    """

    digest: str
    name: str
    chain: tuple[str, ...]
    weight: int
    function: Any = field(compare=False, repr=False)
    graph: Graph = field(compare=False, repr=False)


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
        The architecture of a GPU; the LLVM name of a CPU, with its cores where it is this machine's.
    """
    kind = str(target.kind.name)
    if is_cuda(target):
        return device_key(kind, str(target.arch))
    name = str(target.attrs.get("mcpu", "") or target.attrs.get("mtriple", ""))
    facts = read_cpu()
    return device_key(kind, name, facts.cores if name == facts.name else 0)


def find_kernels(module: Any, target: Any) -> tuple[KernelFunction, ...]:
    """The primitive functions of a module, each once.

    Args:
        module: What ``FuseChains`` returned.
        target: Its target.

    Returns:
        One for each chain, in the order of their first calls.
    """
    with target, tvm.transform.PassContext(opt_level=3):
        infer = relay.transform.InferType()
        fused = infer(relay.transform.FuseOps()(infer(module)))
    found: dict[str, KernelFunction] = {}
    for call in _calls(fused["main"]):
        kernel = _read_kernel(call.op)
        before = found.get(kernel.digest)
        weight = 1 if before is None else before.weight + 1
        found[kernel.digest] = KernelFunction(
            kernel.digest, kernel.name, kernel.chain, weight, kernel.function, kernel.graph
        )
    return tuple(found.values())


def _calls(main: Any) -> list[Any]:
    found: list[Any] = []
    relay.analysis.post_order_visit(main, found.append)
    return [expr for expr in found if isinstance(expr, relay.Call) and _is_primitive(expr.op)]


def _is_primitive(callee: Any) -> bool:
    is_function = isinstance(callee, relay.Function)
    return is_function and callee.attrs is not None and "Primitive" in callee.attrs


def _read_kernel(function: Any) -> KernelFunction:
    read = read_function(function)
    attributes = {
        node.id: _write_attributes(read.expressions[node.id].attrs)
        for node in read.graph.nodes
        if node.attrs is None and isinstance(read.expressions[node.id], relay.Call)
    }
    chain = describe_chain(read.graph, attributes)
    name = str(function.attrs["Composite"]) if "Composite" in function.attrs else ""
    if not name.startswith(COMPOSITE_PREFIX):
        operators = (node.op for node in read.graph.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT))
        name = "_".join(operator.rpartition(".")[2] for operator in operators)
    else:
        name = name[len(COMPOSITE_PREFIX) :]
    return KernelFunction(chain_digest(chain), name, chain, 1, function, read.graph)


def _write_attributes(attributes: Any) -> str:
    """Attributes as text, the same in every process."""
    if attributes is None or not hasattr(attributes, "keys"):
        return ""
    return ", ".join(f"{key}={attributes[key]}" for key in sorted(map(str, attributes.keys())))


def read_kernel_computation(function: Any, target: Any) -> Computation | None:
    """What a kernel computes when it is built for a target; None where AutoScheduler cannot express it.

    Args:
        function: A primitive function.
        target: A ``tvm.target.Target``.
    """
    compiler = tvm.relay.backend.te_compiler.get()
    compiler.clear()  # what it has built before it would not schedule again
    context = tvm.transform.PassContext(opt_level=3, config={"tir.disable_assert": True})
    with tuned_schedules(TunedBuild()) as build, target, context:
        compiler.lower(function, target)
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
