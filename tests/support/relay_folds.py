"""What every fold on Relay must do, and what every refusal must leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.lazy import Lazy
from tests.support.numerics import evaluate, max_error
from tests.support.relay_graphs import count_operators, feeds, tvm
from tvm_fuse.core.reason import Code, Reason

__all__ = ["check", "check_refused", "values"]

fold_pass = Lazy("tvm_fuse.relay.fold_pass")
reader = Lazy("tvm_fuse.relay.read")
record = Lazy("tvm_fuse.relay.record")


def values(module: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in float64."""
    return evaluate(reader.read_function(module["main"]).graph, inputs)


def check(module: Any, *, folds: int = 1, adds: int | None = None, tolerance: float = 1e-6) -> Any:
    """Fold; nothing may be left, one add a layer, the same values, and nothing to do a second time."""
    folded = fold_pass.fold_batch_norms(module)
    report = record.last_report()["FoldBatchNorm"]
    assert [decision for decision in report.decisions if not decision.applied] == []
    assert len(report.details) == folds
    counts = count_operators(folded)
    assert not counts["nn.batch_norm"]
    assert counts["add"] + counts["nn.bias_add"] == (folds if adds is None else adds)
    inputs = feeds(module)
    for want, got in zip(values(module, inputs), values(folded, inputs)):
        error = max_error(got, want)
        assert error <= tolerance, f"the values differ by {error:g}"
    again = fold_pass.fold_batch_norms(folded)
    assert tvm.ir.structural_equal(again, folded)
    assert not record.last_report()["FoldBatchNorm"].changed
    return folded


def check_refused(module: Any, code: Code, *, count: int = 1) -> Reason:
    """Nothing changes; returns the reason, which has this code."""
    folded = fold_pass.fold_batch_norms(module)
    report = record.last_report()["FoldBatchNorm"]
    reasons = [decision.reason for decision in report.decisions]
    assert [reason.code for reason in reasons if reason is not None] == [code] * count
    assert report.details == ()
    assert count_operators(folded) == count_operators(module)
    return reasons[0]
