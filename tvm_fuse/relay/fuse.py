"""From a loaded model to a fused one: the one way that `run`, `kernels` and `export` go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.audit import CheckedModel, check_model
from tvm_fuse.relay.fold_pass import fold_batch_norms
from tvm_fuse.relay.layout_pass import decide_layout
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.partition_pass import partition_chains
from tvm_fuse.relay.record import PassReport, last_report
from tvm_fuse.relay.registers import refine_on

__all__ = ["FuseOptions", "FusedModel", "fuse_model"]


@dataclass(frozen=True)
class FuseOptions:
    """What the user may choose about folding and fusing.

    Args:
        epsilon: Batch norm name or glob pattern -> the epsilon the model was trained with.
        epsilon_config: The same from a training config (``tvm_fuse.epsilon_config.read_epsilon_config``);
            ``epsilon`` comes before it.
        align_epsilon: Replace an epsilon that differs from the expected one, instead of failing.
    """

    epsilon: Mapping[str, float] = field(default_factory=dict)
    epsilon_config: EpsilonConfig = field(default_factory=EpsilonConfig)
    align_epsilon: bool = False


@dataclass(frozen=True)
class FusedModel:
    """A model on its way to a build.

    Args:
        checked: The model as it came, epsilons aligned when that was asked for.
        laid_out: Folded, in the layouts of the target, nothing grouped yet.
        module: The same with its chains grouped: what is built.
        records: What each pass did.
    """

    checked: CheckedModel
    laid_out: Any = field(compare=False, repr=False)
    module: Any = field(compare=False, repr=False)
    records: PassReport

    @property
    def reference(self) -> Any:
        """The module that the fused one is compared with: nothing folded, nothing fused."""
        return self.checked.module


def fuse_model(
    model: RelayModel, target: Any, options: FuseOptions | None = None, progress: Progress = quietly
) -> FusedModel:
    """Check a model, fold its batch norms, decide its layouts and group its chains.

    Args:
        model: The model.
        target: The ``tvm.target.Target`` that it is built for.
        options: See ``FuseOptions``.
        progress: Called around each step.

    Raises:
        ModelError: An epsilon is not the expected one, or statistics cannot be right.
        UsageError: A name fits no batch norm.
    """
    options = options or FuseOptions()
    with progress("auditing and folding batch norms"):
        checked = check_model(model, options.epsilon, options.epsilon_config, align=options.align_epsilon)
        folded = fold_batch_norms(checked.module)
    with progress("deciding layouts"):
        laid_out = decide_layout(folded, target)
    with progress("fusing chains"):
        module = partition_chains(laid_out, target, refine=refine_on(target))
    return FusedModel(checked, laid_out, module, last_report())
