"""Register pressure without a compiler, and where chains can be cut."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.pressure import (
    MOST_REGISTERS,
    estimate_cut,
    estimate_pressure,
    find_cuts,
    is_suspicious,
    most_registers,
)


def chain(spell, steps, dtype="float32"):
    """A convolution with ``steps`` times ``spell(builder, value)`` after it: the graph and its one group."""
    g = GraphBuilder(dtype)
    value = g.conv2d(g.input("x", (1, 4, 8, 8)), np.zeros((4, 4, 1, 1), dtype))
    for _ in range(steps):
        value = spell(g, value)
    graph = g.build(value)
    (group,) = plan_chains(graph).groups
    return graph, group


def silu(g, x):
    return g.multiply(x, g.sigmoid(x))


def ladder(height):
    """``height`` sigmoids in a row, then the product of all values on the way, the last first."""

    def spell(g, x):
        values = [x]
        for _ in range(height):
            values.append(g.sigmoid(values[-1]))
        result = values.pop()
        while values:
            result = g.multiply(result, values.pop())
        return result

    return spell


@pytest.mark.parametrize(
    ("spell", "steps", "live", "evaluations"),
    [
        (lambda g, x: g.relu(x), 3, 1, 3),
        (silu, 1, 2, 2),
        (silu, 3, 2, 2 + 4 + 8),
        (ladder(3), 1, 4, 3 + (1 + 2 + 3)),
        (ladder(7), 1, 8, 7 + sum(range(1, 8))),
    ],
    ids=["relu x 3", "silu", "silu x 3", "ladder of 3", "ladder of 7"],
)
def test_estimate(spell, steps, live, evaluations):
    """A silu reads its value twice, so each one doubles what TVM computes before it."""
    pressure = estimate_pressure(*chain(spell, steps))
    assert (pressure.live_values, pressure.evaluations) == (live, evaluations)
    assert pressure.registers == 40 + 32 + live


def test_double_precision_takes_two_registers():
    single, double = (estimate_pressure(*chain(silu, 1, dtype)) for dtype in ("float32", "float64"))
    assert double.registers - 40 == 2 * (single.registers - 40)
    assert double.registers < MOST_REGISTERS


@pytest.mark.parametrize(
    ("spell", "steps", "expected"),
    [
        (silu, 1, False),
        (silu, 3, False),
        (silu, 5, True),
        (silu, 7, True),
        (ladder(4), 1, False),
        (ladder(5), 1, True),
        (lambda g, x: g.relu(x), 12, False),
    ],
    ids=["silu", "silu x 3", "silu x 5", "silu x 7", "ladder of 4", "ladder of 5", "relu x 12"],
)
def test_suspicious(spell, steps, expected):
    """Much code, or many values at one time; not length."""
    assert is_suspicious(*chain(spell, steps)) is expected


def test_cuts():
    graph, group = chain(silu, 3)
    cuts = find_cuts(graph, group)
    value = 4 * 64 * 4
    assert [cut.extra_bytes for cut in cuts] == [2 * value] * 3  # written and read again
    for cut in cuts:
        assert {*cut.first.nodes, *cut.rest.nodes} == set(group.nodes)
        assert not {*cut.first.nodes} & {*cut.rest.nodes}
        assert cut.first.anchor == group.anchor
        assert cut.rest.anchor is None
        assert (cut.rest.result, cut.rest.end) == (group.result, group.end)
        assert graph.readers(cut.first.result)[0] in cut.rest.nodes
    assert [len(cut.first.steps) for cut in cuts] in ([1, 2, 0], [2, 1, 0])  # even ones first
    assert cuts[0].first.id == group.id


def test_the_cheapest_edge_is_the_narrowest():
    """After a cast to half precision the value has half of the bytes."""
    g = GraphBuilder("float32")
    value = g.conv2d(g.input("x", (1, 4, 8, 8)), np.zeros((4, 4, 1, 1), "float32"))
    half = g.cast(g.relu(value), "float16")
    g.dtype = "float16"
    graph = g.build(g.tanh(half))
    (group,) = plan_chains(graph).groups
    first = find_cuts(graph, group)[0]
    assert first.first.result == half
    assert first.extra_bytes == 2 * 4 * 64 * 2


def test_operands_that_both_parts_read_count_twice():
    g = GraphBuilder("float32")
    value = g.conv2d(g.input("x", (1, 4, 8, 8)), np.zeros((4, 4, 1, 1), "float32"))
    other = g.input("r", (1, 4, 8, 8))
    graph = g.build(g.tanh(g.add(g.sigmoid(g.add(value, other)), other)))
    (group,) = plan_chains(graph).groups
    extra = {len(cut.first.steps): cut.extra_bytes for cut in find_cuts(graph, group)}
    value_bytes = 4 * 64 * 4
    assert extra[0] == 2 * value_bytes
    assert extra[1] == extra[2] == 3 * value_bytes
    assert extra[3] == 2 * value_bytes
    best = find_cuts(graph, group)[0]
    assert best.extra_bytes == 2 * value_bytes


def sum_before(count):
    """A convolution that reads a sum of ``count`` inputs, with a relu after it."""
    g = GraphBuilder("float32")
    value, *others = (g.input(f"x{index}", (1, 4, 8, 8)) for index in range(count))
    for other in others:
        value = g.add(value, other)
    conv = g.conv2d(value, np.zeros((16, 4, 1, 1), "float32"))
    graph = g.build(g.relu(conv))
    (group,) = plan_chains(graph, PlanOptions(target="cuda")).groups
    return graph, group


def test_operands_before_the_anchor():
    graph, group = sum_before(6)
    pressure = estimate_pressure(graph, group)
    assert pressure.operands == 6
    assert pressure.registers == 40 + 32 + 1 + 16 * 5
    assert is_suspicious(graph, group)
    assert not is_suspicious(*sum_before(4))


def test_a_cut_before_the_anchor():
    """The sum has a quarter of the result's elements, so that it is the cheapest to put into memory."""
    graph, group = sum_before(6)
    before, *steps = find_cuts(graph, group)
    assert before.first.anchor is None
    assert before.first.nodes == group.prologue
    assert before.rest.anchor == group.anchor
    assert before.rest.steps == group.steps
    assert before.rest.prologue == ()
    assert {*before.first.nodes, *before.rest.nodes} == set(group.nodes)
    assert before.extra_bytes == 2 * 4 * 64 * 4
    assert [cut.first.anchor for cut in steps] == [group.anchor]


def sweeps(count, shape=(1, 16, 8, 8), dtype="float32"):
    """``relu(y + x)`` for ``count`` inputs from the first to the last, and back: one elementwise group."""
    g = GraphBuilder(dtype)
    data = [g.input(f"x{index}", shape) for index in range(count)]
    value = data[0]
    for other in (*data[1:], *reversed(data)):
        value = g.relu(g.add(value, other))
    return elementwise(g, value)


def elementwise(g, *values):
    """A graph and its one group, which is elementwise."""
    graph = g.build(*values)
    (group,) = plan_chains(graph, PlanOptions(target="cuda")).groups
    assert group.anchor is None
    return graph, group


def summed(count):
    """The sum of ``count`` inputs: each is needed once."""
    g = GraphBuilder("float32")
    value, *others = (g.input(f"x{index}", (1, 16, 8, 8)) for index in range(count))
    for other in others:
        value = g.add(value, other)
    return elementwise(g, value)


def concatenated(count):
    """``count`` activations in a row: a thread computes one of them."""
    g = GraphBuilder("float32")
    return elementwise(
        g, g.concatenate(*(g.tanh(g.input(f"x{index}", (1, 4, 8, 8))) for index in range(count)))
    )


def scaled_sweeps(count):
    """As ``sweeps``, of one tensor and numbers, which are part of the code."""
    g = GraphBuilder("float32")
    value = g.input("x", (1, 16, 8, 8))
    numbers = [g.const(np.float32(index)) for index in range(count)]
    for number in (*numbers, *reversed(numbers)):
        value = g.relu(g.add(value, number))
    return elementwise(g, value)


@pytest.mark.parametrize(
    ("made", "live", "most", "expected"),
    [
        (sweeps(20), 21, 64, False),
        (sweeps(22), 23, 64, True),
        (sweeps(22, (2, 64)), 23, MOST_REGISTERS, False),
        (sweeps(22, (4, 128)), 23, 128, False),
        (summed(60), 1, 64, False),
        (concatenated(60), 1, 64, False),
        (scaled_sweeps(40), 1, 64, False),
    ],
    ids=[
        "20 tensors",
        "22 tensors",
        "128 threads",
        "512 threads",
        "needed once",
        "concatenation",
        "numbers",
    ],
)
def test_elementwise_operators(made, live, most, expected):
    """Suspicious when they may need half of the registers that their block leaves a thread."""
    pressure = estimate_pressure(*made)
    assert (pressure.live_values, pressure.registers, most_registers(*made)) == (live, 10 + live, most)
    assert is_suspicious(*made) is expected


def test_an_elementwise_group_is_cut_where_one_value_passes():
    """What both parts read is read twice; a cut that costs more must need fewer registers."""
    graph, group = sweeps(64)
    assert estimate_pressure(graph, group).registers == 10 + 65
    cuts, value, worst = find_cuts(graph, group), 4 * 16 * 64, []
    assert len(cuts) > 10
    for cut in cuts:
        assert {*cut.first.nodes, *cut.rest.nodes} == set(group.nodes)
        assert not {*cut.first.nodes} & {*cut.rest.nodes}
        assert cut.rest.result == group.result
        assert set(graph.readers(cut.first.result)) <= set(cut.rest.nodes)
        for node in {*cut.first.nodes} - {cut.first.result}:
            assert set(graph.readers(node)) <= set(cut.first.nodes)
        worst.append(estimate_cut(graph, cut))
    assert 10 + 65 > worst[0]
    assert worst == sorted(set(worst), reverse=True)
    assert [cut.extra_bytes for cut in cuts] == sorted(cut.extra_bytes for cut in cuts)
    fitting = cuts[worst.index(64)]
    assert fitting.extra_bytes == (2 + 11) * value  # the value between them, and eleven tensors again
    check_groups(graph, (fitting.first, fitting.rest), "cuda")


def test_no_cut_where_several_values_pass():
    """What is computed, not read from memory, would have to be written for the other part."""
    g = GraphBuilder("float32")
    data = [g.tanh(g.input(f"x{index}", (1, 16, 8, 8))) for index in range(60)]
    value = data[0]
    for other in (*data[1:], *reversed(data[1:])):
        value = g.add(value, other)
    graph, group = elementwise(g, value)
    assert is_suspicious(graph, group)
    assert find_cuts(graph, group) == ()
