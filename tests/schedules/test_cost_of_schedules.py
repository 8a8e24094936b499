"""The cost model reckons with the blocks that the schedules make."""

from __future__ import annotations

import pytest

from tests.support.cuda_groups import build_group
from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core import cost
from tvm_fuse.core.graph import TensorInfo

gate = Lazy("tvm_fuse_schedules.cuda_gate")
narrow = Lazy("tvm_fuse_schedules.cuda_narrow")
plan = Lazy("tvm_fuse_schedules.cuda_plan")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def test_constants():
    assert (cost._GATE_SLICES, cost._GATE_WARPS) == (gate._SLICES, gate._WARPS)
    assert (cost._NARROW_COLUMNS, cost._NARROW_WARPS) == (plan.FEWEST_COLUMNS, narrow._WARPS)


@pytest.mark.parametrize("channels", [96, 480])
def test_blocks_of_a_gate(channels):
    """As launched: two products of one pixel that the plan makes one kernel."""
    net = Net()
    hidden = relay.nn.relu(net.conv2d(net.input("x", (2, channels, 1, 1)), 8, 1))
    group = build_group(net.module(relay.sigmoid(net.conv2d(hidden, channels, 1))), "sm_80")
    assert group.launch.grid[0] == cost.gate_blocks(TensorInfo((2, channels, 1, 1), "float32"))
