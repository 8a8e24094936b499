"""A tuning job as text: the tasks, the line that shows how far it is, and what it came to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tvm_fuse.core.tuning.job import JobState, Phase
from tvm_fuse.report import quartiles
from tvm_fuse.tuning_report import TaskRow, TuningReport

__all__ = ["render_line", "render_tasks", "render_tuning"]

_NAME = 34
_ERROR = 160


def render_tasks(state: JobState) -> str:
    """The kernels, once the time without tuning is known of each."""
    lines = [f"{'kernel':<{_NAME}} {'digest':<12} {'x':>3} {'MFLOP':>9} {'us now':>9} {'x roofline':>10}"]
    for one in state.tasks:
        task, now = one.task, one.baseline_s
        headroom = now / task.roofline_s if now and task.roofline_s else None
        lines.append(
            f"{_short(task.name):<{_NAME}} {task.digest:<12} {task.weight:>3} {task.flops / 1e6:>9.2f} "
            f"{_us(now):>9} {'-' if headroom is None else f'{headroom:.1f}':>10}"
        )
    return "\n".join([*lines, f"all of them: {state.network_s * 1e3:.3f} ms in an inference"])


def render_line(state: JobState, remaining_s: float | None) -> str:
    """How far a job is: trials, time, the network at its best, the task just measured."""
    current = next((one for one in state.tasks if one.task == state.current), None)
    name = "" if current is None else _short(current.task.name)
    if state.phase is Phase.TIMING:
        done = sum(one.baseline_s is not None or bool(one.stopped) for one in state.tasks)
        return f"timing the kernels as they are: {done} of {len(state.tasks)}; {name}"
    if state.phase is Phase.COMPARING:
        found = state.compared.get(state.current.digest) if state.current else None
        faster = f"{found[1].baseline_s / found[1].cost_s:.2f} x" if found and found[1].cost_s else "failed"
        return f"measuring the best in turn with the kernels as they are: {name} {faster}"
    left = "" if remaining_s is None else f", {_time(remaining_s)} to go"
    line = f"{state.trials} trials, {_time(state.seconds)}{left}; network {state.network_s * 1e3:.3f} ms"
    if current is None or not state.done:
        return line
    best = current.best.cost_s if current.best else None
    return f"{line}; {name} {_us(current.baseline_s)} us, tuned {_us(best)} us"


def render_tuning(report: TuningReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: TuningReport) -> Iterator[str]:
    yield f"{report.model} on {report.device} ({report.target})"
    yield f"{report.trials} candidates measured, {_time(report.seconds)} in this run"
    if report.is_interrupted:
        yield "interrupted: what was measured is in the log, and --resume goes on"
    yield ""
    yield f"{'kernel':<{_NAME}} {'trials':>6} {'failed':>6} {'us now':>9} {'us tuned':>9}  record"
    yield from map(_row, report.tasks)
    yield ""
    yield from _findings(report.tasks)
    if report.written:
        yield f"wrote {len(report.written)} records"
    if report.removed:
        yield f"removed {len(report.removed)} records that are damaged or no longer faster"
    yield from _score(report)


def _row(row: TaskRow) -> str:
    kept = "-" if row.compared is None else f"{row.compared:.2f} x{'' if row.is_accepted else ', not kept'}"
    return (
        f"{_short(row.name):<{_NAME}} {row.trials:>6} {row.failed:>6} {_us(row.baseline_s):>9} "
        f"{_us(row.best_s):>9}  {kept}"
    )


def _findings(rows: Iterable[TaskRow]) -> Iterator[str]:
    failed = [row for row in rows if row.trials and row.best_s is None]
    if failed:
        names = ", ".join(row.name for row in failed)
        yield f"no candidate works for {len(failed)} kernels, which stay as they are: {names}"
        yield f"  the first error: {failed[0].first_error[:_ERROR]}"
    for row in rows:
        if row.baseline_s is None and row.stopped:
            yield f"{row.name}: {row.stopped[:_ERROR]}"
        if row.comparison_error:
            yield f"{row.name}: the comparison with the kernel now failed: {row.comparison_error[:_ERROR]}"


def _score(report: TuningReport) -> Iterator[str]:
    score = report.score
    if score is None:
        return
    found = quartiles(score.speedups)
    yield (
        f"network: {quartiles(score.untuned_s)['median'] * 1e3:.3f} ms without records, "
        f"{quartiles(score.tuned_s)['median'] * 1e3:.3f} ms with {score.records}: {found['median']:.2f} x "
        f"(quartiles {found['quartile_1']:.2f} to {found['quartile_3']:.2f})"
    )
    yield f"parity with the unfused model: {'passed' if score.parity.passed else 'FAILED'}"


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 3] + "..."


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
