"""What each pass did the last time it ran: the answer to "and? did it do anything?".

TVM's passes return modules only, so a pass leaves its record here, by thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tvm_fuse.core.reason import Decision, Reason

__all__ = ["PassRecord", "PassReport", "clear_records", "last_report", "record"]


@dataclass(frozen=True)
class PassRecord:
    """The outcome of one run of one pass.

    Args:
        name: Name of the pass, such as ``FoldBatchNorm``.
        summary: One line, such as ``35 of 35 batch norms folded``.
        changed: Whether the module it returned differs from the one it got.
        decisions: What it decided about each site, with reasons for what it left alone.
        details: The pass's own results: ``FoldRecord``, ``EpsilonCheck`` or ``FusionGroup`` values.
        warnings: What stopped nothing and is worth a look.
    """

    name: str
    summary: str
    changed: bool
    decisions: tuple[Decision, ...]
    details: tuple[Any, ...] = ()
    warnings: tuple[Reason, ...] = ()

    def __str__(self) -> str:
        decisions = [f"  {decision}" for decision in self.decisions]
        warnings = [f"  warning: {reason}" for reason in self.warnings]
        return "\n".join([f"{self.name}: {self.summary}", *decisions, *warnings])


@dataclass(frozen=True)
class PassReport:
    """The latest record of each pass that ran on this thread, in the order they ran."""

    records: tuple[PassRecord, ...]

    def __getitem__(self, name: str) -> PassRecord:
        for item in self.records:
            if item.name == name:
                return item
        raise KeyError(
            f"{name} has not run on this thread; ran: {', '.join(r.name for r in self.records) or 'none'}"
        )

    def __str__(self) -> str:
        return "\n".join(str(item) for item in self.records)


class _State(threading.local):
    def __init__(self) -> None:
        self.records: dict[str, PassRecord] = {}


_STATE = _State()


def record(item: PassRecord) -> None:
    """Keep a record, replacing the pass's earlier one and moving it to the end."""
    _STATE.records.pop(item.name, None)
    _STATE.records[item.name] = item


def clear_records() -> None:
    """Forget all records of this thread."""
    _STATE.records.clear()


def last_report() -> PassReport:
    """What each of our passes did the last time it ran on this thread."""
    return PassReport(tuple(_STATE.records.values()))
