"""Timing in turn without a machine: a clock that tests wind, and times that are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from benchmarks.interleave import (
    REST_S,
    Clock,
    Contestant,
    describe_saving,
    describe_speedup,
    describe_times,
    read_others_s,
    run_rounds,
    take_turn,
)


@dataclass
class Machine:
    """Runs and rests let its time pass, and others be busy for a share of it in some rounds."""

    time: float = 0.0
    others: float = 0.0
    share: float = 0.0
    ran: list = field(default_factory=list)

    @property
    def clock(self):
        return Clock(now=lambda: self.time, sleep=self.spend, others=lambda: self.others, cores=2)

    def spend(self, seconds):
        self.time += seconds
        self.others += 2 * self.share * seconds

    def contestant(self, name, seconds):
        def run():
            self.ran.append(name)
            self.spend(seconds)

        return Contestant(name, run)


@pytest.mark.parametrize(
    ("seconds", "warm", "timed"),
    [(0.001, 2, 4), (0.06, 2, 4), (0.08, 2, 3), (0.15, 1, 2), (0.3, 1, 1)],
    ids=["fast", "just fast", "slower", "slow", "very slow"],
)
def test_a_turn_rests_warms_up_and_times(seconds, warm, timed):
    machine = Machine()
    times = take_turn(machine.contestant("a", seconds).run, machine.clock)
    assert times == pytest.approx([seconds] * timed)
    assert len(machine.ran) == warm + timed
    assert machine.time == pytest.approx(REST_S + seconds * (warm + timed))


def test_each_round_begins_with_another_one():
    machine = Machine()
    contestants = [machine.contestant(name, 0.3) for name in "abc"]
    timed = run_rounds(contestants, budget_s=0, least=3, most=3, clock=machine.clock)
    assert machine.ran[::2] == [*"abc", *"bca", *"cab"]
    assert {name: len(turns) for name, turns in timed.times.items()} == dict.fromkeys("abc", 3)


@pytest.mark.parametrize(("budget_s", "rounds"), [(0, 5), (6.2, 10), (1000, 60)])
def test_rounds_are_made_until_the_time_is_used_up(budget_s, rounds):
    machine = Machine()
    timed = run_rounds([machine.contestant("a", 0.3)], budget_s, clock=machine.clock)
    assert (len(timed.times["a"]), timed.left_out, timed.others_percent) == (rounds, 0, 0.0)


def busy_machine(shares):
    """A machine in whose n-th round others take the n-th share, again and again; a round is one turn."""
    machine = Machine()

    def run():
        machine.share = shares[len(machine.ran) // 2 % len(shares)]
        machine.ran.append("a")
        machine.spend(0.3)

    return machine, Contestant("a", run)


def test_rounds_with_busy_others_do_not_count():
    machine, contestant = busy_machine([0.01, 0.5])
    timed = run_rounds([contestant], budget_s=2.0, clock=machine.clock)
    assert (len(timed.times["a"]), timed.left_out) == (5, 4)
    assert timed.others_percent < 5


def test_where_none_is_quiet_the_quietest_count_and_say_so():
    machine, contestant = busy_machine([0.9, 0.2, 0.5])
    timed = run_rounds([contestant], budget_s=2.0, clock=machine.clock)
    assert machine.time > 3 * 2.0
    assert len(timed.times["a"]) >= 5
    assert timed.left_out > 0
    assert 20 <= timed.others_percent < 90


def test_others_do_not_count_ourselves():
    before = read_others_s()
    assert sum(index * index for index in range(300_000)) > 0
    assert read_others_s() >= before - 0.05  # the kernel counts in ticks


TIMES = {
    "ours": [[0.010, 0.012, 0.014], [0.010, 0.010, 0.010], [0.020, 0.020, 0.020]],
    "theirs": [[0.018, 0.090, 0.017], [0.011, 0.010, 0.012], [0.030, 0.030, 0.030]],
}


def test_milliseconds_are_of_all_runs():
    described = describe_times(TIMES["ours"])
    assert described == {"median": 12.0, "quartile_1": 10.0, "quartile_3": 20.0, "least": 10.0}


def test_a_speedup_is_that_of_each_rounds_medians():
    """18/12, 11/10 and 30/20: the run of 90 ms does not count."""
    described = describe_speedup(TIMES, "theirs", "ours")
    assert described == {"median": 1.5, "quartile_1": 1.3, "quartile_3": 1.5}


def test_a_saving_is_a_percentage_of_what_was():
    described = describe_saving(TIMES, "theirs", "ours")
    assert described == {"median": 33.3333, "quartile_1": 21.2121, "quartile_3": 33.3333}
    assert describe_saving(TIMES, "ours", "theirs")["median"] == -50.0
