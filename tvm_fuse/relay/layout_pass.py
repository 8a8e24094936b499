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

from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.constant_pass import fold_constants
from tvm_fuse.relay.partition_pass import dissolve_groups

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
    module = fold_constants(dissolve_groups(module))
    current = tvm.transform.PassContext.current()
    disabled = {str(name) for name in current.disabled_pass} | {*DISABLED_PASSES, "FoldConstant"}
    prefix = tvm.get_global_func("relay.backend.GetPassPrefixSeq")(True, False)
    with target, tvm.transform.PassContext(
        opt_level=_LAYOUT_OPT_LEVEL, disabled_pass=sorted(disabled), config=dict(current.config.items())
    ):
        module = prefix(module)
    module = fold_constants(module)
    return relay.transform.InferType()(module)
