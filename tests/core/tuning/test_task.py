"""Which task is tuned next."""

from __future__ import annotations

import pytest

from tvm_fuse.core.tuning.task import Measurement, Task, TaskState, choose_task


def make_state(digest, *, weight=1, baseline=1.0, history=(), flops=100, roofline=0.0, name="conv2d"):
    task = Task(digest, name, "", f"key {digest}", flops, weight, roofline)
    state = TaskState(task, baseline)
    for cost in history:
        state.add_round([Measurement(f"{digest} {len(state.measured)}", cost)])
    return state


def test_tasks_without_a_round_come_first_the_slowest_before_the_others():
    states = [
        make_state("a", baseline=1.0),
        make_state("b", weight=3, baseline=0.9),
        make_state("c", baseline=9.0, history=[8.0]),
    ]
    assert choose_task(states).task.digest == "b"


def test_a_task_that_hardly_counts_waits():
    assert choose_task([make_state("a", baseline=1e-4), make_state("b", history=[0.9])]).task.digest == "b"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"weight": 5}, {"weight": 1}, id="more calls"),
        pytest.param({"baseline": 5.0}, {"baseline": 1.0}, id="slower"),
        pytest.param({"roofline": 0.1}, {"roofline": 0.99}, id="more headroom"),
        pytest.param({"roofline": 9.0}, {"roofline": 0.99}, id="a roofline that does not hold"),
        pytest.param({"history": [0.9]}, {"history": [0.9] * 5}, id="fewer rounds"),
        pytest.param(
            {"flops": 10, "history": [2.0] * 4},
            {"flops": 1000, "history": [2.0] * 4},
            id="slower than one of its kind",
        ),
    ],
)
def test_the_more_promising_task_is_chosen(first, second):
    states = [make_state("a", **{"history": [2.0], **first}), make_state("b", **{"history": [2.0], **second})]
    assert choose_task(states).task.digest == "a"
    assert choose_task(states[::-1]).task.digest == "a"


def test_stopped_tasks_are_not_chosen():
    state = make_state("a")
    state.stopped = "all candidates were measured"
    assert choose_task([state]) is None


def test_the_best_of_a_task():
    state = make_state("a", baseline=2.0)
    state.add_round([Measurement("x", None, "boom"), Measurement("y", 3.0), Measurement("z", 2.5)])
    assert (state.best.schedule, state.best_s, state.faster, state.first_error) == ("z", 2.0, [], "boom")
    state.add_round([Measurement("w", 1.0), Measurement("v", 1.5)])
    assert (state.best_s, [one.schedule for one in state.faster]) == (1.0, ["w", "v"])
    assert state.history == [2.0, 1.0]
