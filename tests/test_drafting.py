"""Drafts of a small layer: scored, compiled, packed, run on the emulator, and taken in as records."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import hash_files
from tvm_fuse.core.reason import Code
from tvm_fuse.core.tuning.constants import load_constants, save_constants
from tvm_fuse.core.tuning.records import load_records, save_record
from tvm_fuse.core.tuning.score import ScoreConstants
from tvm_fuse.cuda.candidate_files import load_package
from tvm_fuse.cuda.candidate_results import TIMED, WRONG, save_results
from tvm_fuse.importing import import_results, render_import
from tvm_fuse.runner.candidate_job import JobOptions, run_job
from tvm_fuse.runner.process import find_device

drafting = Lazy("tvm_fuse.drafting")
drafts = Lazy("tvm_fuse.relay.tune_draft")
load = Lazy("tvm_fuse.relay.load")
pipeline = Lazy("tvm_fuse.pipeline")
render = Lazy("tvm_fuse.drafting_report")
report = Lazy("tvm_fuse.report")
verify = Lazy("tvm_fuse.relay.tune_verify")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

TARGET = "cuda -arch=sm_80"


def dense_module():
    """A matrix product, its bias and its activation."""
    net = Net()
    product = relay.nn.dense(net.input("x", (16, 64)), net.const(48, 64))
    return net.module(relay.nn.relu(relay.nn.bias_add(product, net.const(48))))


def draft(module, target=TARGET, **options):
    options = {"parameters": drafts.DraftParameters(16, 1, 4), "is_measured": False, **options}
    return drafting.draft_model(load.model_from_module(module, {}), target, drafting.DraftOptions(**options))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A package with two candidates, and the report of the export."""
    folder = tmp_path_factory.mktemp("drafting")
    found = draft(dense_module(), export=folder / "package", per_task=2, into=folder / "none")
    return folder / "package", found


@pytest.fixture(scope="module")
def measured(exported, tmp_path_factory):
    """Results of the emulator, as if they were of a GPU on which the first candidate is twice as fast."""
    file = tmp_path_factory.mktemp("results") / "results.json"
    _, results = run_job(exported[0], JobOptions(file, device="emulator", repeats=2, silence_s=300.0))
    timed = [
        replace(
            one,
            times_s=(1e-5 if one.id == "t00c0" else 2e-5,) * 2,
            baseline_s=() if one.id == "t00b" else (2e-5, 2e-5),
        )
        for one in results.results
    ]
    return results, replace(results, is_emulated=False, card="A100", results=tuple(timed))


def imported(folder, results, tmp_path, into="tuned"):
    save_results(tmp_path / "results.json", results)
    return import_results(folder, tmp_path / "results.json", tmp_path / into)


def test_a_package_says_what_it_has(exported):
    folder, found = exported
    (row,) = found.rows
    assert (row.kept, row.has_record, found.written) == (2, False, ())
    assert row.drafted >= row.kept
    assert 0 < row.baseline_s < 1
    package = load_package(folder)
    (task,) = package.tasks
    assert (package.arch, package.card, package.device) == ("sm_80", "a100", "cuda-sm_80")
    assert (len(task.candidates), task.baseline.schedule) == (2, "")
    assert task.name == "dense_bias_relu"
    assert all(one.profiles[0].spill_bytes == 0 for one in task.candidates)
    assert task.candidates[0].predicted_s <= task.candidates[1].predicted_s
    assert "nothing was measured" in render.render_drafts(found)
    json.loads(report.to_json(found))


def test_every_candidate_is_right_on_the_emulator(measured):
    results, _ = measured
    assert [one.outcome for one in results.results] == [TIMED] * 3
    assert all(one.needed < 1 for one in results.results)


@pytest.mark.slow
def test_a_reference_of_other_numbers_makes_all_wrong(exported, tmp_path):
    """A mutant of the package: the test above could not fail if numbers were not compared."""
    folder, _ = exported
    shutil.copytree(folder, tmp_path / "package")
    with np.load(folder / "reference.npz") as stored:
        np.savez(tmp_path / "package" / "reference.npz", **{key: stored[key] + 1 for key in stored.files})
    manifest = tmp_path / "package" / "candidates.json"
    document = json.loads(manifest.read_text())
    for record in document["files"]:
        if record["name"] == "reference.npz":
            record["sha256"] = hash_files([tmp_path / "package" / "reference.npz"])
    manifest.write_text(json.dumps(document))
    _, results = run_job(
        tmp_path / "package", JobOptions(tmp_path / "r.json", device="emulator", repeats=1, silence_s=300.0)
    )
    assert {one.outcome for one in results.results} == {WRONG}


@pytest.mark.gpu
def test_a_package_on_a_gpu(tmp_path):
    device = find_device(0)
    draft(dense_module(), f"cuda -arch={device.arch}", export=tmp_path / "package", per_task=2, into=tmp_path)
    _, results = run_job(tmp_path / "package", JobOptions(tmp_path / "results.json"))
    assert [one.outcome for one in results.results] == [TIMED] * 3
    assert (results.card, results.is_emulated) == (device.name, False)
    (row,) = imported(tmp_path / "package", results, tmp_path).rows
    assert row.speedup is not None


def test_what_is_faster_becomes_a_record_that_a_build_uses(exported, measured, tmp_path):
    found = imported(exported[0], measured[1], tmp_path)
    (row,) = found.rows
    assert (row.is_accepted, row.speedup, row.outcomes) == (True, pytest.approx(2.0), {TIMED: 2})
    (record,) = load_records(tmp_path / "tuned", "cuda-sm_80").records.values()
    assert (record.measured, record.speedup) == (True, pytest.approx(2.0))
    assert record.provenance["card"] == "A100"
    assert "2.00  2 timed  record" in render_import(found)
    options = pipeline.Options(records=tmp_path / "tuned", latency=False)
    built = pipeline.compile(dense_module(), target=TARGET, options=options)
    assert any(
        "1 kernels have tuned schedules (records of cuda-sm_80)" in note for note in built.report.notes
    )
    json.loads(report.to_json(found))


def test_what_is_not_faster_becomes_none_and_a_draft_of_it_goes(exported, measured, tmp_path):
    slow = replace(
        measured[1],
        results=tuple(replace(one, times_s=(1.97e-5,) * 2) for one in measured[1].results),
    )
    fast = imported(exported[0], measured[1], tmp_path)
    (record,) = load_records(tmp_path / "tuned", "cuda-sm_80").records.values()
    assert fast.rows[0].is_accepted
    save_record(tmp_path / "tuned", replace(record, measured=False))
    found = imported(exported[0], slow, tmp_path)
    assert (found.rows[0].is_accepted, found.rows[0].is_removed) == (False, True)
    assert load_records(tmp_path / "tuned", "cuda-sm_80").records == {}
    assert imported(exported[0], slow, tmp_path).written == ()


def test_a_faster_record_that_is_there_stays(exported, measured, tmp_path):
    imported(exported[0], measured[1], tmp_path)
    (record,) = load_records(tmp_path / "tuned", "cuda-sm_80").records.values()
    better = replace(record, cost_s=record.cost_s / 3)
    save_record(tmp_path / "tuned", better)
    assert imported(exported[0], measured[1], tmp_path).written == ()
    assert load_records(tmp_path / "tuned", "cuda-sm_80").records[record.digest] == better


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"is_emulated": True}, "times of the CPU emulator", id="emulator"),
        pytest.param({"package": "f" * 64}, "of the package ffffffffffff, ", id="another package"),
        pytest.param(
            {"arch": "sm_90", "card": "H100"}, r"sm_90 \(H100\), .* is for sm_80", id="another arch"
        ),
        pytest.param({"results": ()}, "its candidates are not those of", id="another list"),
    ],
)
def test_results_of_something_else_are_refused(exported, measured, tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        imported(exported[0], replace(measured[1], **changes), tmp_path)
    assert not (tmp_path / "tuned").exists()


def test_ctrl_c_ends_it_after_a_kernel_and_keeps_what_is_done(tmp_path):
    net = Net()
    x = relay.nn.relu(relay.nn.dense(net.input("x", (16, 64)), net.const(48, 64)))
    module = net.module(relay.nn.dense(x, net.const(8, 48)))
    options = drafting.DraftOptions(
        export=tmp_path / "package", per_task=1, into=tmp_path, is_measured=False,
        parameters=drafts.DraftParameters(16, 1, 4),
    )  # fmt: skip
    found = drafting.draft_model(
        load.model_from_module(module, {}),
        TARGET,
        options,
        observe=lambda row: signal.raise_signal(signal.SIGINT),
    )
    assert (found.is_interrupted, len(found.rows), found.skipped) == (True, 1, 1)
    assert len(load_package(tmp_path / "package").tasks) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_draft_says_what_it_is_for_and_that_nobody_measured_it(tmp_path, monkeypatch):
    profile = drafts.profile_kernel

    def slow(function, target):
        return tuple(replace(one, blocks=1000 * one.blocks) for one in profile(function, target))

    monkeypatch.setattr("tvm_fuse.drafting.profile_kernel", slow)  # now whatever works is predicted faster
    found = draft(dense_module(), is_kept=True, into=tmp_path, archs=("sm_75",))
    assert [row.has_record for row in found.rows] == [True, True]
    assert len(found.written) == 2
    for arch, sms in (("sm_80", 108), ("sm_75", 40)):
        (record,) = load_records(tmp_path, f"cuda-{arch}").records.values()
        assert not record.measured
        assert record.cost_s < record.baseline_s
        task = json.loads(record.schedule)["i"][0]
        assert f"-arch={arch}" in task[1]
        assert (task[2][0], task[3]) == (sms, "llvm")
    options = pipeline.Options(records=tmp_path, latency=False)
    notes = pipeline.compile(dense_module(), target=TARGET, options=options).report.notes
    assert any(Code.SCHEDULE_RECORD_DRAFT.value in note for note in notes)
    built = pipeline.compile(dense_module(), target=TARGET, options=replace(options, drafts=True))
    assert any("1 of them drafts that nobody measured" in note for note in built.report.notes)
    exported = draft(dense_module(), export=tmp_path / "package", per_task=1, into=tmp_path)
    assert exported.rows[0].kept == 1
    (task,) = load_package(tmp_path / "package").tasks
    drafted = load_records(tmp_path, "cuda-sm_80").records[task.digest].schedule
    assert [one.schedule for one in task.candidates] == [drafted]  # a record is always a candidate


def test_drafts_become_records_only_where_they_are_predicted_faster(tmp_path):
    """The score can be told that everything is alike, or that the launch is all there is."""
    root = tmp_path / "tuned"
    found = draft(dense_module(), is_kept=True, into=root, archs=("sm_75",))
    assert {row.device for row in found.rows} == {"cuda-sm_80", "cuda-sm_75"}
    for row in found.rows:
        stored = load_records(root, row.device).records
        assert bool(stored) is row.has_record is bool(row.best_s and row.best_s <= 0.9 * row.baseline_s)
        assert all(not record.measured for record in stored.values())
    save_constants(root, "cuda-sm_80", replace(ScoreConstants(), launch_s=1.0), {})  # all take a second
    assert load_constants(root, "cuda-sm_80").launch_s == 1.0
    again = draft(dense_module(), is_kept=True, into=root)
    assert [(row.has_record, row.kept) for row in again.rows] == [(False, 0)]


def test_kernels_that_the_compiler_spoils_are_rejected_with_a_reason(tmp_path, monkeypatch):
    build = verify.build_candidate

    def spoilt(one, target, schedule, profiles):
        return replace(build(one, target, schedule, profiles), problem="spills" if schedule else "")

    monkeypatch.setattr("tvm_fuse.drafting.build_candidate", spoilt)
    with pytest.raises(ModelError, match="no candidate passed"):
        draft(dense_module(), export=tmp_path / "package", per_task=1, into=tmp_path)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("llvm", {}, "schedules are drafted for CUDA; the target is llvm"),
        (TARGET, {"card": "h100"}, "wanted a card of sm_80"),
        (TARGET, {"tasks": ("nothing",)}, "got none; there are dense_bias_relu"),
        (TARGET, {"archs": ("sm_90",), "export": "package"}, "is for one architecture"),
    ],
)
def test_what_is_refused(tmp_path, target, options, message):
    options = {"into": tmp_path, "is_measured": False, **options}
    if "export" in options:
        options["export"] = tmp_path / options["export"]
    with pytest.raises(UsageError, match=message):
        drafting.draft_model(
            load.model_from_module(dense_module(), {}), target, drafting.DraftOptions(**options)
        )
