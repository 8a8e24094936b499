"""``tvm-fuse tune``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TextIO

from tvm_fuse.cli.draft_command import check_combination, run_draft, run_import
from tvm_fuse.cli.options import to_mapping
from tvm_fuse.cli.progress import show_progress
from tvm_fuse.cli.steering import check_folder, read_epsilons, read_steering
from tvm_fuse.core.errors import ParityFailed, ToolFailed, UsageError
from tvm_fuse.core.parity import GivenTolerance
from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.job import JobState, Phase
from tvm_fuse.core.tuning.records import merge_records

__all__ = ["COMMANDS", "run_tune"]

COMMANDS = ("tune",)

_INTERRUPTED = 130
_DEFAULT_S = 600.0


def run_tune(args: argparse.Namespace) -> int:
    """Tune a model; exit code 1: the tuned network is wrong, 5: no candidate works, 130: interrupted."""
    check_combination(args)
    if args.import_results is not None:
        return run_import(args)
    if args.draft or args.export_candidates is not None:
        return run_draft(args)
    if (args.rpc is None) != (args.key is None):
        raise UsageError("--rpc HOST:PORT and --key KEY go together: give both or none")
    steering = read_steering(args)
    check_folder(args.records, "--records")
    if args.merge is not None and not args.merge.is_dir():
        raise UsageError(f"--merge {args.merge}: wanted a folder of records, which is not there")
    args.records.mkdir(parents=True, exist_ok=True)
    budget = Budget(args.trials, args.time if args.time or args.trials else _DEFAULT_S)
    with show_progress("loading TVM"):
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.relay.tune_kernel import Remote
        from tvm_fuse.render_tuning import render_tuning
        from tvm_fuse.report import to_json
        from tvm_fuse.tuning import TuneOptions, tune_model
    options = TuneOptions(
        **read_epsilons(args),
        **steering.options,
        budget=budget,
        tasks=tuple(args.tasks),
        log=args.log or Path(f"{args.model.stem}.tuning.jsonl"),
        resume=args.resume,
        into=args.records,
        remote=None if args.rpc is None else Remote(args.rpc[0], args.rpc[1], args.key),
        timeout_s=args.timeout,
        tolerance=GivenTolerance(args.atol, args.rtol),
        seed=args.seed,
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=to_mapping(args.shape, "--shape"), params=args.params)
    people = sys.stderr if args.json else sys.stdout
    if args.merge is not None:
        print(
            f"took over {len(merge_records(args.records, args.merge))} records of {args.merge}", file=people
        )
    report = tune_model(model, args.target, options, show_progress, _Live(budget, sys.stderr))
    print(render_tuning(report), file=people)
    if args.json:
        print(to_json(report))
    if report.score is not None and not report.score.parity.passed:
        return ParityFailed.exit_code
    if report.is_interrupted:
        return _INTERRUPTED
    return ToolFailed.exit_code if report.is_failure else 0


class _Live:
    """Shows the tasks once they are timed, then one line that is rewritten, or lines in a log file."""

    def __init__(self, budget: Budget, stream: TextIO) -> None:
        self._budget, self._stream = budget, stream
        self._is_listed = False

    def __call__(self, state: JobState) -> None:
        from tvm_fuse.render_tuning import render_line, render_tasks

        if state.phase is not Phase.TIMING and not self._is_listed:
            self._is_listed = True
            self._write(render_tasks(state), "\n")
        remaining = self._budget.remaining_s(state.trials, state.done, state.seconds)
        is_worth_a_line = self._stream.isatty() or (state.phase is Phase.SEARCHING and state.done)
        if is_worth_a_line:
            self._write(render_line(state, remaining), "\r" if self._stream.isatty() else "\n")

    def _write(self, text: str, end: str) -> None:
        clear = "\x1b[K" if self._stream.isatty() else ""
        self._stream.write(text + clear + end)
        self._stream.flush()
