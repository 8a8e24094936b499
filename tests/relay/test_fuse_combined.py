"""Combined layers in the pipeline: on CUDA only, off where it is asked for, and plan files of both forms."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, LLVM, Net, count_operators, relay
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.core.plan_options import PlanOptions

fuse = Lazy("tvm_fuse.relay.fuse")
load = Lazy("tvm_fuse.relay.load")
target = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def fused(on=CUDA, **options):
    net = Net()
    x = net.input("x", (4, 8))
    heads = [
        relay.transpose(relay.reshape(relay.add(net.dense(x, 8), net.const(8)), (4, 2, 4)), (1, 0, 2))
        for _ in range(3)
    ]
    module = net.module(*heads)
    model = load.RelayModel("heads", module, (TensorSpec("x", (4, 8), "float32"),), ("q", "k", "v"), {})
    return fuse.fuse_model(model, target.resolve_target(on), fuse.FuseOptions(**options))


def count(made):
    return count_operators(made.laid_out)["nn.dense"]


def test_on_cuda():
    made = fused()
    assert count(made) == 1
    assert made.records["CombineParallel"].summary == "3 layers combined into 1"


@pytest.mark.parametrize("options", [{"combine": False}, {"plan": PlanOptions(fuse="none")}], ids=str)
def test_off(options):
    made = fused(**options)
    assert count(made) == 3
    assert not made.records["CombineParallel"].changed


def test_not_for_a_cpu():
    assert "strided_slice" not in count_operators(fused(LLVM).laid_out)


@pytest.mark.parametrize("combine", [True, False])
def test_a_plan_file_is_carried_out_again(combine):
    made = fused(combine=combine)
    again = fused(combine=combine, plan_file=made.planned.file)
    assert again.planned.plan.groups == made.planned.plan.groups


def test_a_plan_file_with_nothing_fused_is_of_a_graph_with_nothing_combined():
    made = fused(plan=PlanOptions(fuse="none"))
    assert count(fused(plan_file=made.planned.file)) == 3


@pytest.mark.parametrize("combine", [True, False])
def test_the_other_choice_is_another_graph(combine):
    file = fused(combine=combine).planned.file
    with pytest.raises(ModelError, match=r"stale: node .* was .*; the graph had"):
        fused(combine=not combine, plan_file=file)
