"""Ladders: rungs are built, compared and timed; a wrong one is found down to its group."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tests.support.onnx_models import Builder
from tvm_fuse import cli
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.core.plan_file import load
from tvm_fuse.core.rungs import NOTHING
from tvm_fuse.ladder import LadderOptions, Measured, climb_model
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.partition_pass import partition_chains
from tvm_fuse.render_ladder import render_ladder, render_rung

pytestmark = pytest.mark.relay

TARGET = "llvm -opt-level=0"


@pytest.fixture
def path(tmp_path):
    """Three layers with biases and activations."""
    b = Builder(dtype=np.float32)
    x = b.input("x", (1, 3, 6, 6))
    for index in range(3):
        x = b.relu(b.conv(x, 4, bias=True, pad=1, name=f"layer{index}"))
    file = tmp_path / "net.onnx"
    file.write_bytes(b.build([x]).SerializeToString())
    return file


@pytest.fixture
def model(path):
    return load_model(path, shapes={}, params=None)


def wrong_with(*groups):
    """Carries out plans, and adds 1 to the output where one of these groups is fused."""

    def carry_out(module, target, plan):
        made = partition_chains(module, target, plan=lambda graph: plan)
        if not {group.id for group in plan.groups}.intersection(groups):
            return made
        main = made["main"]
        body = relay.add(main.body, relay.const(1.0))
        made = tvm.IRModule.from_expr(relay.Function(main.params, body))
        return relay.transform.InferType()(made)

    return carry_out


def climb(model, carry_out=None, **options):
    return climb_model(model, TARGET, LadderOptions(repeats=5, **options), carry_out=carry_out)


def test_by_step_every_rung_is_right_and_has_fewer_kernels(model):
    ladder = climb(model)
    assert [rung.name for rung in ladder.rungs] == [
        "unfused", NOTHING, "+ bias", "+ activation", "whole plan",
    ]  # fmt: skip
    assert all(rung.passed for rung in ladder.rungs)
    kernels = [rung.kernels for rung in ladder.rungs[1:]]
    assert kernels == sorted(kernels, reverse=True)
    assert kernels[2] == kernels[0] - 2 * 3  # a bias and an activation less, in three layers
    assert (ladder.wrong, ladder.culprit, ladder.is_complete) == ("", "", True)
    assert ladder.rungs[0].speedup == {}
    assert all(rung.speedup["median"] > 0 for rung in ladder.rungs[1:])


@pytest.mark.parametrize("culprit", ["chain0", "chain1", "chain2"])
def test_a_wrong_group_is_found_among_the_others_of_its_rung(model, culprit):
    ladder = climb(model, wrong_with(culprit), by="chain", slices=1)
    assert [rung.passed for rung in ladder.rungs] == [True, True, False]
    assert ladder.wrong == "+ chain0 to chain2"
    assert ladder.culprit.startswith(f"{culprit} conv2d_bias_relu")
    assert ladder.best in ("unfused", NOTHING)
    assert ladder.best_plan.groups == ()
    text = render_ladder(ladder)
    assert "WRONG from rung '+ chain0 to chain2' on; the first group at fault: " + culprit in text


def test_the_first_wrong_rung_is_named(model):
    ladder = climb(model, wrong_with("chain1", "chain2"), by="chain", slices=3)
    assert [rung.passed for rung in ladder.rungs] == [True, True, True, False, False]
    assert (ladder.wrong, ladder.culprit.split()[0]) == ("+ chain1", "chain1")


def test_an_interrupt_keeps_the_rungs_that_are_done(model):
    done = []

    def carry_out(module, target, plan):
        if done:
            raise KeyboardInterrupt
        done.append(plan)
        return partition_chains(module, target, plan=lambda graph: plan)

    ladder = climb(model, carry_out)
    assert [rung.name for rung in ladder.rungs] == ["unfused", NOTHING]
    assert not ladder.is_complete
    assert "interrupted" in render_ladder(ladder)


def test_there_must_be_a_gpu_for_cuda(model, monkeypatch):
    monkeypatch.setattr("tvm_fuse.ladder.has_cuda_device", lambda: False)
    with pytest.raises(MissingDependency, match="there is no GPU"):
        climb_model(model, "cuda -arch=sm_80", LadderOptions())


@pytest.mark.parametrize(
    ("speedup", "is_slower"),
    [({}, False), ((0.9, 0.8, 0.95), True), ((0.9, 0.8, 0.99), False), ((1.1, 1.0, 1.2), False)],
    ids=["first", "slower", "within noise", "faster"],
)
def test_slower_is_what_three_quarters_of_the_rounds_say(speedup, is_slower):
    spread = dict(zip(("median", "quartile_1", "quartile_3"), speedup))
    rung = Measured("r", (), 1, True, 0.0, 0.0, 1e-3, spread)
    assert rung.is_slower is is_slower
    assert render_rung(rung).endswith("slower") is is_slower


def test_the_command_writes_all_forms_and_the_best_plan(path, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--target", TARGET, "--repeats", "5", "--json", "-o", "out", "--keep-best", "best.json"]
    assert cli.main(["ladder", "net.onnx", *options]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["schema"]["name"] == "tvm-fuse/ladder"
    assert json.loads((tmp_path / "out" / "ladder.json").read_text()) == found
    names = [rung["name"] for rung in found["rungs"]]
    assert [name for name in names if name not in err] == []
    assert [name for name in names if name not in (tmp_path / "out" / "ladder.txt").read_text()] == []
    assert len(list(ET.fromstring((tmp_path / "out" / "ladder.svg").read_text()))) == 4 + 3 * len(names)
    assert found["best"] in names
    assert load(tmp_path / "best.json").target.startswith("llvm")
    assert cli.main(["run", "net.onnx", "--no-latency", "--target", TARGET, "--fuse", "best.json"]) == 0
