"""What drafting came to, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["DraftReport", "DraftRow", "render_draft_row", "render_drafts"]

_NAME = 30
_US = 1e6


@dataclass(frozen=True)
class DraftRow:
    """One kernel on one architecture. All times are predicted.

    Args:
        digest: Of its chain.
        name: Its chain.
        detail: Its result.
        device: Key of the device.
        weight: Calls in an inference.
        baseline_s: Seconds of the kernel that is built without a record; None: it has no profile.
        best_s: Seconds of the best draft that passed; None: none did.
        drafted: Schedules that were scored.
        kept: Of these, the ones on the shortlist.
        rejected: Why others were not -> how many.
        has_record: Whether a draft became a record.
        problem: Why nothing could be drafted or built; empty where that is not so.
    """

    digest: str
    name: str
    detail: str
    device: str
    weight: int
    baseline_s: float | None
    best_s: float | None
    drafted: int
    kept: int
    rejected: Mapping[str, int]
    has_record: bool
    problem: str = ""


@dataclass(frozen=True)
class DraftReport:
    """What drafting came to.

    Args:
        tool_version: Version of tvm-fuse.
        model: Name of the model.
        target: Target string.
        cards: Short names of the cards that were drafted for.
        rows: The kernels, on each architecture.
        skipped: Kernels that were not drafted: the time was over, or Ctrl-C ended it.
        is_interrupted: Whether Ctrl-C ended it.
        seconds: How long it took.
        written: Files of records.
        package: Folder of the package of candidates, or empty.
    """

    tool_version: str
    model: str
    target: str
    cards: tuple[str, ...]
    rows: tuple[DraftRow, ...]
    skipped: int
    is_interrupted: bool
    seconds: float
    written: tuple[str, ...]
    package: str


def render_draft_row(row: DraftRow) -> str:
    """One kernel in a line."""
    gain = f"{row.baseline_s / row.best_s:.2f}" if row.baseline_s and row.best_s else "-"
    record = "  draft" if row.has_record else ""
    return (
        f"{row.name[:_NAME]:<{_NAME}} {row.digest:<12} {row.device:<12} {row.drafted:>7} {row.kept:>5} "
        f"{_us(row.baseline_s):>9} {_us(row.best_s):>9} {gain:>6}{record}"
    )


def render_drafts(report: DraftReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: DraftReport) -> Iterator[str]:
    yield f"{report.model} for {', '.join(report.cards)} ({report.target}): predicted, nothing was measured"
    yield ""
    head = f"{'kernel':<{_NAME}} {'digest':<12} {'device':<12} {'drafted':>7} {'kept':>5}"
    yield f"{head} {'us now':>9} {'us draft':>9} {'x':>6}"
    yield from map(render_draft_row, report.rows)
    yield ""
    rejected: Counter[str] = Counter()
    for row in report.rows:
        rejected.update(row.rejected)
    for reason, count in rejected.most_common():
        yield f"rejected, since the kernel {reason}: {count}"
    yield from (f"{row.name} on {row.device}: {row.problem}" for row in report.rows if row.problem)
    if report.skipped:
        why = "interrupted" if report.is_interrupted else "the time was over"
        yield f"{why}: {report.skipped} kernels were not drafted"
    if report.written:
        yield f"wrote {len(report.written)} records, marked not measured: only --drafts uses them"
    if report.package:
        yield f"wrote {report.package}: `python {report.package}/run.py` measures it on a GPU"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * _US:.1f}"
