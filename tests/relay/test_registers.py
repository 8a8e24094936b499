"""Chains that need too many registers are cut in two: decisions on made-up figures, and compiled ones."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.relay_graphs import LLVM, Net, feeds, relay, run, run_unfused
from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.reason import Code
from tvm_fuse.cuda.resources import KernelResources

build = Lazy("tvm_fuse.relay.build")
kernels = Lazy("tvm_fuse.relay.kernels")
layout_pass = Lazy("tvm_fuse.relay.layout_pass")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
pass_record = Lazy("tvm_fuse.relay.record")
register_split = Lazy("benchmarks.register_split")
registers = Lazy("tvm_fuse.relay.registers")
target = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CUDA = "cuda -arch=sm_80"
COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "register_split.json"


def silus(count, channels=8, size=14):
    """A convolution with ``count`` times ``x * sigmoid(x)`` after it."""
    net = Net()
    value = net.conv2d(net.input("x", (1, channels, size, size)), channels)
    for _ in range(count):
        value = relay.multiply(value, relay.sigmoid(value))
    return net.module(value)


def sweeps(count, shape=(1, 8, 16, 16)):
    """``sigmoid(y + x)`` for ``count`` tensors from the first to the last, and back: elementwise alone."""
    net = Net()
    data = [net.input(f"x{index}", shape) for index in range(count)]
    value = data[0]
    for other in (*data[1:], *reversed(data)):
        value = relay.sigmoid(relay.add(value, other))
    return net.module(value)


def partition(module, on=CUDA):
    """The partitioned module, its groups, and what was found about registers."""
    resolved, found = target.resolve_target(on), []

    def refine(read, plan):
        plan, records = registers.split_spilling_groups(read, plan, resolved)
        found.append((plan, records))
        return plan

    laid_out = layout_pass.decide_layout(module, resolved)
    module = partition_pass.partition_chains(laid_out, resolved, refine=refine)
    ((plan, records),) = found
    return module, plan, records


def resources(spill_bytes=0, occupancy=0.5):
    return KernelResources("k", "sm_80", 72, spill_bytes, 0, spill_bytes, 0, 0, 0, 64, 4, occupancy, ())


@pytest.fixture
def measured(monkeypatch):
    """Says what kernels use, from the number of their activations and whether they have the anchor."""
    asked = []

    def use(figures):
        def measure(function, on):
            text = str(function)
            asked.append((text.count("sigmoid(%"), "nn.conv2d(%" in text))
            return (figures(*asked[-1]),)

        monkeypatch.setattr("tvm_fuse.relay.registers._measure", measure)
        return asked

    return use


def test_cut_where_it_no_longer_spills(measured):
    asked = measured(lambda steps, has_anchor: resources(12 * (has_anchor and steps > 2)))
    _, plan, (record,) = partition(silus(7))
    assert [group.name for group in plan.groups] == ["conv2d_silu_silu", "elementwise"]
    assert [group.id for group in plan.groups] == ["chain0", "chain0.rest"]
    assert plan.groups[0].end.code is Code.REGISTERS_SPILL
    assert record.decision.applied
    assert "12 bytes spilled" in record.decision.detail
    assert "conv2d_silu_silu | elementwise" in record.decision.detail
    assert record.chosen == len(record.candidates) - 1
    assert [candidate.spill_bytes for candidate in record.candidates] == [12, 12, 12, 0]
    assert record.groups == plan.groups
    assert len(asked) == len(set(asked))  # nothing is compiled twice
    chain = next(decision for decision in plan.decisions if decision.rule == "chain")
    assert chain.detail.startswith("conv2d_silu_silu; ends: registers-spill")


def test_a_chain_that_is_well_stays_whole(measured):
    asked = measured(lambda steps, has_anchor: resources())
    _, plan, (record,) = partition(silus(7))
    assert len(plan.groups) == 1
    assert record.chosen == 0
    assert "kept whole" in record.decision.detail
    assert asked == [(7, True)]


def test_what_is_not_suspicious_is_not_compiled(measured):
    asked = measured(lambda steps, has_anchor: resources(12))
    assert partition(silus(2))[2] == ()
    assert asked == []


def test_an_anchor_that_spills_by_itself_is_not_cut(measured):
    asked = measured(lambda steps, has_anchor: resources(8 * has_anchor))
    _, plan, (record,) = partition(silus(7))
    assert len(plan.groups) == 1
    assert record.decision.reason.code is Code.REGISTERS_SPILL
    assert "its anchor alone" in record.decision.reason.got
    assert len(asked) == 2


def test_no_cut_helps(measured):
    measured(lambda steps, has_anchor: resources(8 * (steps > 0)))
    _, plan, (record,) = partition(silus(6))
    assert len(plan.groups) == 1
    assert record.chosen == 0
    assert "no cut of 6 does better" in record.decision.reason.got
    assert not record.decision.applied


@pytest.mark.parametrize("most", [59, 45])
def test_an_elementwise_group_is_cut_by_bisection(measured, most):
    """Neither part of the cut that is taken spills; of each cheaper one that was tried, one does."""
    measured(lambda steps, has_anchor: resources(12 * (steps > most)))
    _, plan, (record,) = partition(sweeps(32))
    assert [group.id for group in plan.groups] == ["chain0", "chain0.rest"]
    sizes = [max(g.operators.count("sigmoid") for g in c.groups) for c in record.candidates]
    assert sizes[record.chosen] == most
    assert most + 1 in sizes  # the next cheaper cut
    assert len(sizes) <= 2 + math.log2(sizes[0])
    chosen = record.candidates[record.chosen]
    assert chosen.spill_bytes == 0
    cheaper = [candidate for candidate in record.candidates if candidate.extra_bytes < chosen.extra_bytes]
    assert all(candidate.spill_bytes for candidate in cheaper)
    assert f"instead: {chosen}" in record.decision.detail
    decision = next(decision for decision in plan.decisions if decision.rule == "elementwise")
    assert decision.detail.startswith("elementwise; ends: result-returned")
    assert plan.groups[0].end.code is Code.REGISTERS_SPILL


def test_elementwise_groups_that_stay_whole(measured):
    """Where no kernel spills, and where every cut does; one with few warps is not looked at again."""
    measured(lambda steps, has_anchor: resources(occupancy=0.1))
    _, plan, (record,) = partition(sweeps(32))
    assert (len(plan.groups), len(record.candidates)) == (1, 1)
    assert "kept whole" in record.decision.detail
    measured(lambda steps, has_anchor: resources(12))
    _, plan, (record,) = partition(sweeps(32))
    assert (len(plan.groups), record.chosen) == (1, 0)
    assert "does better" in record.decision.reason.got
    assert not record.decision.applied


@pytest.mark.parametrize(
    ("whole", "alone", "is_cut"), [(0.2, 0.45, True), (0.2, 0.35, False), (0.3, 0.9, False)], ids=str
)
def test_a_cliff_of_occupancy(measured, whole, alone, is_cut):
    """Below a quarter of all warps and below half of what the anchor has."""
    measured(lambda steps, has_anchor: resources(occupancy=whole if has_anchor and steps > 3 else alone))
    _, plan, (record,) = partition(silus(7))
    assert (len(plan.groups) == 2) is is_cut
    if is_cut:
        assert plan.groups[0].end.code is Code.OCCUPANCY_DROPS
        assert record.candidates[record.chosen].occupancy_ratio == alone


@pytest.mark.parametrize("error", [MissingDependency, ToolFailed, UsageError])
def test_without_nvrtc_the_estimate_decides(monkeypatch, error):
    def missing(function, on):
        raise error("NVRTC is not installed")

    monkeypatch.setattr("tvm_fuse.relay.registers._measure", missing)
    _, plan, (record,) = partition(silus(7))
    assert len(plan.groups) == 1
    assert "estimated 74 registers of 255, not measured: NVRTC is not installed" in record.decision.detail
    _, plan, (record,) = partition(sweeps(60))
    assert len(plan.groups) == 2
    assert plan.groups[0].end.code is Code.REGISTERS_SPILL
    assert "estimated 71 registers of 64, not measured" in record.decision.detail
    assert "not compiled" in record.decision.detail
    monkeypatch.setattr("tvm_fuse.core.pressure.MOST_REGISTERS", 73)
    assert len(partition(silus(7))[1].groups) == 2


def test_other_targets_have_no_registers_to_measure(measured):
    asked = measured(lambda steps, has_anchor: resources(12))
    assert partition(silus(7), "llvm")[2] == ()
    assert asked == []


def test_a_plan_that_was_given_is_carried_out_as_it_is(measured):
    asked = measured(lambda steps, has_anchor: resources(12))
    resolved = target.resolve_target(CUDA)
    laid_out = layout_pass.decide_layout(silus(7), resolved)
    refine = registers.refine_on(resolved)
    partition_pass.partition_chains(laid_out, resolved, plan=plan_chains, refine=refine)
    assert asked == []
    partition_pass.partition_chains(laid_out, resolved, refine=refine)
    assert len(asked) == 2
    assert "0 of 1 suspicious groups cut" in pass_record.last_report()["SplitChains"].summary


def test_parity_of_a_chain_in_two_parts(measured):
    measured(lambda steps, has_anchor: resources(12 * (has_anchor and steps > 2)))
    module = silus(7)
    split, plan, _ = partition(module)
    assert len(plan.groups) == 2
    inputs = feeds(module)
    (got,) = run(build.build_fused(split, target.resolve_target(LLVM)).library, inputs)
    (expected,) = run_unfused(module, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_parity_of_an_elementwise_group_in_two_parts(measured):
    measured(lambda steps, has_anchor: resources(12 * (steps > 30)))
    module = sweeps(24)
    split, plan, _ = partition(module)
    assert len(plan.groups) == 2
    inputs = feeds(module)
    (got,) = run(build.build_fused(split, target.resolve_target(LLVM)).library, inputs)
    (expected,) = run_unfused(module, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_measured_by_the_compiler():
    """The figures of one group are those of its only kernel, in any model that holds it."""
    module = silus(2)
    resolved, found = target.resolve_target(CUDA), []

    def refine(read, plan):
        found.extend(registers.measure_group(read, group, resolved) for group in plan.groups)
        return plan

    partition_pass.partition_chains(layout_pass.decide_layout(module, resolved), resolved, refine=refine)
    (((kernel,)),) = found
    assert kernel.arch == "sm_80"
    assert 16 < kernel.registers_per_thread < 255
    assert kernel.threads_per_block >= 32
    assert kernel.occupancy_ratio > 0


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text(encoding="utf-8"))["results"]["groups"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_committed_figures_say_why(committed, arch):
    """Whole, the sum before the convolution leaves an eighth of the warps; cut, more than twice as many."""
    row = committed["sum"][arch]
    (whole,) = row["whole"]["kernels"]
    first, second = row["tried"][row["chosen"] - 1]["kernels"]
    assert whole["registers"] > 2 * second["registers"] > 2 * first["registers"]
    assert whole["occupancy"] < 0.25 < min(first["occupancy"], second["occupancy"])
    assert "occupancy-drops" in row["decision"]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_the_committed_figures_show_spills_that_a_cut_ends(committed, arch):
    """Whole, the sweeps spill; of the two kernels of the plan none does, of each cheaper cut one does."""
    row = committed["sweeps"][arch]
    (whole,) = row["whole"]["kernels"]
    assert whole["spill_store_bytes"] > 0
    assert whole["spill_load_bytes"] > 0
    chosen = row["tried"][row["chosen"] - 1]
    assert [spill_bytes(kernel) for kernel in chosen["kernels"]] == [0, 0]
    cheaper = [cut for cut in row["tried"] if cut["extra_dram_bytes"] < chosen["extra_dram_bytes"]]
    assert cheaper
    assert all(sum(map(spill_bytes, cut["kernels"])) > 0 for cut in cheaper)
    assert "registers-spill" in row["decision"]


def spill_bytes(kernel):
    return kernel["spill_store_bytes"] + kernel["spill_load_bytes"]


def test_a_real_group_is_cut_and_computes_the_same():
    """Compiled by NVRTC, not made up; the whole plan is then built for the CPU."""
    module = register_split.make_sum()
    split, plan, (record,) = partition(module)
    assert [group.name for group in plan.groups] == ["elementwise", "conv2d_relu"]
    assert plan.groups[0].end.code is Code.OCCUPANCY_DROPS
    assert record.candidates[0].kernels[0].registers_per_thread > 200
    inputs = feeds(module)
    (got,) = run(build.build_fused(split, target.resolve_target(LLVM)).library, inputs)
    (expected,) = run_unfused(module, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [*itertools.product(["sum", "activations"], ["sm_75", "sm_80", "sm_90"]), ("sweeps", "sm_80")],
)
def test_the_committed_figures_again(committed, name, arch):
    """When schedules or the compiler change: ``python benchmarks/register_split.py``."""
    assert register_split.run_group(name, arch) == committed[name][arch]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "sweeps"])
def test_the_cut_group_computes_the_same_on_the_emulator(name):
    module = register_split.GROUPS[name]()
    split, plan, _ = partition(module)
    assert len(plan.groups) == 2
    inputs = feeds(module)
    (got,), ran = run_emulated(kernels.build_kernels(split, target.resolve_target(CUDA)), inputs)
    assert len(ran) == 2
    (expected,) = run_unfused(module, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
