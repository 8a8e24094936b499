"""What one run did, as data; as JSON; and as a page of text for somebody new to the project."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.epsilon import EpsilonCheck, EpsilonOrigin
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.parity import ParityReport, ParityRow
from tvm_fuse.core.reason import Decision, Reason

__all__ = ["Cost", "FusedKernel", "Latency", "Report", "render", "to_json"]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/report", "version": 1}

_MOST_REASONS = 12
_WIDTH = 92


@dataclass(frozen=True)
class FusedKernel:
    """A chain that became one kernel: name of its form, of its anchor, its operators, and why it ends."""

    form: str
    anchor: str
    operators: tuple[str, ...]
    ends: Reason | None = None


@dataclass(frozen=True)
class Cost:
    """Static cost of one inference.

    ``traffic_bytes`` is an estimate: each kernel reads its operands and writes its results once.
    """

    kernels: int
    traffic_bytes: int


@dataclass(frozen=True)
class Latency:
    """Times of one inference in seconds, one a round; in each round both models ran once."""

    unfused: tuple[float, ...]
    fused: tuple[float, ...]

    @property
    def speedups(self) -> tuple[float, ...]:
        """Unfused time over fused time, round by round."""
        return tuple(before / after for before, after in zip(self.unfused, self.fused))


@dataclass(frozen=True)
class Report:
    """The outcome of the main job.

    Args:
        tool_version: Version of tvm-fuse.
        tvm: The TVM in use.
        model: Name of the model.
        target: Target string.
        inputs: Input descriptions, such as ``x [1, 3, 48, 192]``.
        epsilon: One check a batch norm.
        folds: Folded batch norms.
        not_folded: Decisions about the others.
        chains: Chains that became kernels.
        not_fused: Decisions about anchors in no chain.
        unfused: Cost of the reference.
        fused: Cost of the fused model.
        parity: Comparison of outputs, None when nothing was run.
        latency: Times, None when not measured.
        notes: What else the user should know.
        scale_shifts: Other scales and shifts folded into the layers before them.
        warnings: About batch norms whose numbers are legal and yet hardly meant.
    """

    tool_version: str
    tvm: str
    model: str
    target: str
    inputs: tuple[str, ...]
    epsilon: tuple[EpsilonCheck, ...]
    folds: tuple[FoldRecord, ...]
    not_folded: tuple[Decision, ...]
    chains: tuple[FusedKernel, ...]
    not_fused: tuple[Decision, ...]
    unfused: Cost
    fused: Cost
    parity: ParityReport | None
    latency: Latency | None
    notes: tuple[str, ...]
    scale_shifts: tuple[AffineRecord, ...] = ()
    warnings: tuple[Reason, ...] = ()


# --- JSON ------------------------------------------------------------------------------------


def to_json(report: Report) -> str:
    """The report as one JSON document with sorted keys, without what records do not show (``repr=False``).

    Non-finite numbers are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
    """
    document = {"schema": SCHEMA, **_plain(report)}
    if report.latency is not None:
        document["latency"]["speedup"] = _quartiles(report.latency.speedups)
    if report.parity is not None:
        document["parity"]["passed"] = report.parity.passed
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.repr}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "quartile_1": float(low), "quartile_3": float(high)}


# --- text ------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The report as text, about one screen."""
    sections = [
        _render_title(report),
        _render_folds(report),
        _render_warnings(report),
        _render_chains(report),
        _render_gain(report),
        _render_parity(report),
        _render_notes(report),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections if section)


def _render_title(report: Report) -> list[str]:
    return [
        f"{report.model} for {report.target}",
        f"inputs: {', '.join(report.inputs) or 'none'}    ({report.tvm}, tvm-fuse {report.tool_version})",
    ]


def _headline(title: str, result: str) -> str:
    return f"{title} {'.' * max(3, _WIDTH - len(title) - len(result) - 2)} {result}"


def _render_folds(report: Report) -> list[str]:
    total = len(report.epsilon)
    lines = [_headline("Batch norms folded into the weights before them", f"{len(report.folds)} of {total}")]
    forms = Counter((f"{check.used:.6g}", check.origin) for check in report.epsilon)
    for (epsilon, origin), count in sorted(forms.items()):
        lines.append(f"  epsilon {epsilon:<10} {count:3d} x  {_ORIGINS[origin]}")
    aligned = [check for check in report.epsilon if check.used != check.in_graph]
    for check in aligned[:_MOST_REASONS]:
        lines.append(f"  {check.name}: epsilon {check.in_graph:.6g} aligned to {check.used:.6g}")
        lines += [f"       {check.impact}"] if check.impact is not None else []
    lines += _render_rest(len(aligned))
    if report.scale_shifts:
        lines.append(f"  and other scales and shifts after {len(report.scale_shifts)} layers")
    return lines + _render_reasons(report.not_folded)


_ORIGINS = {
    EpsilonOrigin.SOURCE_ATTRIBUTE: "stated in the model file; the graph agrees",
    EpsilonOrigin.SOURCE_DEFAULT: "not stated in the model file: ONNX's default",
    EpsilonOrigin.RECOVERED: "recovered from the operators that the exporter wrote",
    EpsilonOrigin.CONFIG: "given by the training config",
    EpsilonOrigin.USER: "given by the user",
    EpsilonOrigin.GRAPH: "from the graph (no source to compare with)",
}


def _render_chains(report: Report) -> list[str]:
    total = len(report.chains) + len(report.not_fused)
    lines = [
        _headline("Convolutions and dense layers fused with what follows", f"{len(report.chains)} of {total}")
    ]
    forms = Counter(" + ".join(_words(chain.form)) for chain in report.chains)
    lines += [
        f"  {count:3d} x  {form}"
        for form, count in sorted(forms.items(), key=lambda item: (-item[1], item[0]))
    ]
    return lines + _render_reasons(report.not_fused)


def _words(form: str) -> list[str]:
    """``conv2d_bias_hard_swish`` -> conv2d, bias, hard swish."""
    for name in ("hard_swish", "hard_sigmoid", "leaky_relu", "d_transpose"):
        form = form.replace(name, name.replace("_", " "))
    return form.split("_")


def _render_reasons(decisions: Sequence[Decision]) -> list[str]:
    reasons = [(decision.at, decision.reason) for decision in decisions if decision.reason is not None]
    lines = []
    for site, reason in reasons[:_MOST_REASONS]:
        where = "" if reason.at == site else f" at {reason.at}"
        lines.append(f"  not: {site}: {reason.code.value}{where}: wanted {reason.wanted}, got {reason.got}")
        lines.append(f"       {reason.hint}")
    return lines + _render_rest(len(reasons))


def _render_rest(count: int) -> list[str]:
    return [f"  and {count - _MOST_REASONS} more (--json lists all)"] if count > _MOST_REASONS else []


def _render_warnings(report: Report) -> list[str]:
    lines = []
    for reason in report.warnings[:_MOST_REASONS]:
        lines += [f"warning: {reason}", f"         {reason.hint}"]
    return lines + _render_rest(len(report.warnings))


def _render_gain(report: Report) -> list[str]:
    before, after = report.unfused, report.fused
    lines = [
        _headline("What it bought (one inference)", f"{'unfused':>12} {'fused':>12} {'':>12}"),
        _gain_row("kernel launches", str(before.kernels), str(after.kernels), before.kernels, after.kernels),
        _gain_row(
            "memory traffic, estimated",
            f"{before.traffic_bytes / 1e6:.1f} MB",
            f"{after.traffic_bytes / 1e6:.1f} MB",
            before.traffic_bytes,
            after.traffic_bytes,
        ),
    ]
    if report.latency is None:
        return [*lines, _BASELINE]
    medians = [statistics.median(times) for times in (report.latency.unfused, report.latency.fused)]
    speedup = _quartiles(report.latency.speedups)
    lines.append(
        _row(
            "latency, median",
            f"{medians[0] * 1e3:.2f} ms",
            f"{medians[1] * 1e3:.2f} ms",
            f"{speedup['median']:.2f} x",
        )
    )
    rounds = len(report.latency.fused)
    spread = f"{speedup['quartile_1']:.2f} to {speedup['quartile_3']:.2f}"
    lines.append(f"  (speed-up: median of {rounds} alternating runs, quartiles {spread})")
    return [*lines, _BASELINE]


_BASELINE = (
    "  (unfused: the imported graph at opt_level 0, nothing folded, each operator a kernel of its own)"
)


def _gain_row(title: str, before: str, after: str, before_value: int, after_value: int) -> str:
    change = f"{100.0 * (after_value - before_value) / before_value:+.0f} %" if before_value else ""
    return _row(title, before, after, change)


def _row(title: str, before: str, after: str, change: str) -> str:
    return f"  {title:<{_WIDTH - 42}} {before:>12} {after:>12} {change:>12}"


def _render_parity(report: Report) -> list[str]:
    parity = report.parity
    if parity is None:
        return [_headline("Parity with the unfused model", "NOT RUN")]
    lines = [_headline("Parity with the unfused model", "PASSED" if parity.passed else "FAILED")]
    for row in parity.rows:
        lines += _render_parity_row(row)
    lines += [f"  {name}: missing in the fused model" for name in parity.missing]
    lines += [f"  {name}: only in the fused model" for name in parity.extra]
    return lines


def _render_parity_row(row: ParityRow) -> list[str]:
    shape = "x".join(str(size) for size in row.shape) or "scalar"
    lines = [f"  {row.output} ({row.dtype}, {shape}, {row.elements} values)"]
    if row.problem:
        return [*lines, f"    cannot be compared: {row.problem}"]
    lines.append(
        f"    largest difference {row.max_abs:.2e}, relative {row.max_rel:.2e}, mean {row.mean_abs:.2e};"
        f" worst at {list(row.worst_index)}: {row.worst_got:.7g} for {row.worst_reference:.7g}"
    )
    if row.proves_little:
        lines.append(
            f"    WEAK: zeros would pass, no value exceeds {row.reference_max:.2g}; try another --seed"
        )
    allowed = f"allowed: {row.tolerance.atol:g} + {row.tolerance.rtol:g} x |reference|"
    if row.passed:
        return [*lines, f"    {allowed}; {row.needed:.2g} of that was needed"]
    return [*lines, f"    {allowed}; {row.failing} values fail, {row.needed:.3g} times that would pass"]


def _render_notes(report: Report) -> list[str]:
    return [f"note: {note}" for note in report.notes]
