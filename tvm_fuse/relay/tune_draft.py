"""Draft CUDA schedules without a GPU: AutoScheduler's sketches and evolution, guided by the analytic score.

Of random schedules most cannot be launched: they want more shared memory or threads than a block may have.
That is seen from their loops, before they are lowered. The others are lowered without unrolling, profiled and
scored; about a quarter of a second each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.gpu import WARP_THREADS
from tvm_fuse.core.tuning.score import Card, KernelProfile, ScoreConstants, predict_s
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.tune_profile import profile_functions, small_lowering
from tvm_fuse.relay.tune_search import make_search_task, seeded, write_schedule
from tvm_fuse.relay.tune_tasks import TunedTask
from tvm_fuse.relay.tuned import load_state

__all__ = [
    "Draft",
    "DraftParameters",
    "Scorer",
    "draft_schedules",
    "hardware_params",
    "profile_kernel",
    "profile_schedule",
    "written_for",
]

#: TVM's kernels declare their shared memory, and a block may declare so much on every architecture.
_MOST_SMEM_BYTES, _MOST_THREADS = 48 * 1024, 1024
_VECTOR_BYTES, _LINE_BYTES, _MOST_VTHREADS, _ANY = 16, 64, 8, 2**31 - 1
_WORD_BYTES = 4

#: Annotations of AutoScheduler's iterators: those that are threads, and vectors of at most so many elements.
_THREADS, _VECTOR, _MOST_LANES = (6, 8, 10), 2, 4
_INVALID = float("-inf")
_HOST = "llvm"  # whatever it is, it changes nothing
_UNIT_S = 1e-3  # scores are positive: executions in a millisecond


@dataclass(frozen=True)
class DraftParameters:
    """How broadly to draft.

    Args:
        population: Random schedules of a round, and those that evolution keeps; most cannot be launched.
        iterations: Generations.
        sampled: Launchable schedules to start from, at least.
    """

    population: int = 96
    iterations: int = 2
    sampled: int = 16


@dataclass(frozen=True)
class Scorer:
    """A card, and what the score assumes of it."""

    card: Card
    constants: ScoreConstants = field(default_factory=ScoreConstants)

    def __call__(self, profiles: Sequence[KernelProfile]) -> float:
        """Seconds of an operator; inf where it cannot be launched, or nothing is known of it."""
        return predict_s(profiles, self.card, self.constants) if profiles else math.inf


@dataclass(frozen=True)
class Draft:
    """A schedule that was scored.

    Args:
        schedule: Text of AutoScheduler.
        profiles: What its kernels do.
    """

    schedule: str
    profiles: tuple[KernelProfile, ...]


def hardware_params(card: Card) -> Any:
    """What AutoScheduler may assume of a card; nothing is asked of a device."""
    return tvm.auto_scheduler.HardwareParams(
        card.device.sms,
        _VECTOR_BYTES,
        _LINE_BYTES,
        _MOST_SMEM_BYTES,
        _ANY,
        _MOST_THREADS,
        _MOST_VTHREADS,
        WARP_THREADS,
    )


def draft_schedules(
    one: TunedTask, target: Any, scorers: Sequence[Scorer], parameters: DraftParameters, seed: int
) -> tuple[Draft, ...]:
    """Draft schedules of a kernel.

    Args:
        one: The task.
        target: A target for CUDA; its architecture changes nothing.
        scorers: Cards; the search is guided by the mean of their scores.
        parameters: How broadly to draft.
        seed: Of the search.

    Returns:
        All that can be launched, in the order they were found.
    """
    search = make_search_task(one, target, hardware_params(scorers[0].card))
    params = {
        "evolutionary_search_population": parameters.population,
        "evolutionary_search_num_iters": parameters.iterations,
        "sample_init_min_population": parameters.sampled,
    }
    model = _make_model(search, scorers)
    with seeded(seed):
        policy = tvm.auto_scheduler.SketchPolicy(search, model, params=params, seed=seed, verbose=0)
        policy.generate_sketches()
        start = list(policy.sample_initial_population())
        policy.evolutionary_search(start, parameters.population)
    return tuple(model.found.values())


def written_for(schedule: str, target: Any, card: Card) -> str:
    """A schedule as it would be written on another architecture: its steps are the same."""
    entry = json.loads(schedule)
    device = tvm.target.Target({key: value for key, value in target.export().items() if key != "host"})
    sizes = (card.device.sms, _VECTOR_BYTES, _LINE_BYTES, _MOST_SMEM_BYTES, _ANY, _MOST_THREADS)
    entry["i"][0][1:4] = [str(device), [*sizes, _MOST_VTHREADS, WARP_THREADS], _HOST]
    return json.dumps(entry)


def profile_kernel(function: Any, target: Any) -> tuple[KernelProfile, ...]:
    """What the kernels of a primitive function do that the build makes without a record.

    Args:
        function: The function, not marked.
        target: Its target.

    Returns:
        One profile a launch; none where TVM cannot lower it by itself.
    """
    compiler = tvm.relay.backend.te_compiler.get()
    compiler.clear()  # what it has built before it would not lower again
    try:
        with target, small_lowering():
            return profile_functions(compiler.lower(function, target).funcs)
    except RuntimeError:
        return ()
    finally:
        compiler.clear()


def _make_model(search: Any, scorers: Sequence[Scorer]) -> Any:
    """A cost model that scores states, and keeps what it has scored."""
    base: Any = tvm.auto_scheduler.cost_model.cost_model.PythonBasedModel

    class ScoreModel(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, Draft] = {}

        def update(self, inputs: Any, results: Any) -> None:
            """There is nothing to learn."""

        def predict(self, task: Any, states: Any) -> list[float]:
            return [self._value(state) for state in states]

        def _value(self, state: Any) -> float:
            bound = search.compute_dag.infer_bound_from_state(state)
            if not _is_launchable(bound):
                return _INVALID
            text = write_schedule(search, bound)
            if text not in self.found:
                self.found[text] = Draft(text, _profile(search.compute_dag, text))
            seconds = [scorer(self.found[text].profiles) for scorer in scorers]
            if not all(map(math.isfinite, seconds)):
                del self.found[text]
                return _INVALID
            return _UNIT_S / math.exp(sum(map(math.log, seconds)) / len(seconds))

    return ScoreModel()


def profile_schedule(one: TunedTask, schedule: str) -> tuple[KernelProfile, ...]:
    """What the kernels of a task do with a schedule, which is text of AutoScheduler."""
    return _profile(one.computation.dag, schedule)


def _profile(dag: Any, text: str) -> tuple[KernelProfile, ...]:
    schedule, tensors = dag.apply_steps_from_state(load_state(text))
    with small_lowering():
        return profile_functions(tvm.lower(schedule, tensors, name="main"))


def _is_launchable(state: Any) -> bool:
    """Whether no block has too many threads or too much shared memory, and no vector is too long."""
    smem_bytes = 0
    for stage in state.stages:
        threads, size = 1, 1
        for iterator in stage.iters:
            extent = int(iterator.range.extent) if iterator.range is not None else 1
            size *= extent
            threads *= extent if int(iterator.annotation) in _THREADS else 1
            if int(iterator.annotation) == _VECTOR and extent > _MOST_LANES:
                return False
        if threads > _MOST_THREADS:
            return False
        if str(stage.op.name).endswith(".shared"):
            smem_bytes += size * _WORD_BYTES
    return smem_bytes <= _MOST_SMEM_BYTES
