"""Tuned schedules in a build: each kernel that has one gets it, all others what they get without.

Relay asks an operator's strategy for a computation, and later for the schedule of the whole kernel. Inside
``tuned_schedules`` a marked kernel (``kernel_functions``) gets the computation of TVM's own strategy and its
tuned schedule; nothing changes for any other.

TVM's ``relay.backend.use_auto_scheduler`` would ask as well, but it makes the strategies choose other
computations for all kernels, so that one without a record would become slower; and its layout rewrite takes
the groups of a plan apart, and breaks grouped convolutions. Layouts are decided before chains are grouped
(``layout_pass``), once, and are not touched by tuning.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.errors import InternalError
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_target import TARGET_KEY
from tvm_fuse.relay.cuda_strategy import CUDA_KEY
from tvm_fuse.relay.kernel_functions import is_marked

__all__ = ["Computation", "TunedBuild", "TunedSchedule", "load_state", "tuned_schedules"]


@dataclass(frozen=True)
class TunedSchedule:
    """A schedule, as text of AutoScheduler, and the key of the computation that it is for."""

    workload_key: str
    text: str


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
        seen: Workload key -> computation, of every marked kernel that was built.
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

    def select_ours(
        op: Any, attrs: Any, inputs: Any, out_type: Any, target: Any, *rest: Any, **options: Any
    ) -> tuple[Any, Any]:
        if not is_marked(inputs):
            return select(op, attrs, inputs, out_type, target, *rest, **options)
        plain = _without_our_keys(target)
        implementation, outputs = select(op, attrs, inputs, out_type, plain, *rest, **options)
        return _with_schedule(implementation, build), outputs

    compiler.select_implementation = select_ours
    try:
        yield build
    finally:
        compiler.select_implementation = select


def _without_our_keys(target: Any) -> Any:
    description = dict(target.export())
    description["keys"] = [key for key in description["keys"] if str(key) not in (TARGET_KEY, CUDA_KEY)]
    return tvm.target.Target(description)


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
        entry = json.loads(text)
        task, _ = entry["i"]  # TVM takes what has another form for an empty schedule
        if not (isinstance(entry["r"], list) and json.loads(task[0])):
            raise ValueError
        return tvm.auto_scheduler.measure_record.load_record_from_string(text)[0].state
    except (ValueError, TypeError, KeyError, IndexError, tvm.TVMError) as error:
        raise ValueError(f"no schedule of AutoScheduler: {text[:80]!r}") from error
