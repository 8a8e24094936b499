"""Decide layouts before chains are grouped.

TVM's AlterOpLayout rewrites inside primitive functions, so a layout decided after grouping
puts layout transforms (of weights, too) into the fused kernels. This pass therefore runs the part of
``relay.build`` that comes before FuseOps, under the target; when ``relay.build`` runs it again,
it finds nothing to do.

ForwardFoldScaleAxis stays off: it divides by the scale (a zero gamma gives NaN), and it moves
run-time scales such as squeeze-excite gates onto the weights of the next convolution.
"""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.graph import Node
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.constant_pass import fold_all_constants, fold_constants
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.partition_pass import dissolve_groups
from tvm_fuse.relay.prelu_pass import restore_prelus
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.rewrite import Replacement, rebuild_function, renamed

__all__ = ["DISABLED_PASSES", "PREFIX_PASSES", "decide_layout"]

#: TVM passes that are never run on a model of ours.
DISABLED_PASSES = ("ForwardFoldScaleAxis",)

#: TVM passes that ``decide_layout`` has run, so that a build right after it may skip them.
PREFIX_PASSES = (
    "AlterOpLayout",
    "BackwardFoldScaleAxis",
    "CanonicalizeCast",
    "CanonicalizeOps",
    "CombineParallelBatchMatmul",
    "CombineParallelConv2D",
    "CombineParallelDense",
    "DynamicToStatic",
    "EliminateCommonSubexpr",
    "FastMath",
    "FlattenAtrousConv",
    "FoldConstant",
    "FoldScaleAxis",
    "ForwardFoldScaleAxis",
    "Legalize",
    "SimplifyExpr",
    "SimplifyExprPostAlterOp",
    "SimplifyInference",
    "ToBasicBlockNormalForm",
    "qnn.Legalize",
)

_LAYOUT_OPT_LEVEL = 3  # AlterOpLayout's own level


def decide_layout(module: Any, target: Any) -> Any:
    """Bring a module to the layouts that the target's schedules want.

    Args:
        module: A Relay module; groups made by ``partition_chains`` are dissolved.
        target: A ``tvm.target.Target``.

    Returns:
        The type-inferred module. Settings of the current ``PassContext`` (config, disabled
        passes) are respected; its opt_level is not, since layout is this pass's purpose.
    """
    module = fold_constants(restore_prelus(dissolve_groups(module)))
    current = tvm.transform.PassContext.current()
    disabled = {str(name) for name in current.disabled_pass} | {*DISABLED_PASSES, "FoldConstant"}
    prefix = tvm.get_global_func("relay.backend.GetPassPrefixSeq")(True, False)
    names = _collect_names(module)
    with (
        target,
        tvm.transform.PassContext(
            opt_level=_LAYOUT_OPT_LEVEL, disabled_pass=sorted(disabled), config=dict(current.config.items())
        ),
    ):
        module = prefix(module)
    return _restore_names(fold_all_constants(module), names)


# --- names -----------------------------------------------------------------------------------
# AlterOpLayout drops the spans that say where an operator came from. It keeps the order of the
# operators, so the n-th convolution before it is the n-th after it, as long as their number
# is the same. Names are for people; nothing depends on them.


def _family(op: str) -> str:
    return "nn.conv2d" if "conv2d" in op else "nn.dense" if "dense" in op else op


def _named_operators(read: ReadFunction) -> dict[str, list[Node]]:
    families: dict[str, list[Node]] = {}
    for node in read.graph.nodes:
        if isinstance(read.expressions[node.id], relay.Call):
            families.setdefault(_family(node.op), []).append(node)
    return families


def _collect_names(module: Any) -> dict[str, list[str]]:
    """The names of the operators of ``main``, by family, in order."""
    names: dict[str, list[str]] = {}

    def collect(read: ReadFunction) -> Any:
        for family, nodes in _named_operators(read).items():
            names.setdefault(family, []).extend(node.name for node in nodes)
        return read.function

    rewrite_functions(module, collect)
    return names


def _restore_names(module: Any, names: dict[str, list[str]]) -> Any:
    def restore(read: ReadFunction) -> Any:
        replacements: dict[int, Replacement] = {}
        for family, nodes in _named_operators(read).items():
            if len(nodes) != len(names.get(family, [])):
                continue
            for node, name in zip(nodes, names[family]):
                if name and not node.name:
                    replacements[node.id] = renamed(read, node, name)
        return rebuild_function(read, replacements)

    return rewrite_functions(module, restore)[0]
