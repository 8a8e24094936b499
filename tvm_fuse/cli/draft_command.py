"""``tvm-fuse tune`` where nothing is measured here: drafts, packages of candidates, imported results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tvm_fuse.cli.options import to_mapping
from tvm_fuse.cli.progress import show_progress
from tvm_fuse.cli.steering import check_folder, read_epsilons, read_steering
from tvm_fuse.core.errors import UsageError

__all__ = ["check_combination", "run_draft", "run_import"]

_INTERRUPTED = 130

#: Options of a search that measures, by their names in the namespace.
_MEASURING = {"rpc": "--rpc", "key": "--key", "log": "--log", "resume": "--resume", "merge": "--merge"}


def check_combination(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: They do, or there is no model.
    """
    is_import = args.import_results is not None
    is_draft = args.draft or args.export_candidates is not None
    if is_import and (is_draft or args.model is not None):
        raise UsageError("--import-results goes with neither a model nor --draft nor --export-candidates")
    if not is_import and args.model is None:
        raise UsageError("wanted a MODEL to tune, got none", "only --import-results needs no model")
    given = [option for name, option in _MEASURING.items() if getattr(args, name)]
    if (is_import or is_draft) and given:
        raise UsageError(f"{given[0]} is for a search that measures; nothing is measured here")
    if not is_draft and (args.card or args.arch):
        raise UsageError("--card and --arch are for --draft and --export-candidates")


def run_draft(args: argparse.Namespace) -> int:
    """Draft schedules; the exit code is 0, or 130 after Ctrl-C, which keeps what is done."""
    steering = read_steering(args)
    check_folder(args.records, "--records")
    with show_progress("loading TVM"):
        from tvm_fuse.drafting import DraftOptions, draft_model
        from tvm_fuse.drafting_report import render_draft_row, render_drafts
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.report import to_json
    options = DraftOptions(
        **read_epsilons(args),
        **steering.options,
        tasks=tuple(args.tasks),
        card=args.card,
        archs=tuple(args.arch),
        into=args.records,
        is_kept=args.draft,
        export=args.export_candidates,
        trials=args.trials,
        seconds=args.time,
        seed=args.seed,
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=to_mapping(args.shape, "--shape"), params=args.params)
    report = draft_model(
        model,
        args.target,
        options,
        show_progress,
        lambda row: print(render_draft_row(row), file=sys.stderr, flush=True),
    )
    print(render_drafts(report), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(to_json(report))
    return _INTERRUPTED if report.is_interrupted else 0


def run_import(args: argparse.Namespace) -> int:
    """Import results; the exit code is 0."""
    from tvm_fuse.importing import import_results, render_import
    from tvm_fuse.report import to_json

    check_folder(args.records, "--records")
    package, file = args.import_results
    report = import_results(Path(package), Path(file), args.records)
    print(render_import(report), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(to_json(report))
    return 0
