"""The GPU benchmark without a GPU: order of jobs, time budget, timing in turn, and the archive."""

from __future__ import annotations

import io
import lzma
import tarfile

import numpy as np
import pytest

from benchmarks.gpu.run import choose_jobs
from benchmarks.gpu.schedule import Outcome, run_jobs
from benchmarks.gpu.suite import Entry, pack, plan_jobs, unpack
from benchmarks.gpu.timing import Contender, describe, run_rounds


def entries(batches=(16, 1)):
    models = [
        Entry(model, batch, form, f"{model}-{batch}/{form}")
        for batch in batches
        for model in ("a", "b")
        for form in ("fused", "unfused", "topi", "torch")
    ]
    return [
        *models,
        *(Entry("conv", 1, form, f"conv/{form}", True) for form in ("fused", "by_hand", "torch")),
    ]


# --- order -------------------------------------------------------------------------------------------


def test_what_is_worth_most_comes_first():
    names = [job.name for job in plan_jobs(entries())]
    assert names[:12] == [
        f"check {model} batch {batch} {form}"
        for batch in (1, 16)
        for form in ("fused", "unfused", "topi")
        for model in "ab"
    ]
    first = [name for name in names[12:] if name.endswith("batch 1")]
    assert names[12:] == [*first, *(name for name in names[12:] if name.endswith("batch 16"))]
    whats = [name.rsplit(" ", 3)[0] for name in first]
    assert whats == [
        *["forms of"] * 2, *["PyTorch on"] * 2, *["compiled PyTorch on"] * 2, "layer", *["kernels of"] * 2,
    ]  # fmt: skip


def test_the_fused_form_is_what_others_are_divided_by():
    comparisons = [job for job in plan_jobs(entries()) if job.kind == "compare"]
    assert {job.entries[0].form for job in comparisons} == {"fused"}
    forms = {job.name: [entry.form for entry in job.entries] for job in comparisons}
    assert forms["forms of a batch 16"] == ["fused", "unfused", "topi"]
    assert forms["layer conv batch 1"] == ["fused", "by_hand", "torch"]
    assert [job.compiles for job in comparisons if "PyTorch on b" in job.name] == [False, True, False, True]


def test_jobs_that_are_not_run_have_a_reason():
    jobs = plan_jobs(entries([1]))
    chosen, left_out = choose_jobs(jobs, "*", has_torch=False)
    assert not any(entry.form == "torch" for job in chosen for entry in job.entries)
    assert {why for _, why in left_out} == {"PyTorch is not installed"}
    assert "PyTorch on a batch 1" in {job.name for job, _ in left_out}
    assert "layer conv batch 1" in {job.name for job in chosen}
    assert choose_jobs(jobs, "*", has_torch=True) == (list(jobs), [])
    chosen, left_out = choose_jobs(jobs, "check *", has_torch=True)
    assert {job.kind for job in chosen} == {"check"}
    assert {why for _, why in left_out} == {"--only check *"}


# --- the budget --------------------------------------------------------------------------------------


class Stand:
    """A clock that only jobs move, and the processes that would run them."""

    def __init__(self, seconds=10.0, outcomes=None):
        self.now, self.seconds, self.outcomes = 100.0, seconds, outcomes or {}
        self.ran, self.limits, self.saved = [], [], []

    def __call__(self, job, limit_s):
        self.ran.append(job)
        self.limits.append(limit_s)
        took = min(self.seconds, limit_s)
        self.now += took
        if took < self.seconds:
            return Outcome({"error": "stopped"}, took, timed_out=True)
        return Outcome(self.outcomes.get(job.name, {"passed": True}), took)

    def run(self, jobs, budget_s):
        return run_jobs(
            jobs, self, budget_s, lambda record: self.saved.append(len(record.jobs)), lambda: self.now
        )


def test_all_that_fits():
    stand, jobs = Stand(), plan_jobs(entries())
    record = stand.run(jobs, 1e6)
    assert [job["name"] for job in record.jobs] == [job.name for job in jobs]
    assert (record.failures, record.not_measured) == ([], [])
    assert stand.saved == list(range(1, len(jobs) + 1))
    assert set(stand.limits) == {60.0, 90.0, 180.0}


def test_a_spent_budget_is_no_failure():
    stand, jobs = Stand(), plan_jobs(entries())
    record = stand.run(jobs, 37.0)
    assert [job["name"] for job in record.jobs] == [job.name for job in jobs[:3]]
    assert stand.limits[-1] == 7.0
    assert record.not_measured[0] == {
        "name": jobs[3].name, "why": "stopped after 7 s: the time budget was spent",
    }  # fmt: skip
    assert {row["why"] for row in record.not_measured[1:]} == {"the time budget was spent"}
    assert len(record.jobs) + len(record.not_measured) == len(jobs)
    assert record.failures == []


def test_a_job_beyond_its_own_limit_failed():
    stand = Stand(seconds=61.0)
    record = stand.run(plan_jobs(entries())[:2], 1e6)
    assert [job["status"] for job in record.jobs] == ["error", "error"]
    assert len(record.failures) == 2


@pytest.mark.parametrize("result", [{"passed": False}, {"error": "it crashed"}], ids=["wrong", "crashed"])
def test_what_failed_its_check_is_not_measured_and_the_rest_goes_on(result):
    jobs = plan_jobs(entries([1]))
    stand = Stand(outcomes={"check a batch 1 fused": result, "check b batch 1 topi": result})
    record = stand.run(jobs, 1e6)
    assert record.failures == ["check a batch 1 fused", "check b batch 1 topi"]
    skipped = {row["name"]: row["why"] for row in record.not_measured}
    assert skipped == {
        "forms of a batch 1": "a-1/fused failed its check",
        "PyTorch on a batch 1": "a-1/fused failed its check",
        "compiled PyTorch on a batch 1": "a-1/fused failed its check",
        "kernels of a batch 1": "a-1/fused failed its check",
        "topi of 'forms of b batch 1'": "b-1/topi failed its check",
    }
    (forms,) = (job for job in stand.ran if job.name == "forms of b batch 1")
    assert [entry.form for entry in forms.entries] == ["fused", "unfused"]


def test_news_are_told_once():
    record = Stand().run(plan_jobs(entries())[:1], 1e6)
    assert record.take_news() == [("check a batch 1 fused", "passed")]
    assert record.take_news() == []


# --- timing ------------------------------------------------------------------------------------------


def contenders(order, **seconds):
    def make(name):
        return Contender(name, "graph", lambda: order.append(name) or seconds[name], 3)

    return [make(name) for name in seconds]


def test_rounds_take_turns():
    order = []
    made = contenders(order, fused=2e-3, other=3e-3)
    times = run_rounds(made, 7, 100.0, clock=lambda: 0.0)
    assert order == ["fused", "other"] * 7
    base, other = describe(made, times, "fused")
    assert base["us"] == {"median": 2000.0, "quartile_1": 2000.0, "quartile_3": 2000.0}
    assert other["ratio"]["median"] == 1.5
    assert (other["rounds"], other["calls"]) == (7, 3)


def test_rounds_end_with_their_time_but_not_before_five():
    clock = iter(range(100))
    assert len(run_rounds(contenders([], a=1.0), 50, 0.0, clock=lambda: next(clock))[0]) == 5
    clock = iter(range(100))
    assert len(run_rounds(contenders([], a=1.0), 50, 3.5, clock=lambda: next(clock))[0]) == 8


def test_ratios_are_within_a_mode():
    made = [Contender("fused", "launches", lambda: 1.0, 1), Contender("torch", "graph", lambda: 1.0, 1)]
    fused, torch = describe(made, [[1.0], [2.0]], "fused")
    assert "ratio" in fused
    assert "ratio" not in torch


# --- the archive -------------------------------------------------------------------------------------


def test_round_trip(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "data").write_bytes(b"data" * 1000)
    size = pack(tmp_path / "in", tmp_path / "s.tar.xz", {"image": 32}, entries())
    assert size == (tmp_path / "s.tar.xz").stat().st_size < 4000
    about, got = unpack(tmp_path / "s.tar.xz", tmp_path / "out")
    assert about == {"image": 32}
    assert list(got) == entries()
    assert (tmp_path / "out" / "a" / "data").read_bytes() == b"data" * 1000


def test_the_same_input_is_stored_once(tmp_path):
    noise = np.random.default_rng(0).bytes(300_000)
    for name in "abc":
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "golden.npz").write_bytes(name.encode() + noise)
    assert pack(tmp_path / "in", tmp_path / "s.tar.xz", {}, []) < 320_000


@pytest.mark.parametrize(
    ("name", "kind"), [("../out", tarfile.REGTYPE), ("/abs", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)]
)
def test_archives_that_pack_does_not_write(tmp_path, name, kind):
    with lzma.open(tmp_path / "s.tar.xz", "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member, io.BytesIO(b""))
    with pytest.raises(ValueError, match="is no plain file inside the suite"):
        unpack(tmp_path / "s.tar.xz", tmp_path / "out")
