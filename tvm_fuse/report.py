"""What a job did, as data and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.epsilon import EpsilonCheck
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.manifest import Manifest
from tvm_fuse.core.parity import ParityReport
from tvm_fuse.core.reason import Decision, Reason
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.resources import KernelResources

__all__ = [
    "Check",
    "Cost",
    "Execution",
    "FoldReport",
    "FusedKernel",
    "Kernel",
    "KernelReport",
    "Latency",
    "Place",
    "Report",
    "Steering",
    "Verification",
    "quartiles",
    "steering_of",
    "to_json",
    "to_plain",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/report", "version": 2}
_FOLD_SCHEMA = {"name": "tvm-fuse/fold-report", "version": 1}
_KERNELS_SCHEMA = {"name": "tvm-fuse/kernels", "version": 1}
_VERIFY_SCHEMA = {"name": "tvm-fuse/verification", "version": 1}
#: Records of ``planning.py``, ``explain.py`` and ``ladder.py``, which need more than this file may import.
_OTHER_SCHEMAS = {
    "PlanReport": "tvm-fuse/plan-report",
    "Explanation": "tvm-fuse/explanation",
    "Ladder": "tvm-fuse/ladder",
    "TuningReport": "tvm-fuse/tuning-report",
    "DraftReport": "tvm-fuse/draft-report",
    "ImportReport": "tvm-fuse/import-report",
}


@dataclass(frozen=True)
class FusedKernel:
    """A chain that became one kernel.

    Args:
        form: Name of its form.
        anchor: Name of its anchor.
        operators: Its operators, in order.
        ends: Why it ends where it does.
        layers: How many convolutions and matrix products it computes.
    """

    form: str
    anchor: str
    operators: tuple[str, ...]
    ends: Reason | None = None
    layers: int = 1


@dataclass(frozen=True)
class Cost:
    """Static cost of one inference.

    ``traffic_bytes`` is an estimate: each kernel reads its operands and writes its results once.
    """

    kernels: int
    traffic_bytes: int


class Place(str, Enum):
    """Where the fused model ran."""

    #: This machine's CPU, for which it was built.
    CPU = "cpu"
    #: A GPU, by TVM's runtime.
    GPU_BY_TVM = "gpu by tvm"
    #: A GPU, by the runner of bundles, which needs the NVIDIA driver alone.
    GPU_BY_RUNNER = "gpu by the runner"
    #: The CUDA kernels themselves, compiled for the CPU.
    EMULATOR = "emulator"
    #: No CUDA kernel ran: the same fused graph was built for the CPU.
    CPU_BUILD = "cpu instead of gpu"


@dataclass(frozen=True)
class Execution:
    """Where the fused model ran: the kind of place, and the device's name."""

    place: Place
    device: str


@dataclass(frozen=True)
class Latency:
    """Times of one inference in seconds, one a round; in each round both models ran once.

    ``unfused`` is empty where only the fused model was measured.
    """

    unfused: tuple[float, ...]
    fused: tuple[float, ...]

    @property
    def speedups(self) -> tuple[float, ...]:
        """Unfused time over fused time, round by round."""
        return tuple(before / after for before, after in zip(self.unfused, self.fused))


@dataclass(frozen=True)
class Steering:
    """What the user asked of the fusion plan.

    Args:
        fuse: ``all``, ``none``, or ``file`` where a plan file said what to fuse.
        only, skip: Patterns of groups.
        max_ops: Most operators of a group; None is the planner's own limit.
    """

    fuse: str = "all"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    max_ops: int | None = None

    def __str__(self) -> str:
        parts = [] if self.fuse == "all" else [f"--fuse {self.fuse}"]
        parts += [f"--only {pattern}" for pattern in self.only] + [
            f"--skip {pattern}" for pattern in self.skip
        ]
        parts += [] if self.max_ops is None else [f"--max-ops {self.max_ops}"]
        return " ".join(parts)


def steering_of(options: Any) -> Steering:
    """What ``FuseOptions`` ask of the plan."""
    plan = options.plan
    fuse = plan.fuse if options.plan_file is None else "file"
    return Steering(fuse, plan.only, plan.skip, plan.max_ops)


@dataclass(frozen=True)
class Report:
    """The outcome of the main job.

    Args:
        tool_version: Version of tvm-fuse.
        tvm: The TVM in use.
        model: Name of the model.
        target: Target string.
        inputs: Input descriptions, such as ``x [1, 3, 48, 192]``.
        epsilon: One check a batch norm.
        folds: Folded batch norms.
        not_folded: Decisions about the others.
        chains: Chains that became kernels.
        not_fused: Decisions about anchors in no chain.
        unfused: Cost of the reference.
        fused: Cost of the fused model.
        parity: Comparison of outputs, None when nothing was run.
        latency: Times, None when not measured.
        notes: What else the user should know.
        scale_shifts: Other scales and shifts folded into the layers before them.
        warnings: About batch norms whose numbers are legal and yet hardly meant.
        execution: Where the fused model ran, None when nothing was run.
        steering: What the user asked of the fusion plan.
        plan_digest: SHA-256 of the plan file of this model; empty when there is none.
    """

    tool_version: str
    tvm: str
    model: str
    target: str
    inputs: tuple[str, ...]
    epsilon: tuple[EpsilonCheck, ...]
    folds: tuple[FoldRecord, ...]
    not_folded: tuple[Decision, ...]
    chains: tuple[FusedKernel, ...]
    not_fused: tuple[Decision, ...]
    unfused: Cost
    fused: Cost
    parity: ParityReport | None
    latency: Latency | None
    notes: tuple[str, ...]
    scale_shifts: tuple[AffineRecord, ...] = ()
    warnings: tuple[Reason, ...] = ()
    execution: Execution | None = None
    steering: Steering = Steering()
    plan_digest: str = ""

    @property
    def fused_layers(self) -> int:
        """How many convolutions and dense layers are fused; a kernel may have two of them."""
        return sum(chain.layers for chain in self.chains)


@dataclass(frozen=True)
class FoldReport:
    """The outcome of the fold job.

    Args:
        model: Name of the model.
        epsilon: One check a batch norm.
        folds: Folded batch norms.
        not_folded: Decisions about others, and about scales and shifts after a layer.
        scale_shifts: Other scales and shifts that were folded.
        warnings: About batch norms whose numbers are legal and yet hardly meant.
        manifest: What is saved with the model.
    """

    model: str
    epsilon: tuple[EpsilonCheck, ...]
    folds: tuple[FoldRecord, ...]
    not_folded: tuple[Decision, ...]
    scale_shifts: tuple[AffineRecord, ...]
    warnings: tuple[Reason, ...]
    manifest: Manifest


@dataclass(frozen=True)
class Check:
    """One thing that must hold; ``problem`` is empty when it does."""

    what: str
    problem: str = ""


@dataclass(frozen=True)
class Verification:
    """A folded model checked against its source.

    Args:
        manifest: What the folded model says about itself.
        checks: All that was checked.
        parity: Outputs of the source and of the folded model on the same seeded inputs; None when
            something else does not hold, and nothing could be run.
        engine: What ran both; empty when nothing did.
    """

    manifest: Manifest
    checks: tuple[Check, ...]
    parity: ParityReport | None = None
    engine: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything holds."""
        has_parity = self.parity is not None and self.parity.passed
        return has_parity and not any(check.problem for check in self.checks)


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel.

    Args:
        launch: How it is launched.
        resources: What it uses.
        calls: How often one inference calls its operator.
        schedule: What kind of kernel its anchor has; empty without an anchor.
        fallback: Why it is not the kind for the anchor's operator and shape; None where it is.
    """

    launch: Launch
    resources: KernelResources
    calls: int
    schedule: str = ""
    fallback: Reason | None = None


@dataclass(frozen=True)
class KernelReport:
    """The CUDA kernels of a fused model.

    Args:
        model: Name of the model.
        target: Target string.
        arch: What the kernels were compiled for.
        compiler: Name and version of the CUDA compiler.
        kernels: The worst first.
        computed: Kernels left out, since the host computes their launch at run time.
    """

    model: str
    target: str
    arch: str
    compiler: str
    kernels: tuple[Kernel, ...]
    computed: tuple[str, ...] = ()


# --- JSON ------------------------------------------------------------------------------------


def to_json(report: Any) -> str:
    """The report as one JSON document with sorted keys, without what records do not show (``repr=False``).

    Non-finite numbers are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.

    Args:
        report: A ``Report``, ``FoldReport``, ``KernelReport``, ``Verification``, ``PlanReport``,
            ``Explanation`` or ``Ladder``.
    """
    other = _OTHER_SCHEMAS.get(type(report).__name__)
    if other is not None:
        return _dump({"schema": {"name": other, "version": 1}, **to_plain(report)})
    if isinstance(report, FoldReport):
        return _dump({"schema": _FOLD_SCHEMA, **to_plain(report)})
    if isinstance(report, KernelReport):
        return _dump({"schema": _KERNELS_SCHEMA, **to_plain(report)})
    if isinstance(report, Verification):
        return _dump({"schema": _VERIFY_SCHEMA, "passed": report.passed, **to_plain(report)})
    document = {"schema": SCHEMA, **to_plain(report)}
    if report.latency is not None:
        speedups = report.latency.speedups
        document["latency"]["speedup"] = quartiles(speedups) if speedups else None
    if report.parity is not None:
        document["parity"]["passed"] = report.parity.passed
    return _dump(document)


def _dump(document: Any) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def to_plain(value: Any) -> Any:
    """What ``json`` can write for records, sequences and mappings, however nested."""
    if is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value) if item.repr}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of some numbers, by name."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "quartile_1": float(low), "quartile_3": float(high)}
