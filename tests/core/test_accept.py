"""What pays on which device: the cases that the planner asks about, and constructed ones that must lose."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.extensions import exponential, gate_case, prologue_case, scaled
from tests.support.graphs import GraphBuilder
from tvm_fuse.core.accept import accept_on, compare_extension, compare_group
from tvm_fuse.core.plan import FusionGroup
from tvm_fuse.core.plan_options import Candidate, Extension
from tvm_fuse.core.reason import Code
from tvm_fuse.core.targets import DEVICES

GPUS = [pytest.param(DEVICES[name], id=name) for name in ("t4", "a100", "h200")]


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(
    ("channels", "rows", "size"),
    [(32, 16, 112), (96, 24, 56), (240, 40, 28), (480, 112, 14), (672, 192, 7), (1152, 320, 7)],
    ids=str,
)
def test_excite_multiply_joins_the_next_layer(device, channels, rows, size):
    """The blocks of EfficientNet-B0."""
    graph, candidate = prologue_case(scaled, channels, rows, size)
    assert accept_on(device)(graph, candidate) is None
    assert compare_extension(graph, candidate).saved_s(device) > 0.5 * device.launch_s


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(("channels", "hidden"), [(32, 8), (144, 6), (480, 20), (672, 28)], ids=str)
def test_gate_joins(device, channels, hidden):
    graph, candidate = gate_case(channels, hidden)
    assert accept_on(device)(graph, candidate) is None


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(
    ("graph", "candidate"),
    [
        pytest.param(*prologue_case(exponential, 512, 512, 56, kernel=3), id="exp before many rows"),
        pytest.param(*gate_case(4096, 1024), id="large gate"),
    ],
)
def test_loses(device, graph, candidate):
    reason = accept_on(device)(graph, candidate)
    assert reason.code is Code.FUSION_COSTS_TIME
    assert reason.at == str(graph.nodes[candidate.added[-1]])
    compared = compare_extension(graph, candidate)
    assert f"{1e6 * compared.apart_s(device):.1f} us" in reason.wanted
    assert device.name in reason.wanted
    assert f"{1e6 * compared.together_s(device):.1f} us" in reason.got


def test_the_same_before_few_rows_pays():
    """What loses is the number of times, not the exponential."""
    graph, candidate = prologue_case(exponential, 512, 32, 56)
    assert accept_on(DEVICES["a100"])(graph, candidate) is None


def test_recomputing_saves_a_share():
    """Of two readers each is charged half of the kernel that both would make unnecessary."""
    g = GraphBuilder("float32")
    x = g.input("x", (1, 8, 16, 16))
    shared = g.relu(x)
    one, two = g.tanh(shared), g.sigmoid(shared)
    graph = g.build(one, two)
    candidate = Candidate(Extension.RECOMPUTE, "elementwise", None, (one,), (shared,), kernels=2)
    compared = compare_extension(graph, candidate)
    assert compared.apart[1].launches == 0.5
    assert compared.apart[1].dram_write_bytes == 8 * 256 * 4 // 2
    assert compared.together.dram_write_bytes == 8 * 256 * 4, "what is computed again is not written"
    assert accept_on(DEVICES["a100"])(graph, candidate) is None


def test_parallel_readers_read_once():
    g = GraphBuilder("float32")
    x = g.input("x", (1, 8, 16, 16))
    one, two = g.tanh(x), g.sigmoid(x)
    graph = g.build(one, two)
    candidate = Candidate(Extension.PARALLEL, "elementwise", None, (one,), (two,))
    compared = compare_extension(graph, candidate)
    assert compared.together.dram_read_bytes == 8 * 256 * 4
    assert sum(cost.dram_read_bytes for cost in compared.apart) == 2 * 8 * 256 * 4
    assert compared.together.dram_write_bytes == 2 * 8 * 256 * 4


@pytest.mark.parametrize("device", GPUS)
def test_a_group_against_its_operators(device):
    """Bias and activation: two launches and four times the result less."""
    g = GraphBuilder("float32")
    x = g.input("x", (1, 8, 16, 16))
    conv = g.conv2d(x, np.zeros((4, 8, 3, 3), "float32"), padding=(1, 1))
    bias = g.add(conv, g.const(np.zeros((4, 1, 1), "float32")))
    out = g.relu(bias)
    graph = g.build(out)
    group = FusionGroup("conv2d_bias_relu", "conv2d", conv, (conv, bias, out), out, ())
    compared = compare_group(graph, group)
    assert sum(cost.launches for cost in compared.apart) - compared.together.launches == 2
    apart_bytes = sum(cost.dram_bytes for cost in compared.apart)
    assert apart_bytes - compared.together.dram_bytes == 4 * 4 * 256 * 4
    assert compared.saved_s(device) > 2 * device.launch_s
