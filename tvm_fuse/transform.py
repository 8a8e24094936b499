"""The public passes: TVM module passes to put into a ``tvm.transform.Sequential``.

::

    passes = tvm.transform.Sequential([
        tvm_fuse.transform.AlignEpsilon({"bn1": 1e-3}, align=True),
        tvm_fuse.transform.FoldBatchNorm(),
        tvm_fuse.transform.FuseChains("llvm"),      # for CUDA, CombineParallel(target) before it
    ])
    module = passes(module)
    print(tvm_fuse.last_report())
    library = tvm.relay.build(module, target="llvm")

All run at opt_level 0, so no ``PassContext`` skips them. What a pass did, and why it left
something alone, is in ``tvm_fuse.last_report()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.combine_pass import combine_parallel
from tvm_fuse.relay.fold_pass import align_epsilon, fold_batch_norms
from tvm_fuse.relay.layout_pass import decide_layout
from tvm_fuse.relay.partition_pass import Planner, partition_chains
from tvm_fuse.relay.recompose_pass import recompose_batch_norms
from tvm_fuse.relay.registers import refine_on
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.relay.winograd_pass import use_winograd

__all__ = [
    "AlignEpsilon",
    "CombineParallel",
    "DecideLayout",
    "FoldBatchNorm",
    "FuseChains",
    "PartitionChains",
    "RecomposeBatchNorm",
    "UseWinograd",
]


def RecomposeBatchNorm() -> Any:  # noqa: N802
    """Make batch norms of the operators that an exporter wrote for one, with the epsilon they hold.

    Returns:
        A TVM module pass. ``AlignEpsilon`` and ``FoldBatchNorm`` begin with it; alone it is for passes
        of others. It wants parameters bound as constants, and not yet folded (by FoldConstant).
    """
    return _module_pass("RecomposeBatchNorm", recompose_batch_norms)


def AlignEpsilon(epsilon: Mapping[str, float], *, align: bool = False) -> Any:  # noqa: N802
    """Compare every batch norm's epsilon with the value the model was trained with.

    Args:
        epsilon: Name of the batch norm, or a glob pattern such as ``"*"`` -> its epsilon. A batch
            norm without a source name is called ``batch_norm_0``, ``batch_norm_1``, ...
        align: Replace an epsilon that differs; otherwise the pass fails with ``ModelError``.

    Returns:
        A TVM module pass.
    """
    values = {name: float(value) for name, value in epsilon.items()}
    return _module_pass("AlignEpsilon", lambda module: align_epsilon(module, {}, values, align=align))


def FoldBatchNorm() -> Any:  # noqa: N802
    """Fold batch norms into the convolutions and dense layers before them.

    Returns:
        A TVM module pass. It wants parameters bound as constants; a batch norm with parameters
        that are still variables is left alone with code ``bn-parameters-not-constant``.
    """
    return _module_pass("FoldBatchNorm", fold_batch_norms)


def CombineParallel(target: Any = None, options: PlanOptions | None = None) -> Any:  # noqa: N802
    """Make one layer of layers that read one value, such as query, key and value of an attention.

    Args:
        target: A ``tvm.target.Target`` or target string, whose device decides what pays; None combines
            whatever is legal, unless the options have a cost model.
        options: As for ``FuseChains``.

    Returns:
        A TVM module pass, to run after ``FoldBatchNorm`` and before ``FuseChains``. It wants parameters
        bound as constants.
    """
    resolved = None if target is None else resolve_target(target)
    return _module_pass("CombineParallel", lambda module: combine_parallel(module, resolved, options))


def DecideLayout(target: Any) -> Any:  # noqa: N802
    """Bring a module to the target's layouts, so that no layout transform lands in a fused kernel.

    Args:
        target: A ``tvm.target.Target`` or target string.

    Returns:
        A TVM module pass.
    """
    resolved = resolve_target(target)
    return _module_pass("DecideLayout", lambda module: decide_layout(module, resolved))


def PartitionChains(options: PlanOptions | None = None, plan: Planner | None = None) -> Any:  # noqa: N802
    """Group each anchor with the elementwise operators after it, in the layouts at hand.

    Args:
        options: What to fuse, and what the target can do.
        plan: Graph -> its plan, such as one that was saved (``core.replay.replay``); None plans anew.

    Returns:
        A TVM module pass. Each group is a primitive function, which ``relay.build`` keeps as one
        kernel; FuseOps takes the rest. On targets with a packed layout use ``FuseChains``.
    """
    return _module_pass("PartitionChains", lambda module: partition_chains(module, None, options, plan))


def FuseChains(target: Any, options: PlanOptions | None = None, plan: Planner | None = None) -> Any:  # noqa: N802
    """``DecideLayout(target)`` and then ``PartitionChains()``; earlier groups are made anew.

    Args:
        target: A ``tvm.target.Target`` or target string; it decides what one kernel can compute.
        options: What to fuse.
        plan: As for ``PartitionChains``.

    Returns:
        A TVM module pass. A plain ``relay.build`` decides layouts once more; TVM's rule for a requantization
        by channels fails then on a CPU, unless ``disabled_pass=["AlterOpLayout"]`` (``tvm_fuse.compile``
        does without it).
    """
    resolved = resolve_target(target)

    def fuse(module: Any) -> Any:
        laid_out = decide_layout(module, resolved)
        return partition_chains(laid_out, resolved, options, plan, refine_on(resolved))

    return _module_pass("FuseChains", fuse)


def UseWinograd(target: Any) -> Any:  # noqa: N802
    """Transform the weights of 3x3 convolutions that Winograd's algorithm computes faster on a CPU.

    Args:
        target: A ``tvm.target.Target`` or target string; other targets than CPUs with our schedules keep all.

    Returns:
        A TVM module pass, the last before ``relay.build``. It wants parameters bound as constants; rounding
        errors are about three times those of the direct sum (``tvm_fuse/core/winograd.py``).
    """
    resolved = resolve_target(target)
    return _module_pass("UseWinograd", lambda module: use_winograd(module, resolved))


def _module_pass(name: str, function: Any) -> Any:
    def run(module: Any, context: Any) -> Any:
        return function(module)

    return tvm.transform.module_pass(run, opt_level=0, name=f"tvm_fuse.{name}")
