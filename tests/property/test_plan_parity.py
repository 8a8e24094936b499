"""Any plan, however odd, leaves the numbers alone: random plans of random models, edited in files.

A plan is saved, edited at random many times (groups left out, cut in two, joined, operators moved from one to
another, results added, operators computed twice), and read again. An edit is either refused as illegal, or
the model that is carried out by it gives what the unfused model gives.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, LLVM, Net, feeds, relay, run, run_unfused
from tvm_fuse.core import plan_file
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_file import PlannedGroup, PlannedNode
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.replay import replay

build = Lazy("tvm_fuse.relay.build")
layouts = Lazy("tvm_fuse.relay.layout_pass")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
reader = Lazy("tvm_fuse.relay.read")
targets = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay

SHAPE = (1, 4, 6, 6)
EDITS = 30
MANY = int(os.environ.get("TVM_FUSE_EXAMPLES", "60"))


def gate(net, x):
    return x * relay.sigmoid(net.conv2d(relay.nn.global_avg_pool2d(x), 4, 1))


def center(net, x):
    return x - relay.mean(x, axis=3, keepdims=True)


def both_read(net, x):
    return relay.maximum(net.conv2d(x, 4, 1), net.conv2d(x * net.const(4, 1, 1), 4))


OPERATORS = [
    lambda net, x, y: net.conv2d(x, 4),
    lambda net, x, y: net.conv2d(x, 4, 1),
    lambda net, x, y: net.conv2d(x, 4, groups=4),
    lambda net, x, y: relay.nn.bias_add(x, net.const(4)),
    lambda net, x, y: relay.nn.relu(x),
    lambda net, x, y: relay.tanh(x),
    lambda net, x, y: x * relay.sigmoid(x),
    lambda net, x, y: x * net.const(4, 1, 1),
    lambda net, x, y: relay.tanh(x + y),
    lambda net, x, y: relay.maximum(x, y),
    lambda net, x, y: x * relay.tanh(y),
    lambda net, x, y: gate(net, x),
    lambda net, x, y: center(net, x),
    lambda net, x, y: relay.nn.max_pool2d(x, (3, 3), padding=(1, 1)),
    lambda net, x, y: net.conv2d(relay.concatenate([x, y], 1), 4, 1),
    lambda net, x, y: relay.reshape(relay.nn.relu(relay.reshape(x, (4, 36))), SHAPE),
    lambda net, x, y: relay.nn.softmax(x),
    lambda net, x, y: relay.nn.relu(x) + net.conv2d(relay.tanh(x + y), 4),
    lambda net, x, y: both_read(net, relay.nn.relu(x + y)),
]


def model(rng):
    net = Net(rng.randrange(1000))
    values = [net.input("x", SHAPE)]
    for _ in range(rng.randint(6, 14)):
        near, far = values[-1], rng.choice(values)
        values.append(rng.choice(OPERATORS)(net, near, far))
    return net.module(values[-1], *rng.sample(values[1:-1], rng.randint(0, 1)))


# --- edits ---------------------------------------------------------------------------------------------


def leave_out(rng, graph, groups):
    return [group for group in groups if group is not rng.choice(groups)]


def cut(rng, graph, groups):
    group = rng.choice(groups)
    at = rng.randrange(1, len(group.nodes)) if len(group.nodes) > 1 else 1
    parts = [part(group, group.nodes[:at]), part(group, group.nodes[at:])]
    return [other for other in groups if other is not group] + [one for one in parts if one.nodes]


def join(rng, graph, groups):
    first, second = rng.choice(groups), rng.choice(groups)
    nodes = tuple(sorted({*first.nodes, *second.nodes}, key=lambda node: node.id))
    joined = part(rng.choice([first, second]), nodes)
    return [group for group in groups if group not in (first, second)] + [joined]


def move(rng, graph, groups):
    node = rng.choice(graph.nodes)
    group = rng.choice(groups)
    moved = {*group.nodes, PlannedNode(node.id, node.op, node.name)}
    rest = [part(other, without(other, node.id)) for other in groups if other is not group]
    nodes = tuple(sorted(moved, key=lambda one: one.id))
    return [other for other in rest if other.nodes] + [part(group, nodes)]


def rename_result(rng, graph, groups):
    group = rng.choice(groups)
    changed = replace(group, result=rng.choice(group.nodes).id)
    return [changed if other is group else other for other in groups]


def add_results(rng, graph, groups):
    """More results for two groups made one, such as any that elementwise operators alone may have."""
    first, second = rng.choice(groups), rng.choice(groups)
    nodes = {*first.nodes, *second.nodes}
    node = rng.choice(graph.nodes)
    nodes |= {PlannedNode(node.id, node.op, node.name)} if rng.random() < 0.5 else set()
    joined = part(replace(first, anchor=None), tuple(sorted(nodes, key=lambda one: one.id)))
    inside = {one.id for one in joined.nodes}
    read = [n for n in sorted(inside) if graph.is_output(n) or not inside.issuperset(graph.readers(n))]
    *also, result = read or [joined.result]
    joined = replace(joined, also=tuple(also), result=result)
    rest = [part(other, without(other, node.id)) for other in groups if other not in (first, second)]
    return [*(other for other in rest if other.nodes), joined]


def compute_again(rng, graph, groups):
    """An operand of a group, and at times an operand of that, computed in it, too."""
    group = rng.choice(groups)
    ids = {node.id for node in group.nodes}
    added: set[int] = set()
    for _ in range(rng.randint(1, 3)):
        sources = {source for node in ids | added for source in graph.nodes[node].inputs} - ids - added
        operands = [source for source in sorted(sources) if graph.nodes[source].inputs]
        added |= {rng.choice(operands)} if operands else set()
    nodes = [graph.nodes[node] for node in sorted(ids | added)]
    again = tuple(sorted({*group.recomputed, *added}))
    before = tuple(sorted({*group.prologue, *added})) if group.anchor is not None else ()
    named = tuple(PlannedNode(node.id, node.op, node.name) for node in nodes)
    changed = replace(group, nodes=named, recomputed=again, prologue=before)
    return [changed if other is group else other for other in groups]


def change_results(rng, graph, groups):
    group = rng.choice(groups)
    ids = [node.id for node in group.nodes]
    changed = replace(group, also=tuple(sorted(rng.sample(ids, rng.randint(0, min(3, len(ids)))))))
    return [changed if other is group else other for other in groups]


def without(group, node):
    return tuple(one for one in group.nodes if one.id != node)


def part(group: PlannedGroup, nodes: tuple[PlannedNode, ...]) -> PlannedGroup:
    """Some operators as a group: what a careful editor would write for them."""
    ids = [node.id for node in nodes]
    anchor = group.anchor if group.anchor in ids else None
    before = tuple(node for node in group.prologue if node in ids) if anchor is not None else ()
    absorbed = tuple(node for node in group.absorbed if node in ids) if anchor is not None else ()
    result = group.result if group.result in ids else max(ids, default=0)
    also = tuple(node for node in group.also if node in ids and node < result)
    again = tuple(node for node in group.recomputed if node in ids)
    parts = {"anchor": anchor, "prologue": before, "absorbed": absorbed, "also": also, "recomputed": again}
    return replace(group, nodes=nodes, result=result, **parts)


EDITORS = (
    leave_out,
    cut,
    cut,
    join,
    move,
    rename_result,
    add_results,
    add_results,
    change_results,
    compute_again,
    compute_again,
)


def edit(rng, graph, file, target):
    """Many edits, each kept if it is legal; how many were, and how many were refused."""
    kept = refused = 0
    for _ in range(EDITS):
        if not file.groups:
            break
        groups = rng.choice(EDITORS)(rng, graph, list(file.groups))
        edited = replace(file, groups=tuple(groups))
        try:
            replay(graph, edited, target)
        except ModelError:
            refused += 1
            continue
        file, kept = edited, kept + 1
    return file, kept, refused


def check(seed):
    rng = random.Random(seed)
    module = model(rng)
    target = targets.resolve_target(rng.choice([LLVM, CUDA]))
    laid_out = layouts.decide_layout(module, target)
    graph = reader.read_function(laid_out["main"]).graph
    options = PlanOptions(target=partition_pass.target_kind(target))
    file = plan_file.make_plan_file(graph, plan_chains(graph, options), str(target), options, "tvm-fuse test")
    file, kept, refused = edit(rng, graph, file, str(target))
    file = plan_file.from_json(plan_file.to_json(file))
    fused = partition_pass.partition_chains(laid_out, target, plan=lambda g: replay(g, file, str(target)))
    library = build.build_fused(fused, targets.resolve_target(LLVM)).library  # CUDA's plans as well
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run(library, feed)):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5, err_msg=f"seed {seed}: {file.groups}")
    return kept, refused


def test_some():
    counts = [check(seed) for seed in range(4)]
    assert all(sum(column) > 10 for column in zip(*counts)), "edits are all legal, or all refused"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 4 + MANY))
def test_many(seed):
    check(seed)
