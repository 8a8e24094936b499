"""Records: one file a device and chain, merged, pruned, and never of another device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.records import (
    TunedRecord,
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
    assert found.elsewhere == {RECORD.digest: ("cuda-sm_80", "llvm-haswell-4cores")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(lambda document: document.pop("cost_s"), "cost_s is missing", id="a missing field"),
        pytest.param(lambda document: document.update(cost_s=0), "not positive", id="no time"),
        pytest.param(lambda document: document.update(cost_s="x"), "could not convert", id="no number"),
        pytest.param(lambda document: document.update(schema={}), "schema", id="another schema"),
        pytest.param(lambda document: document.update(digest="other"), "of other on", id="another chain"),
        pytest.param(lambda document: document.update(device="cuda-sm_80"), "on cuda-sm_80", id="copied"),
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
