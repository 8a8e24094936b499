"""The report, as text and as JSON, from values made by hand. Needs no TVM."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.edit import Direction, Edit
from tvm_fuse.core.epsilon import ChannelImpact, EpsilonCheck, EpsilonImpact, EpsilonOrigin
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.parity import ParityReport, Tolerance, compare
from tvm_fuse.core.reason import HINTS, Code, Reason, declined
from tvm_fuse.core.weights import FoldedLayer
from tvm_fuse.render import render
from tvm_fuse.report import Cost, Execution, FusedKernel, Latency, Place, Report, Steering, to_json

INF, NAN = float("inf"), float("nan")


def make_report(**changes):
    values = {
        "tool_version": "1.2.3", "tvm": "TVM 0.17", "model": "net", "target": "llvm", "inputs": ("x [1, 3]",),
        "epsilon": (), "folds": (), "not_folded": (), "chains": (), "not_fused": (),
        "unfused": Cost(10, 2_000_000), "fused": Cost(4, 1_000_000),
        "parity": None, "latency": None, "notes": (),
    }  # fmt: skip
    return Report(**{**values, **changes})


LAYER = FoldedLayer("conv", "abc", "def", 1e-9, 2e-9, had_bias=False)
EDIT = Edit((), {9: 3})


def fold(name="bn"):
    return FoldRecord(
        batch_norm=8, name=name, epsilon=1e-3, variance_min=0.5, gain_max=2.0, direction=Direction.BEFORE,
        layers=(LAYER,), edit=EDIT,
    )  # fmt: skip


def checked(name, in_graph=1e-3, used=None, origin=EpsilonOrigin.SOURCE_ATTRIBUTE):
    used = in_graph if used is None else used
    return EpsilonCheck(name, in_graph, used, origin, used)


def refused(count, code=Code.CHAIN_NO_EPILOGUE):
    return tuple(
        declined("rule", f"node_{i}", Reason(code, f"node_{i}", f"want_{i}", f"got_{i}"))
        for i in range(count)
    )


def line_with(text, part):
    (line,) = [line for line in text.splitlines() if part in line]
    return line


# --- the same reports as text and as JSON --------------------------------------------------------


def failed_parity():
    """One good output, one of another shape, one that differs, one missing, one too many."""
    zeros = np.zeros((2, 3), "float32")
    off = zeros.copy()
    off[1, 2] = 0.5
    reference = {"good": zeros, "shaped": zeros, "off": zeros, "lost": zeros}
    candidate = {"good": zeros, "shaped": np.zeros((3, 2), "float32"), "off": off, "new": zeros}
    return compare(reference, candidate, seed=7)


REPORTS = {
    "empty": make_report(),
    "no inputs": make_report(inputs=()),
    "zero kernels": make_report(unfused=Cost(0, 0), fused=Cost(0, 0)),
    "more kernels than before": make_report(unfused=Cost(1, 8), fused=Cost(2, 16)),
    "folded": make_report(
        epsilon=(checked("bn"),), folds=(fold(),), chains=(FusedKernel("conv2d_bias", "c", ("nn.conv2d",)),)
    ),
    "declined": make_report(
        epsilon=(checked("bn"),), not_folded=refused(1, Code.BN_AFTER_ACTIVATION), not_fused=refused(40)
    ),
    "parity failed": make_report(parity=failed_parity()),
    "parity of nothing": make_report(parity=ParityReport((), (), (), 0)),
    "scalar": make_report(parity=compare({"y": np.float32(1)}, {"y": np.float32(1)})),
    "no elements": make_report(parity=compare({"y": np.zeros((0, 3))}, {"y": np.zeros((0, 3))})),
    "exact dtype": make_report(parity=compare({"y": np.arange(3)}, {"y": np.arange(3) + 1})),
    "not finite": make_report(
        parity=compare({"y": np.array([1.0, NAN, INF, -INF])}, {"y": np.array([NAN, NAN, INF, INF])})
    ),
    "fused alone": make_report(latency=Latency((), (0.1, 0.2))),
    "on a GPU": make_report(execution=Execution(Place.GPU_BY_RUNNER, "Some GPU")),
    "latency": make_report(latency=Latency((0.4, 0.2, 0.3), (0.1, 0.1, 0.1))),
    "warnings": make_report(warnings=(Reason(Code.BN_GAIN_LARGE, "bn", "less", "more"),)),
    "notes": make_report(notes=("first note", "second note")),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_every_report_has_both_forms(report):
    text = render(report)
    assert "net" in text
    assert "1.2.3" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    document = json.loads(to_json(report), parse_constant=pytest.fail)
    assert document["schema"] == {"name": "tvm-fuse/report", "version": 2}
    assert set(document) == {
        "schema", "tool_version", "tvm", "model", "target", "inputs", "epsilon", "folds", "not_folded",
        "chains", "not_fused", "unfused", "fused", "parity", "latency", "notes",
        "scale_shifts", "warnings", "execution", "steering", "plan_digest",
    }  # fmt: skip
    assert to_json(report) == to_json(replace(report))


# --- batch norms ---------------------------------------------------------------------------------


def test_a_model_without_inputs_says_so():
    assert line_with(render(make_report(inputs=())), "inputs: ").startswith("inputs: none ")


def test_other_scales_and_shifts_are_counted():
    record = AffineRecord(("add", "multiply"), 2.0, Direction.BEFORE, (LAYER,), EDIT)
    report = make_report(scale_shifts=(record, record))
    assert "2 other scales and shifts" in render(report)
    (first, _) = json.loads(to_json(report))["scale_shifts"]
    assert (first["layers"][0]["name"], first["operators"]) == ("conv", ["add", "multiply"])
    assert first["gain_max"] == 2.0


def test_a_model_without_batch_norms():
    assert line_with(render(make_report()), "Batch norms folded").endswith(" 0 of 0")


def test_epsilons_are_counted_by_value_and_origin():
    checks = (
        checked("a"), checked("b"), checked("c", 1e-5),
        checked("d", 1e-5, origin=EpsilonOrigin.SOURCE_DEFAULT),
    )  # fmt: skip
    text = render(make_report(epsilon=checks, folds=(fold("a"), fold("b"), fold("c"))))
    assert line_with(text, "Batch norms folded").endswith(" 3 of 4")
    assert line_with(text, "0.001").split()[:4] == ["epsilon", "0.001", "2", "x"]
    assert [line.split()[2] for line in text.splitlines() if " 1e-05 " in line] == ["1", "1"]


@pytest.mark.parametrize("origin", EpsilonOrigin)
def test_every_origin_has_words(origin):
    assert line_with(render(make_report(epsilon=(checked("bn", origin=origin),))), "epsilon 0.001")


def test_an_aligned_epsilon_shows_both_values():
    report = make_report(epsilon=(checked("bn_3", 1e-5, 1e-3, EpsilonOrigin.USER), checked("bn_4")))
    line = line_with(render(report), "bn_3")
    assert "1e-05" in line
    assert "0.001" in line
    assert "bn_4" not in render(report)
    first, second = json.loads(to_json(report))["epsilon"]
    assert first == {
        "name": "bn_3", "in_graph": 1e-5, "expected": 1e-3, "origin": "user", "used": 1e-3, "impact": None,
    }  # fmt: skip
    assert second["origin"] == "source attribute"


def test_an_aligned_epsilon_shows_what_it_changed():
    impact = EpsilonImpact((ChannelImpact(3, 1e-4, -0.684, 0.652), ChannelImpact(1, 1.0, -5e-4, 4.9e-4)))
    check = replace(checked("bn_3", 1e-5, 1e-3, EpsilonOrigin.USER), impact=impact)
    lines = render(make_report(epsilon=(check,))).splitlines()
    (index,) = [index for index, line in enumerate(lines) if "aligned to" in line]
    assert lines[index + 1].strip() == str(impact)
    assert "0.652 in channel 3 (variance 0.0001, scale -68.4 %)" in lines[index + 1]
    (found,) = json.loads(to_json(make_report(epsilon=(check,))))["epsilon"]
    assert found["impact"]["worst"] == [
        {"channel": 3, "variance": 1e-4, "scale_change": -0.684, "output_change": 0.652},
        {"channel": 1, "variance": 1.0, "scale_change": -5e-4, "output_change": 4.9e-4},
    ]


@pytest.mark.parametrize(("count", "shown", "more"), [(12, 12, 0), (13, 12, 1)])
def test_many_aligned_epsilons_are_cut_in_the_text(count, shown, more):
    checks = tuple(checked(f"bn_{i}", 1e-5, 1e-3, EpsilonOrigin.CONFIG) for i in range(count))
    text = render(make_report(epsilon=checks))
    assert text.count("aligned to") == shown
    assert (f"and {more} more" in text) == bool(more)


def test_folds_in_json_hold_no_edits():
    (found,) = json.loads(to_json(make_report(folds=(fold(),))))["folds"]
    assert (found["name"], found["direction"]) == ("bn", "before")
    assert found["layers"] == [
        {
            "name": "conv", "weight_before": "abc", "weight_after": "def", "weight_error": 1e-9,
            "bias_error": 2e-9, "had_bias": False,
        }
    ]  # fmt: skip
    assert "edit" not in found


# --- chains and reasons --------------------------------------------------------------------------


def test_nothing_fused():
    text = render(make_report(not_fused=refused(2)))
    assert line_with(text, "Convolutions and dense").endswith(" 0 of 2")


def test_chains_are_counted_by_form_and_the_most_common_comes_first():
    forms = ["dense_bias", "conv2d_bias_hard_swish", "conv2d_bias_hard_swish", "conv2d_leaky_relu"]
    chains = tuple(FusedKernel(form, f"node_{i}", ("op",)) for i, form in enumerate(forms))
    text = render(make_report(chains=chains, not_fused=refused(1)))
    assert line_with(text, "Convolutions and dense").endswith(" 4 of 5")
    assert [" ".join(line.split()) for line in text.splitlines() if " x  " in line] == [
        "2 x conv2d + bias + hard swish", "1 x conv2d + leaky relu", "1 x dense + bias",
    ]  # fmt: skip
    assert json.loads(to_json(make_report(chains=chains)))["chains"][0] == {
        "form": "dense_bias", "anchor": "node_0", "operators": ["op"], "ends": None, "layers": 1,
    }  # fmt: skip


@pytest.mark.parametrize("where", ["not_folded", "not_fused"])
@pytest.mark.parametrize("code", Code)
def test_a_reason_shows_its_code_node_values_and_hint(where, code):
    report = make_report(**{where: refused(1, code)})
    text = render(report)
    line = line_with(text, "node_0")
    assert code.value in line
    assert "want_0" in line
    assert "got_0" in line
    assert HINTS[code] in text
    (decision,) = json.loads(to_json(report))[where]
    assert decision["stage"] == "condition"
    assert decision["reason"] == {"code": code.value, "at": "node_0", "wanted": "want_0", "got": "got_0"}


@pytest.mark.parametrize(("count", "shown", "more"), [(12, 12, None), (13, 12, 1), (100, 12, 88)])
def test_many_reasons_are_cut_in_the_text_and_whole_in_json(count, shown, more):
    report = make_report(not_fused=refused(count))
    text = render(report)
    assert text.count("chain-no-epilogue") == shown
    assert (f"and {more} more" in text) == bool(more)
    assert len(json.loads(to_json(report))["not_fused"]) == count


# --- warnings ------------------------------------------------------------------------------------


def test_a_warning_shows_its_code_node_values_and_hint():
    reason = Reason(Code.BN_GAIN_LARGE, "bn7", "at most 1", "2 in channel 3")
    lines = render(make_report(warnings=(reason,))).splitlines()
    (index,) = [index for index, line in enumerate(lines) if line.startswith("warning: ")]
    assert lines[index] == "warning: bn-gain-large at bn7: wanted at most 1, got 2 in channel 3"
    assert lines[index + 1].strip() == HINTS[Code.BN_GAIN_LARGE]
    assert lines.index("") < index  # a section of its own
    assert json.loads(to_json(make_report(warnings=(reason,))))["warnings"] == [
        {"code": "bn-gain-large", "at": "bn7", "wanted": "at most 1", "got": "2 in channel 3"}
    ]


def test_without_warnings_there_is_no_section():
    assert "warning" not in render(make_report())


@pytest.mark.parametrize(("count", "shown", "more"), [(12, 12, 0), (13, 12, 1), (40, 12, 28)])
def test_many_warnings_are_cut_in_the_text_and_whole_in_json(count, shown, more):
    reasons = tuple(Reason(Code.BN_VARIANCE_ALL_ZERO, f"bn_{i}", "some", "none") for i in range(count))
    text = render(make_report(warnings=reasons))
    assert text.count("warning: ") == shown
    assert (f"and {more} more" in text) == bool(more)
    assert len(json.loads(to_json(make_report(warnings=reasons)))["warnings"]) == count


# --- what it bought ------------------------------------------------------------------------------


def test_gain():
    text = render(make_report())
    assert line_with(text, "kernel launches").split()[2:] == ["10", "4", "-60", "%"]
    assert line_with(text, "memory traffic").split()[3:] == ["2.0", "MB", "1.0", "MB", "-50", "%"]
    assert "latency" not in text


def test_gain_of_nothing_has_no_percentage():
    text = render(make_report(unfused=Cost(0, 0), fused=Cost(0, 0)))
    assert line_with(text, "kernel launches").split()[2:] == ["0", "0"]
    assert "%" not in text


def test_latency_and_quartiles():
    latency = Latency((0.4, 0.2, 0.3, 0.3, 0.3), (0.1, 0.1, 0.2, 0.1, 0.1))
    assert latency.speedups == pytest.approx((4.0, 2.0, 1.5, 3.0, 3.0))
    report = make_report(latency=latency)
    document = json.loads(to_json(report))["latency"]
    assert document["unfused"] == [0.4, 0.2, 0.3, 0.3, 0.3]
    assert document["speedup"] == pytest.approx({"median": 3.0, "quartile_1": 2.0, "quartile_3": 3.0})
    text = render(report)
    assert line_with(text, "latency, median").split()[2:] == ["300.00", "ms", "100.00", "ms", "3.00", "x"]
    assert "2.00 to 3.00" in text
    assert "5 alternating runs" in text


def test_latency_of_the_fused_model_alone():
    report = make_report(latency=Latency((), (0.1, 0.3, 0.2)))
    document = json.loads(to_json(report))["latency"]
    assert document == {"unfused": [], "fused": [0.1, 0.3, 0.2], "speedup": None}
    text = render(report)
    assert line_with(text, "latency, median").split()[2:] == ["200.00", "ms"]
    assert "of the fused model alone: 3 runs, quartiles 150.00 to 250.00 ms" in text
    assert "speed-up" not in text


# --- where it ran --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [place for place in Place if place is not Place.CPU])
def test_a_place_is_told(place):
    report = make_report(execution=Execution(place, "Some Device"))
    assert line_with(render(report), "run on: ").startswith("run on: Some Device, ")
    document = json.loads(to_json(report))["execution"]
    assert document == {"place": place.value, "device": "Some Device"}


def test_each_place_has_words_of_its_own():
    texts = {render(make_report(execution=Execution(place, "Some Device"))) for place in Place}
    assert len(texts) == len(Place)


@pytest.mark.parametrize("execution", [None, Execution(Place.CPU, "this machine's CPU")])
def test_on_the_cpu_the_target_says_it(execution):
    assert "run on" not in render(make_report(execution=execution))


# --- parity --------------------------------------------------------------------------------------


def test_parity_that_was_not_run():
    assert line_with(render(make_report()), "Parity").endswith("NOT RUN")
    assert json.loads(to_json(make_report()))["parity"] is None


def test_parity_that_passed():
    got = {"y": np.array([1.0, 2.000001], "float32")}
    report = make_report(parity=compare({"y": np.array([1.0, 2.0], "float32")}, got, seed=5))
    assert line_with(render(report), "Parity").endswith("PASSED")
    document = json.loads(to_json(report))["parity"]
    assert (document["passed"], document["seed"], document["missing"]) == (True, 5, [])
    assert document["rows"][0]["tolerance"]["atol"] == 1e-5
    assert 0 < document["rows"][0]["needed"] < 1


def test_parity_that_failed_tells_about_every_output():
    report = make_report(parity=failed_parity())
    text = render(report)
    assert line_with(text, "Parity").endswith("FAILED")
    for part in ("lost", "new", "shaped", "[3, 2]", "0.5", "[1, 2]", "1 values fail"):
        assert part in text
    document = json.loads(to_json(report))["parity"]
    assert document["passed"] is False
    assert (document["missing"], document["extra"]) == (["lost"], ["new"])
    rows = {row["output"]: row for row in document["rows"]}
    assert list(rows) == ["good", "shaped", "off"]
    assert rows["shaped"]["problem"]
    assert rows["shaped"]["max_abs"] == "inf"
    assert rows["shaped"]["worst_got"] == "nan"
    assert (rows["off"]["failing"], rows["off"]["worst_index"]) == (1, [1, 2])


def test_parity_of_nothing_failed():
    report = make_report(parity=ParityReport((), (), (), 0))
    assert line_with(render(report), "Parity").endswith("FAILED")
    assert json.loads(to_json(report))["parity"]["passed"] is False


def test_non_finite_numbers_are_strings_in_json():
    report = make_report(parity=compare({"y": np.array([-INF, 1.0])}, {"y": np.array([INF, 1.0])}))
    document = json.loads(to_json(report), parse_constant=pytest.fail)
    (row,) = document["parity"]["rows"]
    assert (row["worst_got"], row["worst_reference"], row["max_abs"]) == ("inf", "-inf", "inf")


def test_a_tolerance_of_zero():
    same = {"y": np.ones(2, "float32")}
    report = make_report(parity=compare(same, same, tolerance=Tolerance(0.0, 0.0, "given")))
    assert line_with(render(report), "Parity").endswith("PASSED")
    assert json.loads(to_json(report))["parity"]["rows"][0]["needed"] == 0


def test_notes_are_shown():
    lines = render(make_report(notes=("first", "second"))).splitlines()
    assert lines[-2:] == ["note: first", "note: second"]


# --- what was asked of the plan ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steering", "line"),
    [
        (Steering(), None),
        (Steering("none"), "asked for: --fuse none"),
        (Steering(only=("chain1", "conv*"), max_ops=3), "asked for: --only chain1 --only conv* --max-ops 3"),
        (Steering(skip=("chain2",)), "asked for: --skip chain2"),
    ],
    ids=["nothing", "none", "only", "skip"],
)
def test_a_report_says_what_was_asked_of_the_plan(steering, line):
    report = make_report(steering=steering)
    lines = [found for found in render(report).splitlines() if found.startswith("asked for")]
    assert lines == ([line] if line else [])
    found = json.loads(to_json(report))["steering"]
    assert (found["fuse"], found["only"], found["max_ops"]) == (
        steering.fuse, list(steering.only), steering.max_ops,
    )  # fmt: skip
