"""Records: one file a device and chain, merged, pruned, and never of another device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.records import (
    TunedRecord,
    beats,
    from_json,
    load_records,
    merge_records,
    prune_records,
    remove_record,
    save_record,
    to_json,
)

RECORD = TunedRecord(
    digest="3f1c09a77b52",
    device="llvm-haswell-4cores",
    name="conv2d_bias_relu",
    chain=("input () -> float32[1]",),
    workload_key='["abc", [1, 2]]',
    schedule="{}",
    cost_s=1e-4,
    baseline_s=2e-4,
    max_abs=1e-6,
    needed=0.1,
    provenance={"model": "net", "trials": 64},
)


def test_a_record_survives_its_file(tmp_path):
    file = save_record(tmp_path, RECORD)
    assert file == tmp_path / "llvm-haswell-4cores" / "3f1c09a77b52.json"
    assert load_records(tmp_path, RECORD.device).records == {RECORD.digest: RECORD}
    assert from_json(to_json(RECORD)) == RECORD
    assert RECORD.speedup == 2.0


def test_a_record_of_another_device_is_not_loaded(tmp_path):
    save_record(tmp_path, RECORD)
    save_record(tmp_path, replace(RECORD, device="cuda-sm_80"))
    found = load_records(tmp_path, "cuda-sm_90")
    assert found.records == {}
    assert found.elsewhere == {RECORD.digest: ("cuda-sm_80",)}  # a CPU's says nothing about a GPU
    assert load_records(tmp_path, "llvm-znver4-2cores").elsewhere == {RECORD.digest: (RECORD.device,)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(lambda document: document.pop("cost_s"), "cost_s is missing", id="a missing field"),
        pytest.param(lambda document: document.update(cost_s=0), "not positive", id="no time"),
        pytest.param(lambda document: document.update(cost_s="x"), "could not convert", id="no number"),
        pytest.param(lambda document: document.update(schema={}), "schema", id="another schema"),
        pytest.param(lambda document: document.update(digest="other"), "of other on", id="another chain"),
        pytest.param(lambda document: document.update(device="cuda-sm_80"), "on cuda-sm_80", id="copied"),
        pytest.param(lambda document: document.pop("measured"), "measured is missing", id="measured or not"),
        pytest.param(lambda document: document.update(measured="no"), "neither true nor false", id="no flag"),
    ],
)
def test_damaged_records_are_named(tmp_path, change, problem):
    file = save_record(tmp_path, RECORD)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    found = load_records(tmp_path, RECORD.device)
    assert found.records == {}
    assert problem in found.damaged[str(file)]


def test_of_two_records_the_greater_speedup_stays(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    save_record(here, RECORD)
    save_record(there, replace(RECORD, cost_s=1e-5, baseline_s=1.5e-5))  # a faster machine, less gained
    assert merge_records(here, there) == ()
    assert load_records(here, RECORD.device).records[RECORD.digest] == RECORD
    better = replace(RECORD, cost_s=5e-5)
    save_record(there, better)
    save_record(there, replace(RECORD, digest="000000000000"))
    assert {record.digest for record in merge_records(here, there)} == {RECORD.digest, "000000000000"}
    assert load_records(here, RECORD.device).records[RECORD.digest] == better


def test_records_of_the_first_version_were_measured(tmp_path):
    file = save_record(tmp_path, RECORD)
    document = json.loads(file.read_text())
    document["schema"]["version"] = 1
    del document["measured"]
    file.write_text(json.dumps(document))
    assert load_records(tmp_path, RECORD.device).records == {RECORD.digest: RECORD}


DRAFT = replace(RECORD, measured=False, cost_s=1e-5)  # of a speed-up that no measurement has


@pytest.mark.parametrize(
    ("record", "other", "wanted"),
    [
        pytest.param(RECORD, None, True, id="nothing there"),
        pytest.param(DRAFT, None, True, id="a draft, nothing there"),
        pytest.param(RECORD, DRAFT, True, id="measured beats a draft"),
        pytest.param(DRAFT, RECORD, False, id="and never the other way round"),
        pytest.param(DRAFT, replace(DRAFT, cost_s=2e-5), True, id="the better draft"),
        pytest.param(RECORD, RECORD, False, id="the same"),
    ],
)
def test_which_record_stays(tmp_path, record, other, wanted):
    assert beats(record, other) is wanted
    here, there = tmp_path / "here", tmp_path / "there"
    save_record(there, record)
    if other is not None:
        save_record(here, other)
    assert bool(merge_records(here, there)) is wanted
    assert load_records(here, RECORD.device).records[RECORD.digest] == (record if wanted else other)


def test_a_draft_is_not_pruned(tmp_path):
    save_record(tmp_path, replace(DRAFT, cost_s=DRAFT.baseline_s))
    assert prune_records(tmp_path, RECORD.device) == ()


def test_pruning(tmp_path):
    save_record(tmp_path, RECORD)
    save_record(tmp_path, replace(RECORD, digest="0" * 12, cost_s=RECORD.baseline_s))
    damaged = save_record(tmp_path, replace(RECORD, digest="1" * 12))
    damaged.write_text("{")
    assert set(prune_records(tmp_path, RECORD.device)) == {f"{'0' * 12}.json", f"{'1' * 12}.json"}
    found = load_records(tmp_path, RECORD.device)
    assert (set(found.records), found.damaged) == ({RECORD.digest}, {})


def test_removing(tmp_path):
    save_record(tmp_path, RECORD)
    remove_record(tmp_path, RECORD.device, RECORD.digest)
    remove_record(tmp_path, RECORD.device, RECORD.digest)
    assert load_records(tmp_path, RECORD.device).records == {}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        save_record(tmp_path / "file", RECORD)


def test_a_folder_that_is_not_there_has_no_records(tmp_path):
    found = load_records(tmp_path / "none", RECORD.device)
    assert (found.records, found.elsewhere, found.damaged) == ({}, {}, {})
