"""What jobs report, as pages of text for somebody new to the project."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.epsilon import EpsilonOrigin
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.gpu import WARP_THREADS
from tvm_fuse.core.manifest import Manifest
from tvm_fuse.core.parity import ParityReport, ParityRow
from tvm_fuse.core.reason import Decision
from tvm_fuse.core.weights import FoldedLayer
from tvm_fuse.cuda.source import short_name
from tvm_fuse.report import (
    FoldReport,
    Kernel,
    KernelReport,
    Latency,
    Place,
    Report,
    Verification,
    quartiles,
)

__all__ = [
    "render",
    "render_fold",
    "render_kernels",
    "render_manifest",
    "render_parity",
    "render_verification",
]

_MOST_REASONS = 12
_WIDTH = 92


def render(report: Report) -> str:
    """The report as text, about one screen."""
    sections = [
        _render_title(report),
        _render_folds(report),
        _render_warnings(report),
        _render_chains(report),
        _render_gain(report),
        render_parity(report.parity, "Parity with the unfused model"),
        _render_notes(report),
    ]
    return _join(sections)


def render_fold(report: FoldReport) -> str:
    """The outcome of the fold job as text."""
    title = f"{report.model}    (tvm-fuse {report.manifest.versions['tvm-fuse']})"
    return _join([[title], _render_folds(report), _render_warnings(report)])


def render_manifest(manifest: Manifest) -> str:
    """A manifest as text: each batch norm, and where it went."""
    versions = ", ".join(f"{program} {version}" for program, version in sorted(manifest.versions.items()))
    lines = [f"folded from {manifest.source.name} (SHA-256 {manifest.source.sha256})", f"by {versions}", ""]
    for norm in manifest.batch_norms:
        layers = ", ".join(layer.name for layer in norm.layers)
        lines.append(f"{norm.name}: epsilon {norm.epsilon:.6g} ({norm.epsilon_origin}), into {layers}")
        lines.append(f"  variance at least {norm.variance_min:.3g}, gain at most {norm.gain_max:.3g}")
        lines += [_render_layer(layer) for layer in norm.layers]
    for run in manifest.scale_shifts:
        lines.append(f"{', '.join(run.operators)}: into {', '.join(layer.name for layer in run.layers)}")
        lines += [_render_layer(layer) for layer in run.layers]
    lines += [f"{left.name}: not folded: {left.reason}" for left in manifest.left_alone]
    return "\n".join(lines)


def _render_layer(layer: FoldedLayer) -> str:
    weights = f"weight {layer.weight_before} -> {layer.weight_after}"
    return f"  {weights}, rounding at most {layer.weight_error:.1e} x largest input + {layer.bias_error:.1e}"


def render_verification(outcome: Verification) -> str:
    """A verification as text: what does not hold, and the outputs compared."""
    failed = [check for check in outcome.checks if check.problem]
    held = f"{len(outcome.checks) - len(failed)} of {len(outcome.checks)} hold"
    lines = [_headline("Hashes and numbers", held)]
    lines += [f"  FAILED: {check.what}: {check.problem}" for check in failed[:_MOST_REASONS]]
    lines += _render_rest(len(failed))
    title = "Outputs compared with the source" + (f", both run by {outcome.engine}" if outcome.engine else "")
    return _join([lines, render_parity(outcome.parity, title)])


def render_kernels(report: KernelReport) -> str:
    """The CUDA kernels of a model as a table."""
    used = [kernel.resources for kernel in report.kernels]
    spills, stacks = sum(row.spill_bytes > 0 for row in used), sum(row.stack_bytes > 0 for row in used)
    lines = [f"{report.model} for {report.arch}    ({report.compiler})"]
    lines += [f"{len(used)} CUDA kernels, {spills} with spills, {stacks} with a stack", ""]
    lines += _align([_KERNEL_COLUMNS, *map(_kernel_row, report.kernels)])
    lines += ["", *_KERNEL_LEGEND]
    narrow = sum(row.threads_per_block < WARP_THREADS for row in used)
    if narrow:
        lines.append(
            f"note: {narrow} kernels have blocks of fewer than {WARP_THREADS} threads, which leave lanes of "
            "their warps idle; no schedule was tuned for them"
        )
    lines += [
        f"note: {short_name(kernel.launch.symbol)} has {kernel.schedule}: "
        f"{kernel.fallback}; {kernel.fallback.hint}"
        for kernel in report.kernels
        if kernel.fallback is not None
    ]
    if report.computed:
        names = ", ".join(map(short_name, report.computed))
        lines.append(f"note: left out, since the host computes their launch at run time: {names}")
    return "\n".join(lines)


_KERNEL_COLUMNS = (
    "calls",
    "spill",
    "stack",
    "regs",
    "smem",
    "grid",
    "block",
    "occ",
    "limited by",
    "schedule",
    "kernel",
)
_KERNEL_LEGEND = (
    "calls: in one inference; spill: bytes of instructions that save and restore registers;",
    "stack: bytes of local memory of a thread; smem: bytes of shared memory of a block;",
    "occ: share of the warps that a multiprocessor could hold",
)


def _kernel_row(kernel: Kernel) -> tuple[str, ...]:
    launch, used = kernel.launch, kernel.resources
    limits = "" if used.occupancy_ratio == 1.0 else ", ".join(limit.value for limit in used.limited_by)
    return (
        str(kernel.calls),
        str(used.spill_bytes),
        str(used.stack_bytes),
        str(used.registers_per_thread),
        str(used.smem_static_bytes + used.smem_dynamic_bytes),
        "x".join(map(str, launch.grid)),
        "x".join(map(str, launch.block)),
        f"{used.occupancy_ratio:.0%}" if used.blocks_per_sm else "NO FIT",
        limits,
        kernel.schedule,
        short_name(used.symbol),
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be: numbers to the right, the last three to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    numbers = len(widths) - 3
    return [
        "  ".join(
            cell.rjust(width) if index < numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _join(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections if section)


def _render_title(report: Report) -> list[str]:
    lines = [
        f"{report.model} for {report.target}",
        f"inputs: {', '.join(report.inputs) or 'none'}    ({report.tvm}, tvm-fuse {report.tool_version})",
    ]
    if str(report.steering):
        lines.append(f"asked for: {report.steering}")
    if report.execution is not None and report.execution.place is not Place.CPU:
        lines.append(f"run on: {report.execution.device}, {_PLACES[report.execution.place]}")
    return lines


_PLACES = {
    Place.GPU_BY_TVM: "by TVM's runtime",
    Place.GPU_BY_RUNNER: "by the runner of bundles, with the NVIDIA driver alone",
    Place.EMULATOR: "which computes the CUDA kernels on the CPU",
    Place.CPU_BUILD: "for which the same fused graph was built; no CUDA kernel ran",
}


def _headline(title: str, result: str) -> str:
    return f"{title} {'.' * max(3, _WIDTH - len(title) - len(result) - 2)} {result}"


def _render_folds(report: Report | FoldReport) -> list[str]:
    total = len(report.epsilon)
    lines = [_headline("Batch norms folded into weights", f"{len(report.folds)} of {total}")]
    forms = Counter((f"{check.used:.6g}", check.origin) for check in report.epsilon)
    for (epsilon, origin), count in sorted(forms.items()):
        lines.append(f"  epsilon {epsilon:<10} {count:3d} x  {_ORIGINS[origin]}")
    aligned = [check for check in report.epsilon if check.used != check.in_graph]
    for check in aligned[:_MOST_REASONS]:
        lines.append(f"  {check.name}: epsilon {check.in_graph:.6g} aligned to {check.used:.6g}")
        lines += [f"       {check.impact}"] if check.impact is not None else []
    lines += _render_rest(len(aligned))
    into_next = sum(fold.direction is Direction.AFTER for fold in report.folds)
    lines += [f"  {into_next} of them into the layers after them"] if into_next else []
    if report.scale_shifts:
        lines.append(f"  and {len(report.scale_shifts)} other scales and shifts")
    records: tuple[FoldRecord | AffineRecord, ...] = (*report.folds, *report.scale_shifts)
    layers = [layer for record in records for layer in record.layers]
    if layers:
        weight, bias = (
            max(getattr(layer, role) for layer in layers) for role in ("weight_error", "bias_error")
        )
        lines.append(
            f"  rounding moves an output of a layer by at most {weight:.1e} x largest input + {bias:.1e}"
        )
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
    total = report.fused_layers + len(report.not_fused)
    counts = f"{report.fused_layers} of {total}"
    lines = [_headline("Convolutions and dense layers fused with what follows", counts)]
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


def _render_warnings(report: Report | FoldReport) -> list[str]:
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
    return [*lines, *_render_latency(report.latency), _BASELINE]


def _render_latency(latency: Latency) -> list[str]:
    """Both medians and the speed-up, or the fused model's median alone."""
    fused = f"{statistics.median(latency.fused) * 1e3:.2f} ms"
    rounds = len(latency.fused)
    if not latency.unfused:
        spread = "{quartile_1:.2f} to {quartile_3:.2f}".format(
            **{name: value * 1e3 for name, value in quartiles(latency.fused).items()}
        )
        return [
            _row("latency, median", "", fused, ""),
            f"  (of the fused model alone: {rounds} runs, quartiles {spread} ms)",
        ]
    speedup = quartiles(latency.speedups)
    unfused = f"{statistics.median(latency.unfused) * 1e3:.2f} ms"
    spread = f"{speedup['quartile_1']:.2f} to {speedup['quartile_3']:.2f}"
    return [
        _row("latency, median", unfused, fused, f"{speedup['median']:.2f} x"),
        f"  (speed-up: median of {rounds} alternating runs, quartiles {spread})",
    ]


_BASELINE = (
    "  (unfused: the imported graph at opt_level 0, nothing folded, each operator a kernel of its own)"
)


def _gain_row(title: str, before: str, after: str, before_value: int, after_value: int) -> str:
    change = f"{100.0 * (after_value - before_value) / before_value:+.0f} %" if before_value else ""
    return _row(title, before, after, change)


def _row(title: str, before: str, after: str, change: str) -> str:
    return f"  {title:<{_WIDTH - 42}} {before:>12} {after:>12} {change:>12}"


def render_parity(parity: ParityReport | None, title: str) -> list[str]:
    """The comparison of all outputs as lines of text."""
    if parity is None:
        return [_headline(title, "NOT RUN")]
    lines = [_headline(title, "PASSED" if parity.passed else "FAILED")]
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
