"""What a run of a bundle found, as data, as JSON and as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_fuse.core.parity import ParityReport, ParityRow, Tolerance
from tvm_fuse.render import render_parity
from tvm_fuse.report import quartiles, to_plain
from tvm_fuse.runner.driver import DeviceInfo

__all__ = ["SCHEMA", "KernelTiming", "RunReport", "Timing", "from_json", "render", "to_json"]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/bundle-run", "version": 1}

_US = 1e6  # microseconds of a second


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one piece of work.

    Args:
        times_s: Seconds of one execution, a number for each repeat.
        count: Executions in each repeat, between two events.
        is_graph: Whether the device ran them as a CUDA graph, instead of launches from this process.
    """

    times_s: tuple[float, ...]
    count: int
    is_graph: bool

    @property
    def median_s(self) -> float:
        """Median of the repeats, seconds."""
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class KernelTiming:
    """The time of one launch of the graph by itself.

    Args:
        operator: The operator that it belongs to.
        symbol: The kernel.
        timing: Its time, with its data in the cache as far as it fits.
    """

    operator: str
    symbol: str
    timing: Timing


@dataclass(frozen=True)
class RunReport:
    """What a run found.

    Args:
        model: Name of the model.
        source_sha256: Hash of the model's files.
        target: TVM's target.
        versions: What made the bundle.
        device: Where it ran.
        is_emulated: Whether that was the CPU emulator.
        image: File with the kernels that were loaded.
        is_seeded: Whether the parameters are drawn from a seed.
        memory_bytes: Device memory of tensors and workspaces.
        launches: Kernel launches of one inference.
        parity: Outputs compared with the golden ones.
        timings: One inference, by launches and, where it can be captured, as a CUDA graph.
        kernels: Every launch by itself, where that was asked for.
        notes: What else a reader should know.
    """

    model: str
    source_sha256: str
    target: str
    versions: dict[str, str]
    device: DeviceInfo
    is_emulated: bool
    image: str
    is_seeded: bool
    memory_bytes: int
    launches: int
    parity: ParityReport
    timings: tuple[Timing, ...]
    kernels: tuple[KernelTiming, ...]
    notes: tuple[str, ...]


def to_json(report: RunReport) -> str:
    """The report as one JSON document; non-finite numbers are strings."""
    document = {"schema": SCHEMA, "passed": report.parity.passed, **to_plain(report)}
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def from_json(text: str) -> RunReport:
    """The report that ``to_json`` wrote."""
    document = json.loads(text)
    parity, kernels = document["parity"], document["kernels"]
    values = {
        **document,
        "device": DeviceInfo(**document["device"]),
        "parity": ParityReport(
            tuple(map(_read_row, parity["rows"])),
            tuple(parity["missing"]),
            tuple(parity["extra"]),
            parity["seed"],
        ),
        "timings": tuple(map(_read_timing, document["timings"])),
        "kernels": tuple(KernelTiming(**{**row, "timing": _read_timing(row["timing"])}) for row in kernels),
        "notes": tuple(document["notes"]),
    }
    return RunReport(**{name: value for name, value in values.items() if name not in ("schema", "passed")})


def _read_row(row: Mapping[str, Any]) -> ParityRow:
    numbers = {name: float(row[name]) for name in _ROW_NUMBERS}  # "inf" and "nan" are strings
    sequences = {name: tuple(row[name]) for name in ("shape", "worst_index")}
    return ParityRow(**{**row, **numbers, **sequences, "tolerance": Tolerance(**row["tolerance"])})


_ROW_NUMBERS = (
    "max_abs", "max_rel", "mean_abs", "worst_got", "worst_reference", "needed", "reference_max",
)  # fmt: skip


def _read_timing(timing: Mapping[str, Any]) -> Timing:
    return Timing(**{**timing, "times_s": tuple(timing["times_s"])})


def render(report: RunReport) -> str:
    """The report as text, about one screen."""
    device = report.device
    where = "on this machine's CPU, no GPU" if report.is_emulated else f"driver for CUDA {device.driver}"
    lines = [
        f"{report.model} on {device.name} ({device.arch}, {device.sms} SMs; {where})",
        f"{report.image}, {report.launches} launches, {report.memory_bytes / 1e6:.1f} MB of device memory",
        "",
        *render_parity(report.parity, "Parity with the golden outputs"),
    ]
    if report.timings:
        lines += ["", "One inference", *map(_render_timing, report.timings)]
    if report.kernels:
        lines += ["", *_render_kernels(report.kernels)]
    return "\n".join([*lines, "", *(f"note: {note}" for note in report.notes)]).rstrip()


def _render_timing(timing: Timing) -> str:
    name = "as a CUDA graph" if timing.is_graph else "launched kernel by kernel"
    shown = {key: value * _US for key, value in quartiles(timing.times_s).items()}
    spread = f"quartiles {shown['quartile_1']:.1f} to {shown['quartile_3']:.1f}"
    return (
        f"  {name:<26} {shown['median']:>10.1f} us   "
        f"({spread}; {len(timing.times_s)} repeats of {timing.count})"
    )


def _render_kernels(kernels: Sequence[KernelTiming]) -> list[str]:
    total_s = sum(kernel.timing.median_s for kernel in kernels)
    lines = [f"{'Each launch by itself':<62} {'us':>9} {'share':>7}"]
    for kernel in sorted(kernels, key=lambda entry: -entry.timing.median_s):
        median_s = kernel.timing.median_s
        share = f"{100.0 * median_s / total_s:.1f} %" if total_s else ""
        lines.append(f"  {kernel.symbol[-60:]:<60} {median_s * _US:>9.2f} {share:>7}")
    return [*lines, f"  {'sum':<60} {total_s * _US:>9.2f}"]
