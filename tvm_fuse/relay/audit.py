"""Check the batch norms of a loaded model before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.audit import Audit, audit_graph
from tvm_fuse.core.epsilon import EpsilonCheck, EpsilonConfig
from tvm_fuse.core.reason import Reason, refusal
from tvm_fuse.relay.fold_pass import align_epsilon
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.record import last_report

__all__ = ["CheckedModel", "check_model"]


@dataclass(frozen=True)
class CheckedModel:
    """A model whose batch norms can be folded.

    Args:
        module: The type-inferred module, with epsilons aligned when that was asked for.
        epsilon: One comparison a batch norm.
        warnings: About numbers that are legal and yet hardly meant.
    """

    module: Any = field(compare=False, repr=False)
    epsilon: tuple[EpsilonCheck, ...]
    warnings: tuple[Reason, ...]


def check_model(
    model: RelayModel, epsilon: Mapping[str, float], config: EpsilonConfig, *, align: bool
) -> CheckedModel:
    """Check epsilons and statistics.

    Args:
        model: The model.
        epsilon: Batch norm name or pattern -> the epsilon that the user names.
        config: What a training config names.
        align: Whether an expected epsilon replaces a different one.

    Raises:
        ModelError: An epsilon is not the expected one and ``align`` is False, or statistics cannot be right.
        UsageError: A name fits no batch norm.
    """
    module = align_epsilon(model.module, model.epsilon, epsilon, align=align, config=config)
    audits: list[Audit] = []

    def audit(read: ReadFunction) -> Any:
        audits.append(audit_graph(read.graph))
        return read.function

    rewrite_functions(module, audit)
    problems = [reason for found in audits for reason in found.problems]
    if problems:
        raise refusal("problem(s) in the numbers of batch norms", problems)
    warnings = tuple(reason for found in audits for reason in found.warnings)
    return CheckedModel(module, last_report()["AlignEpsilon"].details, warnings)
