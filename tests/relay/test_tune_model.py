"""The model of speed: what TVM lists in the order of addresses makes no difference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.relay.test_tuned import SEARCH, found, fused  # noqa: F401  (fixtures)
from tests.support.lazy import Lazy
from tests.support.relay_graphs import tvm
from tvm_fuse.core.tuning.task import Measurement

model = Lazy("tvm_fuse.relay.tune_model")
search = Lazy("tvm_fuse.relay.tune_search")

pytestmark = pytest.mark.relay

BUFFERS, FIELDS, FIRST, LINES, BYTES = 5, 18, 57, 5, 3


def scramble(features):
    """A program's features as TVM might list them at other addresses: stores and ties the other way round."""
    rows = np.array(features, dtype="float64")[::-1]
    buffers = rows[:, FIRST : FIRST + BUFFERS * FIELDS].reshape(len(rows), BUFFERS, FIELDS)[:, ::-1]
    order = np.lexsort([-buffers[:, :, BYTES], -buffers[:, :, LINES]], axis=-1)
    ordered = np.take_along_axis(buffers, order[:, :, None], axis=1)
    rows[:, FIRST : FIRST + BUFFERS * FIELDS] = ordered.reshape(len(rows), -1)
    return rows


@pytest.fixture
def program():
    """Three stores of a program; in the last one two of the buffers are as large as each other."""
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 9, (3, 164)).astype("float32")
    buffers = rows[:, FIRST : FIRST + BUFFERS * FIELDS].reshape(3, BUFFERS, FIELDS)
    buffers[:, :, LINES] = [9, 7, 5, 3, 1]
    buffers[2, 2, [BYTES, LINES]] = buffers[2, 1, [BYTES, LINES]]
    rows[:, FIRST : FIRST + BUFFERS * FIELDS] = buffers.reshape(3, -1)
    return rows


def test_stores_have_one_order(program):
    wanted = model.put_in_order(program)
    for order in ([2, 1, 0], [1, 2, 0]):
        np.testing.assert_array_equal(model.put_in_order(program[order]), wanted)
    assert sorted(map(tuple, wanted[:, :FIRST])) == sorted(map(tuple, program[:, :FIRST]))


def test_buffers_that_tie_have_one_order_and_others_keep_tvms(program):
    other = program.copy()
    first, second = (slice(FIRST + i * FIELDS, FIRST + (i + 1) * FIELDS) for i in (1, 2))
    other[2, first], other[2, second] = program[2, second], program[2, first]
    assert not np.array_equal(other, program)
    np.testing.assert_array_equal(model.put_in_order(other), model.put_in_order(program))
    kept = model.put_in_order(program[:2])
    np.testing.assert_array_equal(kept[np.lexsort(kept.T)], program[:2][np.lexsort(program[:2].T)])


def test_what_is_put_in_order_is_not_changed(program):
    before = program.copy()
    model.put_in_order(program)
    np.testing.assert_array_equal(program, before)


def test_the_order_of_addresses_changes_no_score(fused, found, monkeypatch):  # noqa: F811
    task = found[0].task
    one = search.ScheduleSearch(found, fused[0], SEARCH)
    results = [
        Measurement(text, 1e-5 * (index + 1))
        for seed in (1, 2)
        for index, text in enumerate(one.propose(task, 4, (), seed))
    ]
    inputs = [one._input(task, result.schedule) for result in results]
    times = list(map(search._result, results))
    states = [given.state for given in inputs]

    def scores():
        """Of a new model, trained on all."""
        made = model.ScheduleModel(SEARCH.per_round)
        made.update(inputs[:4], times[:4])
        made.update(inputs[4:], times[4:])
        return made.predict(inputs[0].task, states)

    wanted = scores()
    assert len(set(wanted)) > 1
    features = tvm.auto_scheduler.feature
    pairs, of_states = (
        features.get_per_store_features_from_measure_pairs,
        features.get_per_store_features_from_states,
    )
    monkeypatch.setattr(
        features,
        "get_per_store_features_from_measure_pairs",
        lambda *given, **options: ([*map(scramble, pairs(*given, **options)[0])], *[None] * 2),
    )
    monkeypatch.setattr(
        features,
        "get_per_store_features_from_states",
        lambda *given: [*map(scramble, of_states(*given))],
    )
    np.testing.assert_array_equal(scores(), wanted)


def test_a_program_that_cannot_be_lowered_scores_nothing(monkeypatch):
    made = model.ScheduleModel(4)
    nothing = np.zeros((1, 164))
    monkeypatch.setattr(
        tvm.auto_scheduler.feature, "get_per_store_features_from_states", lambda *_: [nothing, nothing + 1]
    )
    first, second = made.predict(None, [None, None])
    assert first == -np.inf
    assert 0 <= second <= 1
