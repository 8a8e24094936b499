"""Results of a package become records and constants, without TVM; the times here are made up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.candidates import make_package, make_task
from tvm_fuse import cli
from tvm_fuse.core.tuning.constants import constants_file, load_constants
from tvm_fuse.core.tuning.fit import LEAST_SAMPLES
from tvm_fuse.core.tuning.records import load_records
from tvm_fuse.core.tuning.score import ScoreConstants, find_card, predict_s
from tvm_fuse.cuda.candidate_files import package_digest
from tvm_fuse.cuda.candidate_results import FAILED, NOT_REACHED, TIMED, WRONG, CandidateResult, Results
from tvm_fuse.cuda.candidate_results import save_results as save
from tvm_fuse.importing import import_results, render_import

TRUE = ScoreConstants(scale=2.0, launch_s=5e-6)


def results_of(folder, package, outcome_of=lambda name: TIMED, factor=1.0):
    """Times by the true constants, each candidate in turn with its baseline."""

    def time_of(one):
        return factor * predict_s(one.profiles, find_card("sm_80"), TRUE)

    rows = []
    for task in package.tasks:
        for one in task.all:
            outcome = outcome_of(one.id)
            if outcome != TIMED:
                rows.append(CandidateResult(one.id, outcome, error="" if outcome == NOT_REACHED else "bad"))
                continue
            baseline_s = () if one is task.baseline else (time_of(task.baseline),) * 3
            rows.append(CandidateResult(one.id, TIMED, (time_of(one),) * 3, baseline_s, 1e-7, 0.1))
    return Results(package_digest(folder), "A100", "sm_80", "13.0", False, "2026-01-02", 9.0, tuple(rows))


def slower_baseline(task):
    """A task whose candidates are faster than the kernel of the build."""
    profiles = tuple(replace(one, blocks=20000) for one in task.baseline.profiles)
    return replace(task, baseline=replace(task.baseline, profiles=profiles))


@pytest.fixture
def package(tmp_path):
    tasks = [slower_baseline(make_task(number, ["right"] * 8)) for number in range(3)]
    for index, task in enumerate(tasks):
        spread = [
            replace(one, profiles=(replace(one.profiles[0], blocks=300 * (place + index + 1)),))
            for place, one in enumerate(task.candidates)
        ]
        tasks[index] = replace(task, candidates=tuple(spread))
    return tmp_path / "package", make_package(tmp_path / "package", *tasks)


def run(folder, results, tmp_path):
    save(tmp_path / "results.json", results)
    return import_results(folder, tmp_path / "results.json", tmp_path / "tuned")


def test_records_and_constants(package, tmp_path):
    folder, made = package
    found = run(folder, results_of(folder, made), tmp_path)
    assert [row.is_accepted for row in found.rows] == [True] * 3
    records = load_records(tmp_path / "tuned", "cuda-sm_80").records
    assert set(records) == {task.digest for task in made.tasks}
    for row in found.rows:
        assert records[row.digest].speedup == pytest.approx(row.speedup)
        assert records[row.digest].measured
        assert records[row.digest].provenance["card"] == "A100"
    assert found.fit.samples == 27 >= LEAST_SAMPLES
    assert found.fit.after.error < found.fit.before.error
    fitted = load_constants(tmp_path / "tuned", "cuda-sm_80")
    assert fitted == found.fit.constants
    assert fitted.scale == pytest.approx(2.0, rel=0.2)
    assert str(constants_file(tmp_path / "tuned", "cuda-sm_80")) in found.written
    text = render_import(found)
    assert "the score, fitted to 27 times: rank correlation " in text
    assert "wrote 4 files" in text


def test_what_failed_is_counted_and_shown(package, tmp_path):
    folder, made = package
    outcomes = {"t00c0": WRONG, "t00c1": FAILED, "t01b": FAILED}
    outcomes.update((f"t02c{index}", NOT_REACHED) for index in range(8))
    found = run(folder, results_of(folder, made, lambda name: outcomes.get(name, TIMED)), tmp_path)
    first, second, third = found.rows
    assert first.outcomes == {WRONG: 1, FAILED: 1, TIMED: 6}
    assert first.first_error == "t00c0: wrong answer: bad"
    assert first.is_accepted
    assert (third.is_accepted, third.best_s, third.outcomes) == (False, None, {NOT_REACHED: 8})
    assert second.baseline_s is None
    assert found.fit is None  # 16 times are too few
    assert "keeps its constants: fewer than 24" in render_import(found)


def test_without_a_baseline_nothing_is_accepted(package, tmp_path):
    folder, made = package
    results = results_of(folder, made)
    alone = tuple(replace(one, baseline_s=()) for one in results.results)
    found = run(folder, replace(results, results=alone), tmp_path)
    assert [row.is_accepted for row in found.rows] == [False] * 3
    assert load_records(tmp_path / "tuned", "cuda-sm_80").records == {}


def test_two_percent_are_noise(package, tmp_path):
    folder, made = package
    results = results_of(folder, made)
    near = tuple(
        replace(one, times_s=tuple(0.985 * time for time in one.baseline_s)) if one.baseline_s else one
        for one in results.results
    )
    found = run(folder, replace(results, results=near), tmp_path)
    assert [row.is_accepted for row in found.rows] == [False] * 3
    assert all(math.isclose(row.speedup, 1 / 0.985) for row in found.rows)


def test_the_command(package, tmp_path, monkeypatch, capsys):
    folder, made = package
    save(tmp_path / "results.json", results_of(folder, made))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", "--import-results", "package", "results.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert '"tvm-fuse/import-report"' in out
    assert "net on A100 (cuda-sm_80)" in err
    assert len(load_records(tmp_path / "tuned", "cuda-sm_80").records) == 3


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "wanted a MODEL to tune"),
        (("net.onnx", "--import-results", "a", "b"), 2, "goes with neither a model nor"),
        (("--import-results", "a", "b", "--draft"), 2, "goes with neither a model nor"),
        (("--import-results", "a", "b", "--resume"), 2, "--resume is for a search that measures"),
        (("net.onnx", "--draft", "--log", "x"), 2, "--log is for a search that measures"),
        (("net.onnx", "--export-candidates", "x", "--rpc", "a:1"), 2, "--rpc is for a search that measures"),
        (("net.onnx", "--card", "a100"), 2, "--card and --arch are for"),
        (("--import-results", "a", "b"), 2, "no candidates.json in it"),
        (("--import-results", "package", "b"), 2, "b: no such file"),
    ],
)
def test_what_is_refused(package, tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *options]) == code
    assert message in capsys.readouterr().err
