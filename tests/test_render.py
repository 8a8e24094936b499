"""Folding, manifests and verifications as text and as JSON, from values made by hand. Needs no TVM."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.edit import Direction, Edit
from tvm_fuse.core.epsilon import EpsilonCheck, EpsilonOrigin
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.manifest import FoldedNorm, FoldedRun, LeftAlone, Manifest, Source
from tvm_fuse.core.parity import compare
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.weights import FoldedLayer
from tvm_fuse.render import render_fold, render_manifest, render_verification
from tvm_fuse.report import Check, FoldReport, Verification, to_json

EDIT = Edit((), {9: 3})


def layer(name, weight_error=1e-9, bias_error=2e-9):
    return FoldedLayer(name, "abc", "def", weight_error, bias_error, had_bias=False)


MANIFEST = Manifest(
    Source("net.onnx", "12ab"),
    {"tvm-fuse": "1.2.3", "numpy": "1.26", "onnx": "1.17"},
    (FoldedNorm("bn", 1e-3, "user", "before", 0.5, 2.0, (layer("conv_a"), layer("conv_b"))),),
    (FoldedRun(("multiply", "add"), "before", (layer("dense"),)),),
    (LeftAlone("late", 1e-5, "bn-after-activation", "bn-after-activation at late: wanted x, got y"),),
    ("y",),
)


def fold_report(**changes):
    values = {
        "model": "net", "epsilon": (), "folds": (), "not_folded": (), "scale_shifts": (), "warnings": (),
        "manifest": MANIFEST,
    }  # fmt: skip
    return FoldReport(**{**values, **changes})


def fold(name, direction=Direction.BEFORE, *layers):
    return FoldRecord(0, name, 1e-3, 0.5, 2.0, direction, layers or (layer("conv"),), EDIT)


def checked(name):
    return EpsilonCheck(name, 1e-3, 1e-3, EpsilonOrigin.RECOVERED, 1e-3)


# --- folding -------------------------------------------------------------------------------------


def test_a_model_with_nothing_to_fold():
    assert render_fold(fold_report()).splitlines()[::2] == [
        "net    (tvm-fuse 1.2.3)",
        "Batch norms folded into weights " + "." * 53 + " 0 of 0",
    ]


def test_folds_with_their_largest_bounds_and_directions():
    before, after = fold("a", Direction.BEFORE, layer("c", 1e-9, 4e-9)), fold("b", Direction.AFTER)
    run = AffineRecord(("multiply",), 2.0, Direction.BEFORE, (layer("d", 3e-9, 0.0),), EDIT)
    report = fold_report(epsilon=(checked("a"), checked("b")), folds=(before, after), scale_shifts=(run,))
    assert render_fold(report).splitlines()[3:] == [
        "  epsilon 0.001        2 x  recovered from the operators that the exporter wrote",
        "  1 of them into the layers after them",
        "  and 1 other scales and shifts",
        "  rounding moves an output of a layer by at most 3.0e-09 x largest input + 4.0e-09",
    ]


def test_warnings_come_last():
    report = fold_report(warnings=(Reason(Code.BN_GAIN_LARGE, "bn", "less", "more"),))
    assert render_fold(report).splitlines()[-2] == "warning: bn-gain-large at bn: wanted less, got more"


def test_a_fold_report_in_json_holds_its_manifest_and_no_edits():
    document = json.loads(to_json(fold_report(folds=(fold("a"),))))
    assert document["schema"] == {"name": "tvm-fuse/fold-report", "version": 1}
    assert document["manifest"]["source"] == {"name": "net.onnx", "sha256": "12ab"}
    assert "edit" not in document["folds"][0]
    assert document["folds"][0]["direction"] == "before"


# --- manifests -----------------------------------------------------------------------------------


def test_a_manifest_names_every_layer_and_what_is_still_there():
    assert render_manifest(MANIFEST).splitlines() == [
        "folded from net.onnx (SHA-256 12ab)",
        "by numpy 1.26, onnx 1.17, tvm-fuse 1.2.3",
        "",
        "bn: epsilon 0.001 (user), into conv_a, conv_b",
        "  variance at least 0.5, gain at most 2",
        "  weight abc -> def, rounding at most 1.0e-09 x largest input + 2.0e-09",
        "  weight abc -> def, rounding at most 1.0e-09 x largest input + 2.0e-09",
        "multiply, add: into dense",
        "  weight abc -> def, rounding at most 1.0e-09 x largest input + 2.0e-09",
        "late: not folded: bn-after-activation at late: wanted x, got y",
    ]


# --- verifications -------------------------------------------------------------------------------

GOOD = compare({"y": np.ones(3)}, {"y": np.ones(3)})
BAD = compare({"y": np.ones(3)}, {"y": np.zeros(3)})
HOLDS, BROKEN = Check("this holds"), Check("that", "wanted 1, got 2")
BY_X, BY_NOBODY = "with the source, both run by X ...", "with the source ..."

#: Checks, parity and engine; whether it passed; how many hold, the title of the outputs and their result.
OUTCOMES = {
    "all holds": (((HOLDS,), GOOD, "X"), True, "1 of 1 hold", BY_X, "PASSED"),
    "a check fails": (((HOLDS, BROKEN), GOOD, "X"), False, "1 of 2 hold", BY_X, "PASSED"),
    "parity fails": (((HOLDS,), BAD, "X"), False, "1 of 1 hold", BY_X, "FAILED"),
    "nothing was run": (((BROKEN,),), False, "0 of 1 hold", BY_NOBODY, "NOT RUN"),
    "all holds, but not run": (((HOLDS,),), False, "1 of 1 hold", BY_NOBODY, "NOT RUN"),
}


@pytest.mark.parametrize(("values", "passed", "held", "by", "result"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_a_verification(values, passed, held, by, result):
    outcome = Verification(MANIFEST, *values)
    assert outcome.passed is passed
    assert json.loads(to_json(outcome))["passed"] is passed
    lines = render_verification(outcome).splitlines()
    assert lines[0].endswith(held)
    failed = [line for line in lines if line.startswith("  FAILED: ")]
    assert failed == (["  FAILED: that: wanted 1, got 2"] if BROKEN in values[0] else [])
    (title,) = [line for line in lines if line.startswith("Outputs compared")]
    assert by in title
    assert title.endswith(f" {result}")


@pytest.mark.parametrize(("count", "more"), [(12, []), (15, ["  and 3 more (--json lists all)"])])
def test_many_failures_are_cut_in_the_text_and_whole_in_json(count, more):
    outcome = Verification(MANIFEST, (BROKEN,) * count, GOOD, "X")
    lines = render_verification(outcome).splitlines()
    assert sum(line.startswith("  FAILED: ") for line in lines) == 12
    assert [line for line in lines if line.startswith("  and ")] == more
    assert len(json.loads(to_json(outcome))["checks"]) == count
