"""Propose schedules with TVM's AutoScheduler: sketches, evolution, and an XGBoost model of their speed.

TVM's own loop also measures; here a search policy only proposes, so that measuring, logging and the choice
of the next task are ours. What is proposed depends on the seed, the candidates so far and the model, and the
model on the candidates in their order, so that a resumed job goes on as it would have.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.core.tuning.budget import SearchParameters
from tvm_fuse.core.tuning.records import steps_of
from tvm_fuse.core.tuning.task import Measurement, Task
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.tune_model import ScheduleModel
from tvm_fuse.relay.tune_tasks import TunedTask

__all__ = ["ScheduleSearch", "make_search_task", "seeded", "write_schedule"]

_FAILED_COST_S = 1e10  # as TVM's own measurements have it
_FAILED = 4  # MeasureErrorNo: any but 0 will do
_VECTOR_BYTES, _CACHE_LINE_BYTES = 64, 64  # what AutoScheduler takes for every CPU
#: Of the candidates that evolution starts from, and of those of a round, so many come from what was measured,
#: and from chance.
_FROM_MEASURED, _FROM_CHANCE = 0.2, 0.05
#: Evolution is asked for more than is needed, since it may return what was measured before.
_ASKED = 3


class ScheduleSearch:
    """Proposes schedules of tasks.

    Args:
        tasks: The tasks.
        target: Their target.
        parameters: How broadly to search.
        hardware: ``HardwareParams`` of TVM; None: cores as the target says, else those of this machine.
        model: A file with a cost model of an earlier job, used until this one has measured enough.
    """

    def __init__(
        self,
        tasks: Sequence[TunedTask],
        target: Any,
        parameters: SearchParameters,
        hardware: Any = None,
        model: Path | None = None,
    ) -> None:
        self._parameters = parameters
        self._params = {
            "evolutionary_search_population": parameters.population,
            "evolutionary_search_num_iters": parameters.iterations,
            "sample_init_min_population": parameters.sampled,
        }
        hardware = hardware or _hardware_of(target)
        self._tasks = {one.task.workload_key: make_search_task(one, target, hardware) for one in tasks}
        self._model = _make_model(parameters.per_round)
        self._pretrained = _load_model(model)

    def propose(self, task: Task, count: int, measured: Sequence[Measurement], seed: int) -> Sequence[str]:
        """At most ``count`` schedules that were not measured yet; none when there are no more."""
        if count <= 0:
            return ()
        scheduler, search = tvm.auto_scheduler, self._tasks[task.workload_key]
        with seeded(seed):
            policy = scheduler.SketchPolicy(
                search, self._pretrained or self._model, params=dict(self._params), seed=seed, verbose=0
            )
            policy.generate_sketches()
            sampled = list(policy.sample_initial_population())
            start = [*sampled, *self._best_states(task, measured)]
            evolved = list(policy.evolutionary_search(start, _ASKED * count))
        tried = {steps_of(one.schedule) for one in measured}
        by_chance = max(1, round(_FROM_CHANCE * count))
        best = self._fresh(search, evolved, tried, count - by_chance)
        tried |= set(map(steps_of, best))
        return [*best, *self._fresh(search, [*sampled, *evolved], tried, count - len(best))]

    def learn(self, task: Task, results: Sequence[Measurement]) -> None:
        """Train the model on all that was measured so far."""
        inputs = [self._input(task, one.schedule) for one in results]
        self._model.update(inputs, [_result(one) for one in results])
        if self._model.is_trained:
            self._pretrained = None

    def save(self, file: Path) -> bool:
        """Write the model for later jobs; False when it has seen too little to be of use."""
        if not self._model.is_trained:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            new = Path(scratch, file.name)
            self._model.save(str(new))
            new.replace(file)
        return True

    def _input(self, task: Task, schedule: str) -> Any:
        found = tvm.auto_scheduler.measure_record.load_record_from_string(schedule)[0]
        search = self._tasks[task.workload_key]
        return tvm.auto_scheduler.MeasureInput(search, search.compute_dag.infer_bound_from_state(found.state))

    def _best_states(self, task: Task, measured: Sequence[Measurement]) -> list[Any]:
        good = sorted((one for one in measured if one.cost_s), key=lambda one: one.cost_s or 0.0)
        most = int(_FROM_MEASURED * self._parameters.population)
        return [self._input(task, one.schedule).state for one in good[:most]]

    def _fresh(self, search: Any, states: Sequence[Any], tried: set[str], count: int) -> list[str]:
        """The first ``count`` schedules that were not tried."""
        found: dict[str, str] = {}
        for state in states:
            if len(found) >= count:
                break
            text = write_schedule(search, state)
            if steps_of(text) not in tried:
                found.setdefault(steps_of(text), text)
        return list(found.values())


def make_search_task(one: TunedTask, target: Any, hardware: Any) -> Any:
    """A task as TVM has it.

    Args:
        one: The task.
        target: Its target.
        hardware: ``HardwareParams`` of TVM; None asks the device.
    """
    scheduler, key = tvm.auto_scheduler, one.task.workload_key
    scheduler.workload_registry.register_workload_tensors(key, list(one.computation.tensors))
    return scheduler.SearchTask(
        workload_key=key,
        target=target,
        hardware_params=hardware,
        layout_rewrite_option=scheduler.LayoutRewriteOption.NO_REWRITE,
        desc=one.task.name,
    )


def _hardware_of(target: Any) -> Any:
    """What the search may assume of a CPU whose target says how many cores it has; None for any other."""
    cores = int(target.attrs.get("num-cores", 0))
    if str(target.kind.name) != "llvm" or not cores:
        return None
    return tvm.auto_scheduler.HardwareParams(cores, _VECTOR_BYTES, _CACHE_LINE_BYTES, 0, 0, 0, 0, 0)


def write_schedule(search: Any, state: Any) -> str:
    """A state of a search task as text."""
    scheduler = tvm.auto_scheduler
    result = scheduler.MeasureResult([0.0], 0, "", 0.0, 0.0)
    return str(
        scheduler.measure_record.dump_record_to_string(scheduler.MeasureInput(search, state), result)
    ).strip()


def _result(one: Measurement) -> Any:
    cost, code = (one.cost_s, 0) if one.cost_s is not None else (_FAILED_COST_S, _FAILED)
    return tvm.auto_scheduler.MeasureResult([cost], code, one.error, 0.0, 0.0)


def _make_model(warm_up: int) -> Any:
    try:
        return ScheduleModel(warm_up)
    except ImportError as error:
        raise MissingDependency(
            "tuning needs XGBoost, which is not installed", 'pip install "tvm-fuse[tune]"'
        ) from error


def _load_model(file: Path | None) -> Any:
    """A model of an earlier job; None where there is none that can be read."""
    if file is None or not file.is_file():
        return None
    model = _make_model(0)
    try:
        model.load(str(file))
    except Exception:  # XGBoost's own error, of a file of another version: start without
        return None
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let what draws from the global generators draw the same again."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
