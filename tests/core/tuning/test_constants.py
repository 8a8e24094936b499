"""Fitted constants on disk."""

from __future__ import annotations

import json

import pytest

from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.tuning.constants import constants_file, load_constants, save_constants
from tvm_fuse.core.tuning.records import load_records
from tvm_fuse.core.tuning.score import ScoreConstants

FITTED = ScoreConstants(scale=1.5, launch_s=3e-6)


def test_they_come_back_and_are_no_record(tmp_path):
    root = tmp_path / "tuned"
    assert load_constants(root, "cuda-sm_80") == ScoreConstants()
    assert save_constants(root, "cuda-sm_80", FITTED, {"card": "A100"}) == constants_file(root, "cuda-sm_80")
    assert load_constants(root, "cuda-sm_80") == FITTED
    assert load_constants(root, "cuda-sm_90") == ScoreConstants()
    assert load_records(root, "cuda-sm_80").damaged == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda document: document.update(schema={}), "no .*score-constants", id="another schema"
        ),
        pytest.param(lambda document: document["constants"].pop("scale"), "scale", id="one is missing"),
        pytest.param(lambda document: document["constants"].update(scale="x"), "float", id="no number"),
        pytest.param(lambda document: document["constants"].update(scale=-1), "above 0", id="below zero"),
    ],
)
def test_damaged_ones_are_refused(tmp_path, change, message):
    file = save_constants(tmp_path, "cuda-sm_80", FITTED, {})
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        load_constants(tmp_path, "cuda-sm_80")
