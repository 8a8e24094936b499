"""The report, as text and as JSON, from values made by hand. Needs no TVM."""

from __future__ import annotations

import json

from tvm_fuse.report import Cost, Report, render, to_json


def make_report(**changes):
    values = {
        "tool_version": "1.2.3", "tvm": "TVM 0.17", "model": "net", "target": "llvm", "inputs": ("x [1, 3]",),
        "epsilon": (), "folds": (), "not_folded": (), "chains": (), "not_fused": (),
        "unfused": Cost(10, 2000), "fused": Cost(4, 1000), "parity": None, "latency": None, "notes": (),
    }  # fmt: skip
    return Report(**{**values, **changes})


def test_an_empty_report():
    assert "NOT RUN" in render(make_report())
    document = json.loads(to_json(make_report()))
    assert document["schema"] == {"name": "tvm-fuse/report", "version": 1}
    assert document["parity"] is None
    assert document["latency"] is None
