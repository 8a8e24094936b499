"""``tvm-fuse tune`` for CUDA without a GPU: drafts by an analytic score, verified by the compiler.

They become records that say that nobody measured them, or a package of candidates to be measured elsewhere.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable

from tvm_fuse import __version__
from tvm_fuse.core.errors import ModelError, ToolFailed, UsageError
from tvm_fuse.core.tuning.constants import load_constants
from tvm_fuse.core.tuning.records import TunedRecord, beats, load_records, save_record
from tvm_fuse.core.tuning.score import find_card
from tvm_fuse.core.tuning.shortlist import choose_shortlist
from tvm_fuse.cuda.candidate_files import check_place
from tvm_fuse.drafting_report import DraftReport, DraftRow
from tvm_fuse.packaging import PackageWriter
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.kernel_functions import find_kernels
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import is_cuda, resolve_target
from tvm_fuse.relay.tune_draft import (
    Draft,
    DraftParameters,
    Scorer,
    draft_schedules,
    profile_kernel,
    profile_schedule,
    written_for,
)
from tvm_fuse.relay.tune_tasks import TunedTask, device_key_of, find_tasks
from tvm_fuse.relay.tune_verify import BuiltKernel, build_candidate
from tvm_fuse.tuning import select_tasks

__all__ = ["DraftOptions", "draft_model"]

#: A draft becomes a record when it is predicted to take at most this share of the time without it: the
#: score is not sharper than that.
_WORTH = 0.9
#: Drafts that are compiled for a record.
_FOR_RECORD = 2


@dataclass(frozen=True)
class DraftOptions(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        tasks: Patterns of kernels, by name or digest; none: all.
        card: Short name of the card to draft for; None: the one that stands for the architecture.
        archs: Architectures to draft for, beside the target's; records only.
        into: Folder of records: constants of the score are read from it, drafts go there.
        is_kept: Whether drafts become records.
        export: Folder for a package of candidates; None: none is written.
        per_task: Candidates of each kernel in the package, at most.
        trials: Candidates of all kernels in the package; None: as many as ``per_task`` makes.
        seconds: After so many seconds no further kernel is begun; None: all are.
        seed: Of the search and of the data.
        parameters: How broadly to draft.
    """

    tasks: tuple[str, ...] = ()
    card: str | None = None
    archs: tuple[str, ...] = ()
    into: Path = Path("tuned")
    is_kept: bool = False
    export: Path | None = None
    per_task: int = 8
    trials: int | None = None
    seconds: float | None = None
    seed: int = 0
    parameters: DraftParameters = field(default_factory=DraftParameters)


@dataclass(frozen=True)
class _Place:
    """An architecture that is drafted for."""

    target: Any
    device: str
    scorer: Scorer


@dataclass(frozen=True)
class _Work:
    """A kernel, and the architectures that the model needs it on."""

    one: TunedTask
    places: tuple[_Place, ...]


def draft_model(
    model: RelayModel,
    target: Any,
    options: DraftOptions,
    progress: Progress = quietly,
    observe: Callable[[DraftRow], None] = lambda row: None,
) -> DraftReport:
    """Draft schedules for the kernels of a model.

    Args:
        model: The model.
        target: ``cuda -arch=sm_80`` or the like; no GPU is needed.
        options: See ``DraftOptions``.
        progress: Called around each step before the first kernel.
        observe: Called with each row when it is done.

    Returns:
        What was found. Records and the package are written by then.

    Raises:
        UsageError: The target is not CUDA's, the card is not known, no kernel fits, or the folder of the
            package is something else.
        ModelError: There is nothing to tune.
        MissingDependency: There is no NVRTC.
    """
    start = time.monotonic()
    places = _find_places(target, options)
    if options.export is not None:
        check_place(options.export)
    works = _find_works(model, places, options, progress)
    writer = PackageWriter(model.name, places[0].target, places[0].device, places[0].scorer, options.seed)
    if options.trials is not None:
        options = replace(options, per_task=max(1, min(options.per_task, options.trials // len(works))))
    rows: list[DraftRow] = []
    written: list[str] = []
    done = 0
    with _noted_interrupts() as interrupts:
        for work in works:
            is_late = options.seconds is not None and time.monotonic() - start > options.seconds
            if is_late or interrupts:
                break
            for row, record in _draft(model, work, options, writer if options.export is not None else None):
                rows.append(row)
                observe(row)
                if record is not None:
                    written.append(str(save_record(options.into, record)))
            done += 1
    if options.export is not None:
        writer.save(options.export)
    return DraftReport(
        tool_version=__version__,
        model=model.name,
        target=str(places[0].target),
        cards=tuple(place.scorer.card.name for place in places),
        rows=tuple(rows),
        skipped=len(works) - done,
        is_interrupted=bool(interrupts),
        seconds=time.monotonic() - start,
        written=tuple(written),
        package=str(options.export) if options.export is not None else "",
    )


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """The first Ctrl-C is noted, for the end of a kernel: TVM, which calls our code, would lose it."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _find_places(target: Any, options: DraftOptions) -> tuple[_Place, ...]:
    first = resolve_target(target)
    if not is_cuda(first):
        raise UsageError(
            f"schedules are drafted for CUDA; the target is {first.kind.name}", "--target 'cuda -arch=sm_80'"
        )
    archs = [arch for arch in dict.fromkeys(options.archs) if arch != str(first.arch)]
    if archs and options.export is not None:
        raise UsageError("a package of candidates is for one architecture: wanted no --arch beside it")
    places = []
    for each in (first, *(resolve_target(f"cuda -arch={arch}") for arch in archs)):
        card = find_card(str(each.arch), options.card if each is first else None)
        device = device_key_of(each)
        places.append(_Place(each, device, Scorer(card, load_constants(options.into, device))))
    return tuple(places)


def _find_works(
    model: RelayModel, places: Sequence[_Place], options: DraftOptions, progress: Progress
) -> list[_Work]:
    """The kernels on all architectures, each once; those with the most operations in an inference first."""
    found: dict[tuple[str, str], _Work] = {}
    for place in places:
        fused = fuse_model(model, place.target, replace(options, records=None), progress)
        with progress(f"finding kernels to tune for {place.device}"):
            kernels = find_kernels(fused.module, place.target)
            tasks = find_tasks(kernels, place.target, place.scorer.card.device, {})
        for one in tasks:
            key = one.task.digest, one.task.workload_key
            before = found.get(key, _Work(one, ()))
            found[key] = replace(before, places=(*before.places, place))
    if not found:
        raise ModelError(f"{model.name}: 0 tasks: none of its kernels sums anything up")
    chosen = {id(one) for one in select_tasks([work.one for work in found.values()], options.tasks)}
    works = [work for work in found.values() if id(work.one) in chosen]
    return sorted(works, key=lambda work: -work.one.task.flops * work.one.task.weight)


def _draft(
    model: RelayModel, work: _Work, options: DraftOptions, writer: PackageWriter | None
) -> Iterator[tuple[DraftRow, TunedRecord | None]]:
    """One kernel: sampled once, ranked and verified for each architecture."""
    drafts: tuple[Draft, ...] = ()
    problem = ""
    try:
        scorers = [place.scorer for place in work.places]
        drafts = draft_schedules(work.one, work.places[0].target, scorers, options.parameters, options.seed)
    except (RuntimeError, ValueError) as error:  # TVM's, of a computation that has no sketch
        problem = f"no schedules can be drafted: {_last_line(error)}"
    for place in work.places:
        try:
            yield _draft_for(model, work.one, place, drafts, options, writer, problem)
        except (ToolFailed, ModelError) as error:
            yield _make_row(work.one, place, drafts, problem=_last_line(error)), None


def _draft_for(
    model: RelayModel,
    one: TunedTask,
    place: _Place,
    drafts: Sequence[Draft],
    options: DraftOptions,
    writer: PackageWriter | None,
    problem: str,
) -> tuple[DraftRow, TunedRecord | None]:
    """Rank and verify the drafts of a kernel for one architecture."""
    stored = load_records(options.into, place.device).records.get(one.task.digest)
    shortlist = _Shortlist(one, place)
    baseline = build_candidate(one, place.target, "", profile_kernel(one.function, place.target))
    baseline_s = place.scorer(baseline.profiles)
    count = options.per_task if writer is not None else _FOR_RECORD
    known = _known_draft(one, stored) if writer is not None else ()
    most_s = math.inf if writer is not None else _WORTH * baseline_s
    kept = shortlist.choose((*known, *drafts), count, most_s, len(known))
    if writer is not None:
        writer.add(one, baseline, kept)
    record = None
    best_s = place.scorer(kept[0].profiles) if kept else None
    if options.is_kept and best_s is not None and best_s <= _WORTH * baseline_s < math.inf:
        record = _make_record(model, one, place, kept[0], (best_s, baseline_s), len(drafts))
        record = record if beats(record, stored) else None
    row = _make_row(one, place, drafts, problem=problem)
    row = replace(
        row,
        baseline_s=baseline_s if math.isfinite(baseline_s) else None,
        best_s=best_s,
        kept=len(kept),
        rejected=dict(shortlist.rejected),
        has_record=record is not None,
    )
    return row, record


def _make_row(one: TunedTask, place: _Place, drafts: Sequence[Draft], problem: str) -> DraftRow:
    """The row of a kernel of which nothing more is known."""
    return DraftRow(
        digest=one.task.digest,
        name=one.task.name,
        detail=one.task.detail,
        device=place.device,
        weight=one.task.weight,
        baseline_s=None,
        best_s=None,
        drafted=len(drafts),
        kept=0,
        rejected={},
        has_record=False,
        problem=problem,
    )


def _last_line(error: Exception) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def _known_draft(one: TunedTask, stored: TunedRecord | None) -> tuple[Draft, ...]:
    """The schedule of a record that is there, to be measured as well."""
    if stored is None or stored.workload_key != one.task.workload_key:
        return ()
    return (Draft(stored.schedule, profile_schedule(one, stored.schedule)),)


@dataclass
class _Shortlist:
    """Ranks and verifies the drafts of a kernel for one architecture."""

    one: TunedTask
    place: _Place
    rejected: Counter[str] = field(default_factory=Counter)

    def choose(
        self, drafts: Sequence[Draft], count: int, most_s: float, first: int
    ) -> tuple[BuiltKernel, ...]:
        """At most ``count`` that pass, the best by score first.

        Args:
            drafts: All of them.
            count: How many are wanted.
            most_s: Those that are predicted to take longer are not looked at.
            first: So many are looked at before all others, whatever their score.
        """
        distinct = {draft.profiles: draft for draft in reversed(drafts[first:])}  # the first of those alike
        scored = [(self.place.scorer(draft.profiles), draft) for draft in distinct.values()]
        ranked = sorted((pair for pair in scored if pair[0] <= most_s), key=lambda pair: pair[0])
        kept = choose_shortlist([*drafts[:first], *(draft for _, draft in ranked)], count, self._verify)
        return tuple(sorted(kept, key=lambda built: self.place.scorer(built.profiles)))

    def _verify(self, draft: Draft) -> BuiltKernel | None:
        try:
            place = self.place
            text = written_for(draft.schedule, place.target, place.scorer.card)
            built = build_candidate(self.one, place.target, text, draft.profiles)
        except ToolFailed:
            self.rejected["does not build"] += 1
            return None
        problem = built.problem or ("" if built.profiles else "is launched otherwise than it was scored")
        if problem:
            self.rejected[problem] += 1
            return None
        return built


def _make_record(
    model: RelayModel,
    one: TunedTask,
    place: _Place,
    built: BuiltKernel,
    times: tuple[float, float],
    drafted: int,
) -> TunedRecord:
    provenance: Mapping[str, Any] = {
        "tool": f"tvm-fuse {__version__}",
        "tvm": find_tvm().version,
        "compiler": built.compiler,
        "model": model.name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": place.scorer.card.device.name,
        "drafted": drafted,
        "measured": "no: times are predicted by the score",
    }
    return TunedRecord(
        digest=one.task.digest,
        device=place.device,
        name=one.task.name,
        chain=one.task.chain,
        workload_key=one.task.workload_key,
        schedule=built.schedule,
        cost_s=times[0],
        baseline_s=times[1],
        max_abs=0.0,
        needed=0.0,
        provenance=provenance,
        measured=False,
    )
