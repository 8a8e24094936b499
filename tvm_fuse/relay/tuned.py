"""Tuned schedules in a build: each kernel that has one gets it, all others what they get without.

Relay asks an operator's strategy for a computation, and later for the schedule of the whole kernel. Inside
``tuned_schedules`` the second question is ours first: a kernel whose computation has a tuned schedule gets
that, any other its own. TVM's ``relay.backend.use_auto_scheduler`` would ask as well, but it also makes the
strategies choose other computations, so that a kernel without a record would become a slower one; and its
layout rewrite takes the groups of a plan apart, and breaks grouped convolutions. Layouts are decided before
chains are grouped (``layout_pass``), once, and are not touched by tuning.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.errors import InternalError
from tvm_fuse.relay.base import relay, tvm

__all__ = ["Computation", "TunedBuild", "load_state", "tuned_schedules"]


@dataclass(frozen=True)
class Computation:
    """What one kernel computes, as AutoScheduler sees it.

    Args:
        workload_key: Its key.
        dag: TVM's ``ComputeDAG``.
        tensors: Its operands, then its results.
        has_reduction: Whether anything is summed up: else there is nothing to search.
    """

    workload_key: str
    dag: Any = field(compare=False, repr=False)
    tensors: tuple[Any, ...] = field(compare=False, repr=False)
    has_reduction: bool


@dataclass
class TunedBuild:
    """Schedules for a build, and what the build had.

    Args:
        schedules: Workload key -> text of the schedule.
        seen: Workload key -> computation, of every kernel that was built.
        used: Keys whose schedule was used.
    """

    schedules: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, Computation] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def check_used(self) -> None:
        """Raises an error when a schedule was not used.

        Raises:
            InternalError: The build had no kernel of that key; the message shows the keys that it had.
        """
        unused = sorted(self.schedules.keys() - self.used)
        if unused:
            built = "\n  ".join(sorted(self.seen)) or "none"
            raise InternalError(
                f"{len(unused)} tuned schedules were not used; wanted workload\n  "
                + "\n  ".join(unused)
                + f"\ngot\n  {built}"
            )


@contextmanager
def tuned_schedules(build: TunedBuild) -> Iterator[TunedBuild]:
    """Let builds inside use tuned schedules, and note what they compute.

    Args:
        build: The schedules; it also takes the notes.

    Yields:
        ``build``.
    """
    compiler: Any = importlib.import_module("tvm.relay.backend.te_compiler")
    select = compiler.select_implementation

    def select_ours(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        implementation, outputs = select(*args, **kwargs)
        return _with_schedule(implementation, build), outputs

    compiler.select_implementation = select_ours
    try:
        yield build
    finally:
        compiler.select_implementation = select


def _with_schedule(implementation: Any, build: TunedBuild) -> Any:
    """The same implementation, whose schedule is the tuned one where there is one."""

    def schedule(attrs: Any, outputs: Any, target: Any) -> Any:
        found = _read_computation(list(outputs))
        if found is not None:
            build.seen[found.workload_key] = found
            text = build.schedules.get(found.workload_key)
            if text is not None:
                build.used.add(found.workload_key)
                return found.dag.apply_steps_from_state(load_state(text))[0]
        return implementation.schedule(attrs, outputs, target)

    strategy = relay.op.OpStrategy()
    strategy.add_implementation(
        implementation.compute, schedule, name=implementation.name, plevel=implementation.plevel
    )
    return strategy.specializations[0].implementations[0]


def _read_computation(outputs: list[Any]) -> Computation | None:
    """What a kernel computes; None where AutoScheduler cannot express it, as with dynamic shapes."""
    integration = importlib.import_module("tvm.auto_scheduler.relay_integration")
    tensors, _, has_reduction = integration.traverse_to_get_io_tensors(outputs)
    if not tensors:
        return None
    try:
        dag = tvm.auto_scheduler.ComputeDAG(tensors)
    except tvm.TVMError:
        return None
    return Computation(str(dag.workload_key()), dag, tuple(tensors), bool(has_reduction))


def load_state(text: str) -> Any:
    """The schedule of a record of AutoScheduler.

    Raises:
        ValueError: It is none.
    """
    try:
        return tvm.auto_scheduler.measure_record.load_record_from_string(text)[0].state
    except tvm.TVMError as error:
        raise ValueError(f"no schedule of AutoScheduler: {text[:80]!r}") from error
