"""Candidates in the form that ships: built by Relay, compiled by NVRTC, and read for what the compiler says.

A kernel that spills, or has a stack frame, keeps its sums in memory: it is rejected, whatever the score says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.core.tuning.score import KernelProfile, with_resources
from tvm_fuse.cuda.bundle import Call, Operand, Workspace
from tvm_fuse.cuda.candidates import Value
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.resources import KernelResources, read_resources
from tvm_fuse.relay.graph_plan import GraphPlan, read_graph_plan
from tvm_fuse.relay.kernels import build_kernels
from tvm_fuse.relay.tune_kernel import call_kernel
from tvm_fuse.relay.tune_tasks import TunedTask
from tvm_fuse.relay.tuned import TunedSchedule

__all__ = ["BuiltKernel", "build_candidate"]


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel of a task, compiled.

    Args:
        schedule: Text of AutoScheduler; empty for the kernel that the build makes without a record.
        kernels: How its kernels are launched.
        calls: Its launches; a tensor is an index into inputs, then outputs, of the function.
        workspaces: Scratch memory between its kernels.
        inputs: Operands of the function.
        outputs: Its results.
        profiles: What its kernels do, with what the compiler says of them; empty where that is not known.
        problem: Why it is of no use; empty where it is.
        compiler: Name and version.
        source: CUDA C++.
        cubin: Machine code.
    """

    schedule: str
    kernels: tuple[Launch, ...]
    calls: tuple[Call, ...]
    workspaces: tuple[Workspace, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    profiles: tuple[KernelProfile, ...]
    problem: str
    compiler: str
    source: str = field(repr=False)
    cubin: bytes = field(repr=False)


def build_candidate(
    one: TunedTask, target: Any, schedule: str, profiles: Sequence[KernelProfile]
) -> BuiltKernel:
    """Build a kernel of a task and compile it.

    Args:
        one: The task.
        target: A ``tvm.target.Target`` for CUDA.
        schedule: Text of AutoScheduler; empty takes what the build takes without a record.
        profiles: What its kernels do, in the order of their launches.

    Returns:
        The kernel; one that the compiler spoils has a ``problem``.

    Raises:
        MissingDependency: There is no NVRTC.
        ToolFailed: It does not build or compile.
        ModelError: It needs more of the host than launches.
    """
    schedules = {one.task.digest: TunedSchedule(one.task.workload_key, schedule)} if schedule else None
    try:
        build = build_kernels(call_kernel(one.function), target, schedules)
    except ValueError as error:  # what TVM's code generator raises for CUDA C that it cannot write
        lines = str(error).strip().splitlines() or [""]
        raise ToolFailed(f"{one.task.name} does not build: {lines[-1]}") from error
    plan = read_graph_plan(build)
    compiled = compile_cuda(build.artifact.cuda_source, str(target.arch))
    used = {launch.symbol: launch for launch in build.launches}
    resources = {item.symbol: item for item in read_resources(compiled, used.values())}
    calls = _place_operands(one, plan)
    inputs, outputs = _values(one, plan)
    return BuiltKernel(
        schedule=schedule,
        kernels=tuple(dict.fromkeys(used[call.symbol] for call in calls)),
        calls=calls,
        workspaces=plan.workspaces,
        inputs=inputs,
        outputs=outputs,
        profiles=_with_compiled(profiles, [resources[call.symbol] for call in calls]),
        problem=_find_problem([resources[call.symbol] for call in calls]),
        compiler=compiled.compiler,
        source=build.artifact.cuda_source,
        cubin=compiled.cubin,
    )


def _arguments(one: TunedTask, plan: GraphPlan) -> list[int]:
    """The tensors of the function's parameters, in order."""
    return [plan.arguments[str(param.name_hint)] for param in one.function.params]


def _values(one: TunedTask, plan: GraphPlan) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    def of(tensors: Sequence[int]) -> tuple[Value, ...]:
        return tuple(Value(plan.tensors[index].shape, plan.tensors[index].dtype) for index in tensors)

    return of(_arguments(one, plan)), of(plan.outputs)


def _place_operands(one: TunedTask, plan: GraphPlan) -> tuple[Call, ...]:
    """All launches, with tensors counted as inputs, then outputs."""
    tensors = [*_arguments(one, plan), *plan.outputs]
    places = {tensor: place for place, tensor in enumerate(tensors)}

    def placed(operand: Operand) -> Operand:
        if operand.kind != "tensor":
            return operand
        if int(operand.value) not in places:
            raise ToolFailed(f"{one.task.name} was built as several operators")
        return Operand("tensor", places[int(operand.value)])

    return tuple(
        Call(call.symbol, tuple(map(placed, call.operands)))
        for operator in plan.operators
        for call in operator.calls
    )


def _with_compiled(
    profiles: Sequence[KernelProfile], resources: Sequence[KernelResources]
) -> tuple[KernelProfile, ...]:
    """Profiles with the compiler's registers; none where the launches are not those that were profiled."""
    if len(profiles) != len(resources):
        return ()
    return tuple(
        with_resources(profile, used.registers_per_thread, used.spill_bytes, used.stack_bytes)
        for profile, used in zip(profiles, resources)
    )


def _find_problem(resources: Sequence[KernelResources]) -> str:
    for used in resources:
        if used.spill_bytes:
            return "spills"
        if used.stack_bytes:
            return "has a stack frame"
        if not used.blocks_per_sm:
            return "cannot be launched"
    return ""
