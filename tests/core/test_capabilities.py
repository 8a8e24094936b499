"""What targets can do: the table is whole, and a target that is not in it is refused."""

from __future__ import annotations

import pytest

from tvm_fuse.core.capabilities import CAPABILITIES, CHEAP_KINDS, capability_of
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.families import FAMILIES
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, ConvAttrs, Graph, Kind, Node, TensorInfo


@pytest.mark.parametrize("target", CAPABILITIES)
def test_families_that_are_named_exist(target):
    named = set(CAPABILITIES[target].prologue)
    assert named <= {family.name for family in FAMILIES}


def conv(layout="NCHW16c", out="", groups=1, channels=32, dtype="float32", kind=Kind.CONV2D, rows=8):
    """A convolution and what it reads."""
    data = TensorInfo((1, 2, rows, 8, 16), dtype)
    attrs = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), groups, channels, layout, "OIHW16i16o", out)
    return Graph(
        (
            Node(0, Kind.INPUT, "input", (), (data,)),
            Node(1, Kind.INPUT, "input", (), (TensorInfo((2, 2, 1, 1, 16, 16), dtype),)),
            Node(2, kind, "conv", (0, 1), (data,), attrs),
        ),
        (2,),
        {},
    )


#: case -> whether a CPU computes a multiplication while it reads the data
ENTERED = {
    "blocked": (conv(), True),
    "depthwise": (conv(groups=32), True),
    "blocks of another size": (conv(out="NCHW8c"), True),
    "plain": (conv(layout="NCHW"), False),
    "leaves the blocks": (conv(out="NCHW"), False),
    "channels last": (conv(layout="NHWC"), False),
    "grouped": (conv(groups=4), False),
    "depthwise, several for each channel": (conv(groups=32, channels=64), False),
    "float16": (conv(dtype="float16"), False),
    "dynamic": (conv(rows="h"), False),
    "transposed": (conv(kind=Kind.CONV2D_TRANSPOSE), False),
}


@pytest.mark.parametrize("case", ENTERED)
def test_a_cpu_enters_only_convolutions_with_a_schedule_of_ours(case):
    graph, wanted = ENTERED[case]
    kinds = CAPABILITIES["cpu"].prologue_of("conv", graph, graph.nodes[2])
    assert (Kind.MULTIPLY in kinds) == wanted
    assert Kind.MULTIPLY in CAPABILITIES["cuda"].prologue_of("conv", graph, graph.nodes[2])
    assert not CAPABILITIES["other"].prologue_of("conv", graph, graph.nodes[2])


def test_cheap_is_elementwise_and_has_no_transcendental_functions():
    assert CHEAP_KINDS < ELEMENTWISE_KINDS
    assert not CHEAP_KINDS & {Kind.EXP, Kind.TANH, Kind.SIGMOID, Kind.ERF, Kind.LOG, Kind.POWER, Kind.DIVIDE}


def test_unknown_target():
    assert capability_of("cuda") is CAPABILITIES["cuda"]
    with pytest.raises(UsageError, match="one of cuda, cpu, other, got 'vulkan'"):
        capability_of("vulkan")
