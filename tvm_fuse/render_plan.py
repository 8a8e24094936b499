"""Plans and explanations as pages of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tvm_fuse.core.reason import Decision
from tvm_fuse.explain import Explanation, Site, Verdict
from tvm_fuse.planning import GroupRow, PlanReport

__all__ = ["render_explanation", "render_plan"]

_MOST_REASONS = 12
_WIDEST_NAME = 44


def render_plan(report: PlanReport) -> str:
    """A plan as text: the kernels as a table, then what is in none and why."""
    lines = [f"{report.model} for {report.target}"]
    if str(report.steering):
        lines.append(f"asked for: {report.steering}")
    norms = report.folded + len(report.not_folded)
    lines += [
        f"{report.fused} of {report.anchors} convolutions and dense layers fused, "
        f"{len(report.groups)} kernels planned; {report.folded} of {norms} batch norms folded",
        "",
    ]
    lines += _align([_COLUMNS, *map(_row, report.groups)]) if report.groups else ["no kernels planned"]
    if report.groups:
        lines += ["", *_totals(report)]
    lines += _reasons("not fused", report.not_fused)
    lines += _reasons("not folded", report.not_folded)
    lines += _reasons("side by side", report.side_by_side)
    if report.not_joined:
        codes = _count(report.not_joined)
        lines += ["", f"kernels that are not part of a larger one: {codes}; explain shows each"]
    if report.left:
        lines += [
            "",
            f"{len(report.left)} other operators are in no kernel of the plan: {_count(report.left)}",
        ]
    return "\n".join(lines)


def _count(decisions: Iterable[Decision]) -> str:
    codes = Counter(decision.reason.code.value for decision in decisions if decision.reason is not None)
    return ", ".join(f"{code} {count} x" for code, count in sorted(codes.items()))


_COLUMNS = ("id", "kernel", "anchor", "ops", "MFLOP", "saved kB", "saved us", "result")
_LEFT = (0, 1, 2, 7)


def _row(group: GroupRow) -> tuple[str, ...]:
    return (
        group.id,
        _shorten(group.name),
        _shorten(group.anchor),
        str(len(group.operators)),
        f"{group.flops / 1e6:.2f}",
        f"{group.saved_bytes / 1e3:.1f}",
        "-" if group.saved_s is None else f"{group.saved_s * 1e6:.1f}",
        group.result,
    )


def _totals(report: PlanReport) -> Iterable[str]:
    saved = sum(group.saved_bytes for group in report.groups)
    yield f"saved against a kernel for each operator: {saved / 1e6:.2f} MB of memory traffic"
    if report.device:
        seconds = sum(group.saved_s or 0.0 for group in report.groups)
        yield f"and {seconds * 1e6:.0f} us, estimated at the peaks of {report.device}"


def _reasons(title: str, decisions: Sequence[Decision]) -> list[str]:
    lines = [""] if decisions else []
    for decision in decisions[:_MOST_REASONS]:
        lines.append(f"{title}: {decision.at}: {decision.reason or decision.detail}")
        lines += [f"  {decision.reason.hint}"] if decision.reason is not None else []
    rest = len(decisions) - _MOST_REASONS
    return [*lines, f"and {rest} more (--json lists all)"] if rest > 0 else lines


def _shorten(name: str) -> str:
    """The end of a long name, which tells most."""
    return name if len(name) <= _WIDEST_NAME else f"...{name[3 - _WIDEST_NAME :]}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if index in _LEFT else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def render_explanation(explanation: Explanation) -> str:
    """An explanation as text: a summary, then a paragraph for each place."""
    lines = [
        f"{explanation.model} for {explanation.target}",
        f"{explanation.fused} of {explanation.anchors} convolutions and dense layers fused; "
        f"{explanation.kernels} kernels planned, {explanation.alone} other operators in none",
    ]
    if explanation.reasons:
        codes = ", ".join(f"{code} {count} x" for code, count in explanation.reasons)
        lines.append(f"what stopped layers and batch norms: {codes}")
    for site in explanation.sites:
        lines += ["", *_site(site)]
    return "\n".join(lines)


def _site(site: Site) -> Iterable[str]:
    label = site.operator + site.id
    what = label if site.name == label else f"{label} {site.name}".strip()
    yield f"{what}: {site.verdict.value}" + (f" in {site.group}" if site.group else "")
    if site.epsilon:
        yield f"  epsilon {site.epsilon}"
    if site.partners:
        yield f"  {'into' if site.verdict is Verdict.FOLDED else 'with'} {', '.join(site.partners)}"
    for line in site.beside:
        yield f"  side by side: {line}"
    for reason in site.not_joined:
        yield f"  not part of a larger kernel: {reason}"
    if site.reason is None:
        return
    if site.verdict is Verdict.FUSED:
        yield f"  ends there: {site.reason}"
        return
    yield f"  {site.reason.code.value} at {site.reason.at} (stage {site.stage.value if site.stage else '-'})"
    yield f"    wanted {site.reason.wanted}"
    yield f"    got    {site.reason.got}"
    if site.matched:
        yield f"    nearest pattern: {site.matched} operator{'s' * (site.matched > 1)} fitted before that"
    yield f"  hint: {site.hint}"
