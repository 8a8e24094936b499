"""Budgets and what a search is scaled to."""

from __future__ import annotations

import pytest

from tvm_fuse.core.tuning.budget import Budget, parse_duration, scale_search


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("90s", 90), ("1h30m", 5400), ("0.5m", 30), (" 2h ", 7200)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "0s", "-1m", "5 minutes", "1m1h"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="wanted a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("budget", "trials", "seconds", "is_spent"),
    [
        (Budget(), 10**9, 1e9, False),
        (Budget(trials=10), 9, 1e9, False),
        (Budget(trials=10), 10, 0, True),
        (Budget(seconds=5), 10**9, 4.9, False),
        (Budget(seconds=5), 0, 5, True),
    ],
)
def test_when_a_budget_is_spent(budget, trials, seconds, is_spent):
    assert budget.is_spent(trials, seconds) is is_spent


def test_what_remains():
    assert Budget().remaining_s(10, 10, 5) is None
    assert Budget(seconds=60).remaining_s(10, 10, 50) == 10
    assert Budget(trials=100).remaining_s(60, 20, 10) == 20  # 40 of the 60 are from an earlier run
    assert Budget(trials=100, seconds=15).remaining_s(60, 20, 10) == 5
    assert Budget(trials=100).remaining_s(60, 0, 10) is None


def test_a_small_machine_searches_less():
    populations = [scale_search(cores).population for cores in (1, 2, 8, 64)]
    assert populations == sorted(populations)
    assert populations[0] < populations[-1]
