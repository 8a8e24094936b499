"""Compare a model's outputs with the reference's, output by output, without averaging away.

An element passes when ``|got - ref| <= atol + rtol * |ref|`` (NumPy's rule), computed in
float64; by default integers and booleans must be equal, whatever their size. A report passes when
there is at least one output, every element of every output passes, and neither side has an output
the other lacks. Two NaN, or two equal infinities, at the same place count as equal; any other
non-finite pair fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

import numpy as np

from tvm_fuse.core.graph import Array

__all__ = [
    "TOLERANCES",
    "GivenTolerance",
    "ParityReport",
    "ParityRow",
    "Tolerance",
    "ToleranceChoice",
    "choose_tolerance",
    "compare",
    "default_tolerance",
]


@dataclass(frozen=True)
class Tolerance:
    """Absolute and relative tolerance, and why they are what they are."""

    atol: float
    rtol: float
    why: str

    def scaled(self, factor: float) -> Tolerance:
        """Both tolerances multiplied by ``factor``."""
        return Tolerance(self.atol * factor, self.rtol * factor, f"{self.why} x {factor:g}")


@dataclass(frozen=True)
class GivenTolerance:
    """What a user says of a tolerance; what is None is the default of each output's dtype."""

    atol: float | None = None
    rtol: float | None = None


#: For all outputs, in part or whole; None: the default of each output's dtype.
ToleranceChoice = Union[Tolerance, GivenTolerance, None]

#: Default tolerance by dtype of the output.
TOLERANCES = {
    "float64": Tolerance(1e-5, 1e-5, "float32 arithmetic inside"),
    "float32": Tolerance(1e-5, 1e-5, "float32: 2^-24 = 6e-8 each rounding, sums of some thousand terms"),
    "float16": Tolerance(1e-2, 1e-2, "float16: 2^-11 = 5e-4 each rounding"),
}


def default_tolerance(dtype: str) -> Tolerance:
    """The tolerance for an output's dtype; integers and booleans must be equal."""
    return TOLERANCES.get(dtype, Tolerance(0.0, 0.0, "exact dtype"))


def choose_tolerance(choice: ToleranceChoice, dtype: str) -> Tolerance:
    """The tolerance for an output of a dtype."""
    if isinstance(choice, Tolerance):
        return choice
    default = default_tolerance(dtype)
    if choice is None or choice == GivenTolerance():
        return default
    atol = default.atol if choice.atol is None else choice.atol
    rtol = default.rtol if choice.rtol is None else choice.rtol
    left_out = "atol" if choice.atol is None else "rtol" if choice.rtol is None else ""
    return Tolerance(atol, rtol, f"given; {left_out} of {default.why}" if left_out else "given")


@dataclass(frozen=True)
class ParityRow:
    """The comparison of one output.

    Args:
        output: Name of the output.
        shape: Shape of the reference.
        dtype: dtype of the reference.
        elements: Number of elements.
        failing: Number of elements that fail.
        max_abs: Largest absolute difference (0 when empty, inf when incomparable, nan never).
        max_rel: Largest difference relative to ``abs(ref)`` where ``ref != 0``.
        mean_abs: Mean absolute difference.
        worst_index: Index of the element that is furthest outside (or nearest to) its tolerance.
        worst_got: The candidate's value there.
        worst_reference: The reference's value there.
        needed: The factor on the tolerance with which the output would just pass (inf: none).
        tolerance: The tolerance used.
        problem: Set when the outputs cannot be compared (shape or dtype differs, no real numbers).
        reference_max: Largest ``abs(ref)`` (inf: not known).
    """

    output: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    failing: int
    max_abs: float
    max_rel: float
    mean_abs: float
    worst_index: tuple[int, ...]
    worst_got: float
    worst_reference: float
    needed: float
    tolerance: Tolerance
    problem: str = ""
    reference_max: float = float("inf")

    @property
    def passed(self) -> bool:
        """Whether every element passes."""
        return not self.problem and self.failing == 0

    @property
    def proves_little(self) -> bool:
        """Whether the reference is so small that an output of zeros would pass as well."""
        return self.elements > 0 and self.reference_max <= self.tolerance.atol


@dataclass(frozen=True)
class ParityReport:
    """The comparison of all outputs on one seeded input."""

    rows: tuple[ParityRow, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    seed: int

    @property
    def passed(self) -> bool:
        """Whether the models agree."""
        return (
            bool(self.rows) and not self.missing and not self.extra and all(row.passed for row in self.rows)
        )


def compare(
    reference: Mapping[str, Array],
    candidate: Mapping[str, Array],
    *,
    tolerance: ToleranceChoice = None,
    seed: int = 0,
) -> ParityReport:
    """Compare named outputs.

    Args:
        reference: Output name -> array of the unfused model.
        candidate: Output name -> array of the fused model.
        tolerance: See ``ToleranceChoice``.
        seed: Seed of the inputs, for the report.

    Returns:
        One row for every output of the reference that the candidate has, and the names that
        only one side has.
    """
    both = [name for name in reference if name in candidate]
    rows = tuple(_compare_one(name, reference[name], candidate[name], tolerance) for name in both)
    missing = tuple(name for name in reference if name not in candidate)
    extra = tuple(name for name in candidate if name not in reference)
    return ParityReport(rows, missing, extra, seed)


def _compare_one(name: str, ref: Array, got: Array, choice: ToleranceChoice) -> ParityRow:
    ref, got = np.asarray(ref), np.asarray(got)
    tolerance = choose_tolerance(choice, str(ref.dtype))
    problem = _problem(ref, got)
    if problem:
        return _incomparable(name, ref, tolerance, problem)
    ref64, got64 = ref.astype(np.float64), got.astype(np.float64)
    magnitude = np.where(np.isfinite(ref64), np.abs(ref64), 0.0)
    with np.errstate(over="ignore"):  # what overflows fails as infinite
        difference = _difference(ref64, got64, ref == got)
        allowed = tolerance.atol + tolerance.rtol * magnitude
        excess = _ratio(difference, allowed, np.where(difference > 0, np.inf, 0.0))
        relative = _ratio(difference, magnitude, np.where(np.isinf(difference), np.inf, 0.0))
        mean = float(difference.mean()) if ref.size else 0.0
    worst = np.unravel_index(int(np.argmax(excess)), ref.shape) if ref.size else ()
    return ParityRow(
        output=name,
        shape=ref.shape,
        dtype=str(ref.dtype),
        elements=ref.size,
        failing=int(np.count_nonzero((difference > allowed) | np.isinf(difference))),
        max_abs=float(difference.max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
        mean_abs=mean,
        worst_index=tuple(int(index) for index in worst),
        worst_got=float(got64[worst]) if ref.size else 0.0,
        worst_reference=float(ref64[worst]) if ref.size else 0.0,
        needed=float(excess.max(initial=0.0)),
        tolerance=tolerance,
        reference_max=float(np.abs(ref64).max(initial=0.0)),
    )


def _problem(ref: Array, got: Array) -> str:
    """Why two outputs cannot be compared, or an empty string."""
    if ref.shape != got.shape or ref.dtype != got.dtype:
        return f"wanted {ref.dtype}{list(ref.shape)}, got {got.dtype}{list(got.shape)}"
    if ref.dtype.kind not in "biuf" and ref.dtype.name != "bfloat16":
        return f"wanted real numbers, got {ref.dtype}"
    return ""


def _incomparable(name: str, ref: Array, tolerance: Tolerance, problem: str) -> ParityRow:
    nan, inf = float("nan"), float("inf")
    return ParityRow(
        output=name,
        shape=ref.shape,
        dtype=str(ref.dtype),
        elements=ref.size,
        failing=ref.size,
        max_abs=inf,
        max_rel=inf,
        mean_abs=inf,
        worst_index=(),
        worst_got=nan,
        worst_reference=nan,
        needed=inf,
        tolerance=tolerance,
        problem=problem,
    )


def _difference(ref: Array, got: Array, same: Array) -> Array:
    """Absolute difference, with equal non-finite pairs 0 and other non-finite pairs inf.

    ``same`` was computed in the dtype of the outputs: float64 holds no integer beyond 2^53
    exactly, so a difference that it loses counts as 1.
    """
    same = same | (np.isnan(ref) & np.isnan(got))
    finite = np.isfinite(ref) & np.isfinite(got)
    difference = np.where(same, 0.0, np.inf)
    np.subtract(ref, got, out=difference, where=finite)
    difference = np.asarray(np.abs(difference))
    return np.where(~same & (difference == 0), 1.0, difference)


def _ratio(difference: Array, scale: Array, otherwise: Array) -> Array:
    """``difference / scale`` where that is a number, else ``otherwise``."""
    return np.divide(difference, scale, out=otherwise, where=(scale > 0) & np.isfinite(difference))
