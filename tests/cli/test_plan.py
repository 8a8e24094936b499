"""``tvm-fuse plan`` and ``explain``, the options that steer a plan, and the gates of CI, on whole files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.cli.test_run import net, stubborn_net
from tests.support.onnx_models import Builder
from tvm_fuse import cli

pytestmark = pytest.mark.relay


def two_layers():
    """Two convolutions, each fused with its bias and its activation."""
    b = Builder(dtype=np.float32)
    x = b.input("x", (1, 3, 6, 6))
    first = b.relu(b.conv(x, 4, name="first", bias=True))
    return b.build([b.relu(b.conv(first, 4, name="second", bias=True), name="y")])


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """``call(command, model, *options)``: exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(command, model, *options):
        (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
        quick = ("--no-latency",) if command == "run" else ()
        capfd.readouterr()
        code = cli.main([command, "net.onnx", *quick, *options])
        return (code, *capfd.readouterr())

    return run


# --- plan ------------------------------------------------------------------------------------------


def test_plan_shows_kernels_and_reasons(call):
    code, out, _ = call("plan", stubborn_net(), "--target", "cuda -arch=sm_80")
    assert code == 0
    assert "1 of 2 convolutions and dense layers fused, 1 kernels planned; 0 of 1 batch norms folded" in out
    (row,) = [line for line in out.splitlines() if line.startswith("chain0 ")]
    assert row.split()[1:4] == ["conv2d_relu_scale_bias", "first", "4"]
    assert "not fused: lonely: result-returned at lonely" in out
    assert "not folded: late_bn: bn-after-activation" in out
    assert "estimated at the peaks of A100" in out


def test_plan_as_json(call):
    code, out, _ = call("plan", stubborn_net(), "--target", "cuda -arch=sm_80", "--json", "--max-ops", "2")
    found = json.loads(out)
    assert (code, found["schema"]["name"], found["steering"]["max_ops"]) == (0, "tvm-fuse/plan-report", 2)
    group, rest = found["groups"]
    assert group["operators"] == ["nn.conv2d", "nn.relu"]
    assert rest["operators"] == ["multiply", "add"]
    # a relu of 1x4x4x4 apart reads and writes 64 floats more
    assert group["saved_bytes"] == 2 * 64 * 4
    assert group["saved_s"] > 0
    assert [decision["at"] for decision in found["not_fused"]] == ["lonely"]


def test_a_plan_is_saved_carried_out_and_compared(call, tmp_path):
    assert call("plan", two_layers(), "-o", "all.json", "--save-plan", "b.json")[0] == 2
    assert call("plan", two_layers(), "-o", "all.json")[0] == 0
    written = (tmp_path / "all.json").read_bytes()
    code, out, _ = call("run", two_layers(), "--fuse", "all.json", "--save-plan", "again.json")
    assert (code, (tmp_path / "again.json").read_bytes()) == (0, written)
    assert "asked for: --fuse file" in out
    assert call("plan", two_layers(), "--diff", "all.json")[1].endswith("the same plan\n")
    code, out, _ = call("plan", two_layers(), "--skip", "second", "--diff", "all.json", "--json")
    assert code == 0
    assert json.loads(out)["steering"]["skip"] == ["second"]


# --- steering --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ([], ["first", "second"]),
        (["--fuse", "none"], []),
        (["--only", "first"], ["first"]),
        (["--skip", "chain0"], ["second"]),
        (["--skip", "conv2d*"], []),
        (["--max-ops", "1"], []),
    ],
    ids=["all", "none", "only", "skip an id", "skip a pattern", "max ops"],
)
def test_run_does_what_is_asked_and_stays_right(call, options, fused):
    code, out, _ = call("run", two_layers(), "--json", *options)
    report = json.loads(out)
    assert code == 0
    assert report["parity"]["passed"]
    assert [chain["anchor"] for chain in report["chains"]] == fused
    # what is left out stays a kernel of its own: TVM does not fuse it again
    assert report["fused"]["kernels"] >= 2 * 3 - 2 * len(fused)


@pytest.mark.cuda_codegen
def test_kernels_and_export_take_the_same_options(call, tmp_path):
    target = ("--target", "cuda -arch=sm_80")
    counts = []
    for options in ([], ["--fuse", "none", "--save-plan", "none.json"]):
        code, out, _ = call("kernels", two_layers(), "--json", *target, *options)
        assert code == 0
        counts.append(sum(kernel["calls"] for kernel in json.loads(out)["kernels"]))
    assert counts == [2, 6]
    code, _, _ = call("export", two_layers(), "-o", "bundle", *target, "--fuse", "none.json")
    assert code == 0
    document = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert len(document["operators"]) == 6


ERRORS = {
    "neither a mode nor a file": (["--fuse", "some"], 2, ["--fuse some", "all, none"]),
    "a file and a pattern": (["--fuse", "plan.json", "--skip", "first"], 2, ["plan.json", "--skip"]),
    "no such chain": (["--only", "firts"], 2, ["'firts'", "first"]),
    "a folder": (["--save-plan", "."], 2, ["--save-plan", "folder"]),
    "no such folder": (["--save-plan", "there/plan.json"], 2, ["there"]),
    "no plan": (["--fuse", "net.onnx"], 2, ["net.onnx"]),
    "no such plan": (["--expect-plan", "nowhere.json"], 2, ["nowhere.json"]),
    "a stale plan": (["--fuse", "stale.json"], 3, ["stale", "node", "was", "is"]),
    "another target": (["--fuse", "plan.json", "--target", "llvm -opt-level=0"], 3, ["stale", "target was"]),
}


@pytest.mark.parametrize(("options", "code", "words"), ERRORS.values(), ids=ERRORS)
def test_errors(call, options, code, words):
    assert call("plan", two_layers(), "--save-plan", "plan.json")[0] == 0
    assert call("plan", net(), "--save-plan", "stale.json")[0] == 0
    got, out, err = call("plan", two_layers(), *options)
    assert (got, out) == (code, "")
    assert [word for word in words if word not in err] == []


def test_no_operators_are_a_usage_error(call, capfd):
    with pytest.raises(SystemExit) as caught:
        call("plan", two_layers(), "--max-ops", "0")
    assert caught.value.code == 2
    assert "--max-ops: '0': wanted a whole number >= 1" in capfd.readouterr().err


# --- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "explain", "run"])
def test_too_few_fused_anchors_are_exit_code_6(call, command):
    assert call(command, stubborn_net(), "--expect-fused", "1")[0] == 0
    code, out, err = call(command, stubborn_net(), "--expect-fused", "2")
    assert code == 6
    assert "lonely" in out  # the report comes all the same
    assert "--expect-fused: wanted at least 2 fused convolutions and dense layers, got 1" in err
    assert "\n  lonely: chain-no-epilogue" in err


@pytest.mark.parametrize("command", ["plan", "explain", "run"])
def test_another_plan_is_exit_code_6_with_the_difference(call, command):
    assert call("plan", two_layers(), "--save-plan", "plan.json")[0] == 0
    assert call(command, two_layers(), "--expect-plan", "plan.json")[0] == 0
    code, _, err = call(command, two_layers(), "--expect-plan", "plan.json", "--max-ops", "2")
    assert code == 6
    assert "\n  - chain0 conv2d_bias_relu (" in err
    assert "\n  + chain0 conv2d_bias (" in err


# --- explain ---------------------------------------------------------------------------------------


def test_explain_shows_anchors_and_batch_norms(call):
    code, out, _ = call("explain", stubborn_net(), "--target", "cuda -arch=sm_80")
    assert code == 0
    assert "1 of 2 convolutions and dense layers fused" in out
    assert "what stopped layers and batch norms: bn-after-activation 1 x, result-returned 1 x" in out
    folded, fused, alone = out.split("\n\n")[1:]
    assert folded.startswith("batch norm late_bn: not folded\n  epsilon 1e-05 (source attribute)")
    assert "fused in chain0 conv2d_relu_scale_bias\n  with relu_1 (relu)" in fused
    assert "wanted a value only the chain reads\n    got    a model output" in alone
    assert "hint: the value is an output of the model" in alone


@pytest.mark.parametrize(
    ("node", "names"),
    [
        ("lonely", ["lonely"]),
        ("l*", ["late_bn", "lonely"]),
        ("#2", ["first"]),
        ("nn.conv2d#2", ["first"]),
        ("relu_1", ["relu_1"]),
    ],
)
def test_explain_one_node(call, node, names):
    code, out, _ = call("explain", stubborn_net(), node, "--target", "cuda -arch=sm_80", "--json")
    found = json.loads(out)
    assert (code, found["schema"]["name"]) == (0, "tvm-fuse/explanation")
    assert [site["name"] for site in found["sites"]] == names


def test_explain_names_what_comes_near(call):
    code, out, err = call("explain", stubborn_net(), "lonly")
    assert (code, out) == (2, "")
    assert "'lonly'" in err
    assert "the nearest: lonely" in err


def test_explain_a_folded_batch_norm(call):
    code, out, _ = call("explain", net(), "bn")
    assert code == 0
    assert "batch norm bn: folded\n  epsilon 0.001 (source attribute)\n  into conv (before it)" in out


def side_by_side():
    """Two 1x1 convolutions on one input become one on CUDA; a 3x3 one beside them stays."""
    b = Builder(dtype=np.float32)
    x = b.input("x", (1, 16, 8, 8))
    ones = [b.relu(b.conv(x, 8, kernel=1, name=f"one{index}")) for index in range(2)]
    other = b.relu(b.conv(x, 8, kernel=3, pad=1, name="other"))
    return b.build([b.op("Concat", *ones, axis=1), other])


def test_layers_side_by_side_are_explained(call):
    target = ("--target", "cuda -arch=sm_80")
    code, out, _ = call("explain", side_by_side(), "other", *target, "--json")
    assert code == 0
    (site,) = json.loads(out)["sites"]
    assert [line.split(" ")[0] for line in site["beside"]] == ["siblings-differ"]
    code, out, _ = call("explain", side_by_side(), *target)
    assert "  side by side: 2 layers become one: one0, one1" in out
    assert "side by side: one0: 2 layers become one: one0, one1" in call("plan", side_by_side(), *target)[1]


def attention():
    """Four heads, with scale and mask, as exporters write it."""
    b = Builder(dtype=np.float32)
    queries, keys, values = (b.input(name, (1, 4, 32, 16)) for name in ("q", "k", "v"))
    mask = b.input("mask", (1, 1, 1, 32))
    scores = b.op("MatMul", queries, b.op("Transpose", keys, perm=[0, 1, 3, 2]), name="scores")
    scores = b.op("Add", b.op("Mul", scores, b.const(np.float32(0.25)), name="scaled"), mask, name="masked")
    return b.build([b.op("MatMul", b.op("Softmax", scores, axis=-1, name="soft"), values, name="mixed")])


@pytest.mark.parametrize(
    ("target", "verdict", "why"),
    [
        (
            "cuda -arch=sm_80",
            "fused in chain1 multiply_add_softmax",
            "wanted less read again than one kernel",
        ),
        (
            "llvm",
            "not fused",
            "wanted a schedule for two products and the softmax between them, got none for cpu",
        ),
    ],
    ids=["cuda", "llvm"],
)
def test_an_attention_says_why_it_is_not_one_kernel(call, target, verdict, why):
    code, out, _ = call("explain", attention(), "soft", "--target", target)
    assert code == 0
    assert f"nn.softmax#12 soft: {verdict}" in out
    if target != "llvm":
        assert "with scores (on the way in), scaled (on the way in), masked (on the way in)" in out
    assert f"  not part of a larger kernel: attention-in-parts at soft: {why}" in out
    _, out, _ = call("explain", attention(), "nn.batch_matmul#*", "--target", target)
    assert out.count("attention-in-parts") == 2
    _, out, _ = call("plan", attention(), "--target", target)
    assert "kernels that are not part of a larger one: attention-in-parts 1 x; explain shows each" in out
    _, out, _ = call("plan", attention(), "--target", target, "--json")
    assert [decision["reason"]["code"] for decision in json.loads(out)["not_joined"]] == [
        "attention-in-parts"
    ]
