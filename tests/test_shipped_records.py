"""The records that come with tvm-fuse: whole, of the right device, drafts as long as nobody measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lazy import Lazy
from tvm_fuse.core.tuning.digest import chain_digest
from tvm_fuse.core.tuning.records import load_records

fuse = Lazy("tvm_fuse.relay.fuse")
load = Lazy("tvm_fuse.relay.load")
records = Lazy("tvm_fuse.relay.records")
targets = Lazy("tvm_fuse.relay.target")
tuned = Lazy("tvm_fuse.relay.tuned")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "schedules" / "tuned"
DEVICES = ("cuda-sm_75", "cuda-sm_80", "cuda-sm_90")
MOST_BYTES = 1_500_000


def test_the_folder_has_what_it_should():
    assert {path.name for path in FOLDER.iterdir()} == set(DEVICES)
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.suffix for path in files} == {".json"}
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


@pytest.mark.parametrize("device", DEVICES)
def test_every_record_is_whole_and_marked(device):
    stored = load_records(FOLDER, device)
    assert stored.damaged == {}
    assert stored.records
    arch = device.removeprefix("cuda-")
    for record in stored.records.values():
        assert chain_digest(record.chain) == record.digest
        assert re.search(rf"-arch={arch}\b", json.loads(record.schedule)["i"][0][1])
        assert record.cost_s < record.baseline_s
        if not record.measured:
            assert record.provenance["measured"].startswith("no: ")
        else:
            assert record.provenance["card"]


def test_the_documents_say_how_many_there_are():
    counts = [len(load_records(FOLDER, device).records) for device in DEVICES]
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert "in `schedules/tuned`, of {}, {} and {} kernels".format(*counts) in page


@pytest.mark.relay
def test_every_schedule_can_be_read_and_the_default_folder_is_this_one():
    assert records.SHIPPED_RECORDS.resolve() == FOLDER
    assert fuse.FuseOptions().records == records.SHIPPED_RECORDS
    for device in DEVICES:
        for record in load_records(FOLDER, device).records.values():
            tuned.load_state(record.schedule)


@pytest.mark.relay
@pytest.mark.cuda_codegen
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_a_model_finds_its_drafts(tmp_path, arch):
    """None is stale: the kernels of the model compute what they were drafted for."""
    file = tmp_path / "model.onnx"
    subprocess.run([sys.executable, ROOT / "examples" / "models.py", "mobilenet_v2", file], check=True)
    target = targets.resolve_target(f"cuda -arch={arch}")
    model = load.load_model(file, shapes={})
    unused = fuse.fuse_model(model, target).tuned
    assert unused.records == ()
    used = fuse.fuse_model(model, target, fuse.FuseOptions(drafts=True)).tuned
    assert used.records
    assert {str(one.reason.code.value) for one in used.decisions if one.reason} <= {"schedule-record-device"}
