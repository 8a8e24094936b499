"""Proposals: the same again for the same seed, never one twice, and a model that is kept."""

from __future__ import annotations

import sys

import pytest

from tests.relay.test_tuned import SEARCH, found, fused  # noqa: F401  (fixtures)
from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, tvm
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.core.tuning.task import Measurement

search = Lazy("tvm_fuse.relay.tune_search")
targets = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay


@pytest.fixture
def make(fused, found):  # noqa: F811
    return lambda **options: search.ScheduleSearch(found, fused[0], SEARCH, **options)


def results_of(schedules):
    """Times that are not alike."""
    return [Measurement(text, 1e-5 * (index + 1)) for index, text in enumerate(schedules)]


def test_a_seed_gives_the_same_proposals(make, found):  # noqa: F811
    task = found[0].task
    first, again, other = (make().propose(task, 4, (), seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) == 4


def test_what_was_measured_is_not_proposed_again(make, found):  # noqa: F811
    task, one = found[0].task, make()
    measured = []
    for seed in range(1, 4):
        proposed = one.propose(task, 4, measured, seed)
        assert not {result.schedule for result in measured} & set(proposed)
        results = results_of(proposed)
        results[0] = Measurement(proposed[0], None, "boom")
        one.learn(task, results)
        measured += results


def test_nothing_is_proposed_when_nothing_is_asked_for(make, found):  # noqa: F811
    assert list(make().propose(found[0].task, 0, (), 1)) == []


def test_a_model_is_kept_for_the_next_job_once_it_has_learned(make, found, tmp_path):  # noqa: F811
    task, one, file = found[0].task, make(), tmp_path / "device" / "model.ubj"
    assert not one.save(file)
    measured = []
    for seed in (1, 2):
        results = results_of(one.propose(task, 4, measured, seed))
        one.learn(task, results)
        measured += results
    assert one.save(file)
    assert sorted(path.name for path in file.parent.iterdir()) == ["model.ubj"]
    later = make(model=file)
    proposed = later.propose(task, 4, (), 5)
    assert len(proposed) == 4
    assert list(make(model=file).propose(task, 4, (), 5)) == list(proposed)
    file.write_bytes(b"no model")
    assert list(make(model=file).propose(task, 4, (), 5)) == list(make().propose(task, 4, (), 5))


def test_without_xgboost_the_error_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    model = tvm.auto_scheduler.cost_model.xgb_model
    monkeypatch.setattr(model, "xgb", None)
    with pytest.raises(MissingDependency, match="tuning needs XGBoost") as caught:
        make()
    assert 'pip install "tvm-fuse[tune]"' in caught.value.hint


@pytest.mark.parametrize(
    ("target", "cores"), [("llvm -mcpu=atom -num-cores=7", 7), ("llvm -mcpu=atom", None), (CUDA, None)]
)
def test_the_search_knows_the_cores_of_a_board(target, cores):
    hardware = search._hardware_of(targets.resolve_target(target))
    assert (hardware.num_cores if hardware else None) == cores
