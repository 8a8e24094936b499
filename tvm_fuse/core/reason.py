"""Refusals as data: reason codes, and decisions that carry them.

A rule that does not apply never raises and never returns a bare False: it returns a
``Decision`` with a ``Reason`` (code, node, wanted, got). Codes are API: tests and users'
scripts compare codes, never sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tvm_fuse.core.errors import ModelError

__all__ = ["HINTS", "Code", "Decision", "Reason", "Stage", "applied", "declined", "refusal"]


class Code(str, Enum):
    """Why a rule declined. Spelled ``subject-problem``; documented in ``docs/reasons.md``."""

    # BN folding
    BN_PRODUCER_UNSUPPORTED = "bn-producer-unsupported"
    BN_AFTER_ACTIVATION = "bn-after-activation"
    BN_BEFORE_ACTIVATION = "bn-before-activation"
    BN_READER_UNSUPPORTED = "bn-reader-unsupported"
    BN_SHIFT_BEFORE_PADDING = "bn-shift-before-padding"
    NORMALIZATION_OF_DATA = "normalization-of-data"
    BN_PARAMETERS_NOT_CONSTANT = "bn-parameters-not-constant"
    BN_STATISTICS_USED = "bn-statistics-used"
    BN_AXIS_NOT_CHANNEL = "bn-axis-not-channel"
    BN_STATISTICS_NOT_FINITE = "bn-statistics-not-finite"
    BN_VARIANCE_NOT_POSITIVE = "bn-variance-not-positive"
    BN_EPSILON_INVALID = "bn-epsilon-invalid"
    BN_EPSILON_MISMATCH = "bn-epsilon-mismatch"
    BN_EPSILON_UNDERFLOW = "bn-epsilon-underflow"
    ANCHOR_OUTPUT_SHARED = "anchor-output-shared"
    ANCHOR_OUTPUT_RETURNED = "anchor-output-returned"
    WEIGHT_NOT_CONSTANT = "weight-not-constant"
    WEIGHT_LAYOUT_UNSUPPORTED = "weight-layout-unsupported"
    FOLD_OVERFLOW = "fold-overflow"
    # Warnings about batch norms
    BN_STATISTICS_UNTRAINED = "bn-statistics-untrained"
    BN_VARIANCE_ALL_ZERO = "bn-variance-all-zero"
    BN_GAIN_LARGE = "bn-gain-large"
    # Chains
    CHAIN_NO_EPILOGUE = "chain-no-epilogue"
    CHAIN_DYNAMIC_SHAPE = "chain-dynamic-shape"
    CHAIN_TOO_LONG = "chain-too-long"
    RESULT_SHARED = "result-shared"
    RESULT_RETURNED = "result-returned"
    RESULT_SHAPE_CHANGES = "result-shape-changes"
    READER_NOT_ELEMENTWISE = "reader-not-elementwise"
    READER_IN_OTHER_CHAIN = "reader-in-other-chain"
    FUSION_COSTS_TIME = "fusion-costs-time"
    REGISTERS_SPILL = "registers-spill"
    OCCUPANCY_DROPS = "occupancy-drops"
    OPERATOR_ALONE = "operator-alone"
    OPERATOR_OPAQUE = "operator-opaque"
    VALUE_WRITTEN = "value-written"
    TOO_MANY_ARGUMENTS = "too-many-arguments"
    TARGET_CANNOT_JOIN = "target-cannot-join"
    ATTENTION_IN_PARTS = "attention-in-parts"
    LEFT_OUT_BY_USER = "left-out-by-user"
    # Layers side by side
    SIBLINGS_DIFFER = "siblings-differ"
    SIBLING_GROUPED = "sibling-grouped"
    SIBLING_DTYPE = "sibling-dtype"
    SEVERAL_RESULTS = "several-results"
    # Kernels on CUDA
    SCHEDULE_DYNAMIC_SHAPE = "schedule-dynamic-shape"
    SCHEDULE_LIBRARY = "schedule-library"
    SCHEDULE_TUNER = "schedule-tuner"
    SCHEDULE_OPERATOR = "schedule-operator"
    SCHEDULE_DTYPE = "schedule-dtype"
    SCHEDULE_LAYOUT = "schedule-layout"
    SCHEDULE_DILATION = "schedule-dilation"
    SCHEDULE_NO_TILE = "schedule-no-tile"
    SCHEDULE_FEW_COLUMNS = "schedule-few-columns"
    SCHEDULE_RESULT_BROADCAST = "schedule-result-broadcast"
    # Tuned records
    SCHEDULE_RECORD_DEVICE = "schedule-record-device"
    SCHEDULE_RECORD_STALE = "schedule-record-stale"
    SCHEDULE_RECORD_DAMAGED = "schedule-record-damaged"
    SCHEDULE_RECORD_DRAFT = "schedule-record-draft"


#: What a user can do about each code; shown beside the reason.
HINTS = {
    Code.BN_PRODUCER_UNSUPPORTED: "only convolutions and matrix products (with or without bias) absorb it; "
    "it stays as one multiply and one add",
    Code.BN_AFTER_ACTIVATION: "a batch norm after an activation cannot move into the convolution before it",
    Code.BN_BEFORE_ACTIVATION: "the activation between it and the next layer must see its result; "
    "it stays as one multiply and one add",
    Code.BN_READER_UNSUPPORTED: "layers after it can absorb it only when they are its only readers",
    Code.BN_SHIFT_BEFORE_PADDING: "the zeros that are padded are not shifted; fix the shapes with --shape, "
    "or let the model pad before the batch norm",
    Code.NORMALIZATION_OF_DATA: "its statistics are computed from the data at run time; nothing to fold",
    Code.BN_PARAMETERS_NOT_CONSTANT: "bind the parameters: pass params=..., or use relay.build_module."
    "bind_params_by_name before the pass",
    Code.BN_STATISTICS_USED: "export the model in inference mode, so that only the normalized output is used",
    Code.BN_AXIS_NOT_CHANNEL: "check the layout of the model: the batch norm does not run over the channels",
    Code.BN_STATISTICS_NOT_FINITE: "the checkpoint is damaged or not fully trained; export it again",
    Code.BN_VARIANCE_NOT_POSITIVE: "the checkpoint is damaged, or its epsilon was lost; export it again",
    Code.BN_EPSILON_INVALID: "epsilon must be finite and not negative; export the model again",
    Code.BN_EPSILON_MISMATCH: "use --align-epsilon (AlignEpsilon(align=True)) to take the expected value",
    Code.BN_EPSILON_UNDERFLOW: "keep the batch norm in float32; in its own dtype the epsilon is lost",
    Code.ANCHOR_OUTPUT_SHARED: "another operator reads the value before the batch norm, so it must be kept",
    Code.ANCHOR_OUTPUT_RETURNED: "the value before the batch norm is an output of the model",
    Code.WEIGHT_NOT_CONSTANT: "bind the parameters, or fold the expression that computes the weight",
    Code.WEIGHT_LAYOUT_UNSUPPORTED: "bring the model to a plain layout (NCHW/OIHW or NHWC/HWIO) first",
    Code.FOLD_OVERFLOW: "the dtype of the weights cannot hold the folded value; keep this layer in float32",
    Code.BN_STATISTICS_UNTRAINED: "the layer was not trained, or its checkpoint was not loaded before export",
    Code.BN_VARIANCE_ALL_ZERO: "epsilon alone makes the scale; check that the statistics were exported",
    Code.BN_GAIN_LARGE: "check this channel's variance and epsilon; differences in its input grow by as much",
    Code.CHAIN_NO_EPILOGUE: "nothing follows that could be computed in the same kernel",
    Code.CHAIN_DYNAMIC_SHAPE: "fix the shape with --shape NAME=1x3x224x224",
    Code.CHAIN_TOO_LONG: "the rest is left to TVM's FuseOps; a longer kernel would spill registers",
    Code.RESULT_SHARED: "a result that several operators read must be written to memory once",
    Code.RESULT_RETURNED: "the value is an output of the model, so it must be written to memory",
    Code.RESULT_SHAPE_CHANGES: "only operators that keep the shape of the chain can join it",
    Code.READER_NOT_ELEMENTWISE: "only elementwise operators can be computed in the anchor's kernel",
    Code.READER_IN_OTHER_CHAIN: "the operator was taken by the chain of its other operand",
    Code.FUSION_COSTS_TIME: "two kernels take less by the estimate; on a device with other peaks it may pay",
    Code.REGISTERS_SPILL: "the rest of the chain is a kernel of its own; a shorter chain would not spill",
    Code.OCCUPANCY_DROPS: "the rest of the chain is a kernel of its own; a shorter one keeps more warps busy",
    Code.OPERATOR_ALONE: "no operator before it can be computed in its kernel; one kernel for one operator",
    Code.OPERATOR_OPAQUE: "TVM computes it by itself; nothing joins it",
    Code.VALUE_WRITTEN: "the value is computed once and written; each of the kernels reads it",
    Code.TOO_MANY_ARGUMENTS: "the operators are left to TVM's FuseOps, which splits them",
    Code.TARGET_CANNOT_JOIN: "the target's schedules cannot compute this in one kernel; cuda can do most",
    Code.ATTENTION_IN_PARTS: "scale, mask and softmax are fused as far as they go; nothing to do",
    Code.LEFT_OUT_BY_USER: "change --fuse, --only or --skip, or edit the plan file",
    Code.SIBLINGS_DIFFER: "each stays a layer of its own; only output channels may differ",
    Code.SIBLING_GROUPED: "a grouped layer stays one of its own",
    Code.SIBLING_DTYPE: "a quantized or mixed layer stays one of its own",
    Code.SEVERAL_RESULTS: "the rest is a kernel of its own, and reads the value itself",
    Code.SCHEDULE_DYNAMIC_SHAPE: "fix the shape with --shape NAME=1x3x224x224",
    Code.SCHEDULE_LIBRARY: "leave -libs out of the target for our schedules",
    Code.SCHEDULE_TUNER: "build outside the tuner's context for our schedules",
    Code.SCHEDULE_OPERATOR: "write it as one of these where that is possible",
    Code.SCHEDULE_DTYPE: "keep the layer in float32",
    Code.SCHEDULE_LAYOUT: "bring the model to NCHW first",
    Code.SCHEDULE_DILATION: "export the model without dilation in transposed convolutions",
    Code.SCHEDULE_NO_TILE: "nothing to do where the layer is small",
    Code.SCHEDULE_FEW_COLUMNS: "a larger batch uses each weight more often",
    Code.SCHEDULE_RESULT_BROADCAST: "compute the broadcast in a kernel of its own; chains of ours do",
    Code.SCHEDULE_RECORD_DEVICE: "times of another device say nothing here; `tvm-fuse tune` measures here",
    Code.SCHEDULE_RECORD_STALE: "the kernel computes in another way now; `tvm-fuse tune` measures it again",
    Code.SCHEDULE_RECORD_DAMAGED: "remove the file, or tune again",
    Code.SCHEDULE_RECORD_DRAFT: "--drafts uses it all the same; `tvm-fuse tune --export-candidates` helps to "
    "measure it",
}


#: How many reasons one error lists.
_MOST_LISTED = 10


class Stage(str, Enum):
    """How far a rule came, the least first."""

    NO_MATCH = "no-match"
    CONDITION = "condition"
    COST = "cost"
    APPLIED = "applied"


@dataclass(frozen=True)
class Reason:
    """Why a rule did not apply: at which node, what was wanted, what was there."""

    code: Code
    at: str
    wanted: str
    got: str

    @property
    def hint(self) -> str:
        """What a user can do about it."""
        return HINTS[self.code]

    def __str__(self) -> str:
        return f"{self.code.value} at {self.at}: wanted {self.wanted}, got {self.got}"


@dataclass(frozen=True)
class Decision:
    """What one rule decided about one node.

    Args:
        rule: Name of the rule.
        at: The node, for people.
        stage: How far the rule came.
        reason: Why it went no further; None exactly when it applied.
        detail: What it did.
        node: Id of the node; None outside the fusion plan.
        matched: How many operators fitted before the one that did not.
    """

    rule: str
    at: str
    stage: Stage
    reason: Reason | None
    detail: str = ""
    node: int | None = None
    matched: int = 0

    @property
    def applied(self) -> bool:
        """Whether the rule changed something."""
        return self.stage is Stage.APPLIED

    def __str__(self) -> str:
        if self.reason is None:
            return f"{self.rule}: {self.at}: {self.detail}"
        return f"{self.rule}: not applied: {self.reason}"


def applied(rule: str, at: str, detail: str) -> Decision:
    """A rule that did its work."""
    return Decision(rule, at, Stage.APPLIED, None, detail)


def declined(rule: str, at: str, reason: Reason) -> Decision:
    """A rule that left a node alone, and why."""
    return Decision(rule, at, Stage.CONDITION, reason)


def refusal(title: str, reasons: Sequence[Reason]) -> ModelError:
    """The error for reasons that forbid to go on.

    Args:
        title: What the reasons have in common, such as ``layers cannot be read``.
        reasons: At least one.

    Returns:
        An error that lists the first ten, with the hint of the first.
    """
    shown = "".join(f"\n  {reason}" for reason in reasons[:_MOST_LISTED])
    more = f"\n  and {len(reasons) - _MOST_LISTED} more" if len(reasons) > _MOST_LISTED else ""
    return ModelError(f"{len(reasons)} {title}:{shown}{more}", reasons[0].hint)
