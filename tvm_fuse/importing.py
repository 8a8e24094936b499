"""``tvm-fuse tune --import-results``: times of a GPU become records, and better constants of the score.

It needs no TVM.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_fuse import __version__
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.tuning.constants import save_constants
from tvm_fuse.core.tuning.fit import LEAST_SAMPLES, Fit, Quality, Sample, fit_constants
from tvm_fuse.core.tuning.job import FASTER
from tvm_fuse.core.tuning.records import (
    TunedRecord,
    beats,
    load_records,
    remove_record,
    save_record,
    steps_of,
)
from tvm_fuse.core.tuning.score import Card, find_card, predict_s
from tvm_fuse.cuda.candidate_files import load_package, package_digest
from tvm_fuse.cuda.candidate_results import TIMED, CandidateResult, Results, read_results
from tvm_fuse.cuda.candidates import Candidate, CandidateTask, Package

__all__ = ["ImportReport", "ImportRow", "import_results", "render_import"]

_US = 1e6
_NAME = 34


@dataclass(frozen=True)
class ImportRow:
    """What became of one kernel's candidates.

    Args:
        digest: Of its chain.
        name: Its chain.
        baseline_s: Seconds of the kernel that is built without a record; None: it was not measured.
        best_s: Seconds of the fastest candidate that is right; None: there is none.
        speedup: Time of the baseline over that of the candidate, in the same rounds; None as above.
        outcomes: Outcome -> how many candidates.
        first_error: The first candidate that is wrong or failed, and why.
        is_accepted: Whether the candidate is faster by more than noise and became a record.
        is_removed: Whether a record or draft went away, since it was measured and is not faster.
    """

    digest: str
    name: str
    baseline_s: float | None
    best_s: float | None
    speedup: float | None
    outcomes: Mapping[str, int]
    first_error: str
    is_accepted: bool
    is_removed: bool


@dataclass(frozen=True)
class ImportReport:
    """What an import came to.

    Args:
        tool_version: Version of tvm-fuse.
        model: Name of the model.
        device: Key of the device.
        card: What the device calls itself.
        rows: The kernels.
        fit: New constants of the score; None: there were too few times.
        written: Files of records, and of the constants.
    """

    tool_version: str
    model: str
    device: str
    card: str
    rows: tuple[ImportRow, ...]
    fit: Fit | None
    written: tuple[str, ...]


def import_results(folder: Path, file: Path, into: Path) -> ImportReport:
    """Make records of what a GPU measured, and fit the score to it.

    Args:
        folder: The package of candidates.
        file: What its ``run.py`` wrote.
        into: Folder of records.

    Returns:
        What was found; records and constants are written.

    Raises:
        UsageError: A file is not there, or the folder cannot be written.
        ModelError: The results are of another package or architecture, or of the emulator.
    """
    package, results = load_package(folder), read_results(file)
    _check(folder, package, file, results)
    rows, written = [], []
    for task in package.tasks:
        row, record = _read_task(package, task, results, into)
        rows.append(row)
        if record is not None:
            written.append(str(save_record(into, record)))
    card = find_card(package.arch, package.card)
    fit = fit_constants(_samples(package, results, card), card, package.constants)
    if fit is not None:
        provenance = {
            "tool": f"tvm-fuse {__version__}",
            "model": package.model,
            **_measured_on(results),
            "samples": fit.samples,
        }
        written.append(str(save_constants(into, package.device, fit.constants, provenance)))
    return ImportReport(
        tool_version=__version__,
        model=package.model,
        device=package.device,
        card=results.card,
        rows=tuple(rows),
        fit=fit,
        written=tuple(written),
    )


def _check(folder: Path, package: Package, file: Path, results: Results) -> None:
    digest = package_digest(folder)
    if results.package != digest:
        raise ModelError(
            f"{file}: the results are of the package {results.package[:12]}, {folder} is {digest[:12]}",
            "import them with the package that was measured",
        )
    if results.is_emulated:
        raise ModelError(
            f"{file}: times of the CPU emulator say nothing about a GPU", "run.py without --device"
        )
    if results.arch != package.arch.rstrip("af"):
        raise ModelError(
            f"{file}: the results are of {results.arch} ({results.card}), {folder} is for {package.arch}",
            "measure each package on its own architecture",
        )
    wanted = {one.id for task in package.tasks for one in task.all}
    if results.by_id.keys() != wanted:
        differing = ", ".join(sorted(wanted ^ results.by_id.keys())[:8])
        raise ModelError(f"{file}: its candidates are not those of {folder}: {differing}")


def _read_task(
    package: Package, task: CandidateTask, results: Results, into: Path
) -> tuple[ImportRow, TunedRecord | None]:
    """One kernel; its old record goes away where it was measured again and nothing is faster."""
    known = results.by_id
    found = [(known[one.id], one) for one in task.candidates]
    timed = [(result, one) for result, one in found if result.outcome == TIMED and result.ratio]
    best = min(timed, key=lambda pair: pair[0].ratio, default=None)
    record, is_removed = None, False
    stored = load_records(into, package.device).records.get(task.digest)
    if best is not None and best[0].ratio <= FASTER:
        record = _make_record(package, task, best[1], best[0], results)
    elif stored is not None and steps_of(stored.schedule) in {steps_of(one.schedule) for _, one in timed}:
        remove_record(into, package.device, task.digest)
        is_removed = True
    outcomes = [result.outcome for result, _ in found]
    failures = [f"{result.id}: {result.outcome}: {result.error}" for result, _ in found if result.error]
    row = ImportRow(
        digest=task.digest,
        name=task.name,
        baseline_s=known[task.baseline.id].cost_s or None,
        best_s=best[0].cost_s if best else None,
        speedup=1 / best[0].ratio if best else None,
        outcomes={outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)},
        first_error=next(iter(failures), ""),
        is_accepted=record is not None,
        is_removed=is_removed,
    )
    return row, record if record is not None and beats(record, stored) else None


def _make_record(
    package: Package, task: CandidateTask, candidate: Candidate, result: CandidateResult, results: Results
) -> TunedRecord:
    baseline_s = statistics.median(result.baseline_s)
    return TunedRecord(
        digest=task.digest,
        device=package.device,
        name=task.name,
        chain=task.chain,
        workload_key=task.workload_key,
        schedule=candidate.schedule,
        cost_s=result.ratio * baseline_s,
        baseline_s=baseline_s,
        max_abs=result.max_abs,
        needed=result.needed,
        provenance={
            "tool": f"tvm-fuse {__version__}",
            **{f"exported by {name}": version for name, version in package.versions.items()},
            "model": package.model,
            **_measured_on(results),
            "candidates": len(task.candidates),
            "seed": task.seed,
            "measured": "from a package of candidates, the second cache flushed before each call",
        },
    )


def _measured_on(results: Results) -> dict[str, Any]:
    return {"card": results.card, "driver": results.driver, "date": results.date, "package": results.package}


def _samples(package: Package, results: Results, card: Card) -> list[Sample]:
    """All kernels that were timed and have a score, baselines included."""
    known = results.by_id
    return [
        Sample(task.digest, one.profiles, known[one.id].cost_s)
        for task in package.tasks
        for one in task.all
        if known[one.id].outcome == TIMED
        and one.profiles
        and math.isfinite(predict_s(one.profiles, card, package.constants))
    ]


# --- for people --------------------------------------------------------------------------------------


def render_import(report: ImportReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: ImportReport) -> Iterator[str]:
    yield f"{report.model} on {report.card} ({report.device})"
    yield ""
    yield f"{'kernel':<{_NAME}} {'us now':>9} {'us best':>9} {'x':>6}  candidates"
    for row in report.rows:
        end = "  record" if row.is_accepted else "  record removed" if row.is_removed else ""
        gain = "-" if row.speedup is None else f"{row.speedup:.2f}"
        counts = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
        times = f"{_us(row.baseline_s):>9} {_us(row.best_s):>9} {gain:>6}"
        yield f"{row.name[:_NAME]:<{_NAME}} {times}  {counts}{end}"
    yield ""
    yield from (f"{row.name}: {row.first_error}" for row in report.rows if row.first_error)
    if report.fit is None:
        yield f"the score keeps its constants: fewer than {LEAST_SAMPLES} kernels were timed"
    else:
        yield f"the score, fitted to {report.fit.samples} times: {_quality(report.fit.before)}"
        yield f"  now, on kernels that it was not fitted to: {_quality(report.fit.after)}"
    yield f"wrote {len(report.written)} files" if report.written else "wrote nothing"


def _quality(quality: Quality) -> str:
    correlation = "-" if math.isnan(quality.rank_correlation) else f"{quality.rank_correlation:.2f}"
    regrets = ", ".join(f"best of {k} costs {regret:.2f} x" for k, regret in quality.regrets.items())
    return f"rank correlation {correlation}, {regrets}, off by {quality.error:.2f} x"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * _US:.1f}"
