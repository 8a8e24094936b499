"""What a GPU said of a package of candidates, as data and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.folders import write_file
from tvm_fuse.cuda.plain import make

__all__ = [
    "FAILED",
    "NOT_REACHED",
    "TIMED",
    "WRONG",
    "CandidateResult",
    "Results",
    "read_results",
    "save_results",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/candidate-results", "version": 1}

#: What became of a candidate.
TIMED, WRONG, FAILED, NOT_REACHED = "timed", "wrong answer", "failed", "not reached"
_OUTCOMES = (TIMED, WRONG, FAILED, NOT_REACHED)


@dataclass(frozen=True)
class CandidateResult:
    """What became of one candidate.

    Args:
        id: The candidate.
        outcome: ``timed``, ``wrong answer``, ``failed`` or ``not reached``.
        times_s: Seconds of a call, one a round.
        baseline_s: Seconds of the kernel that the build makes without a record, in the same rounds.
        max_abs: Largest difference from the reference; of a wrong answer it is in ``error``.
        needed: Share of the tolerance that was needed.
        error: What is wrong, or empty.
    """

    id: str
    outcome: str
    times_s: tuple[float, ...] = ()
    baseline_s: tuple[float, ...] = ()
    max_abs: float = 0.0
    needed: float = 0.0
    error: str = ""

    @property
    def cost_s(self) -> float:
        """Median of its times; 0 without any."""
        return statistics.median(self.times_s) if self.times_s else 0.0

    @property
    def ratio(self) -> float:
        """Its time over the baseline's, the median over rounds; 0 where they were not measured in turn."""
        pairs = zip(self.times_s, self.baseline_s)
        return statistics.median(mine / theirs for mine, theirs in pairs) if self.baseline_s else 0.0


@dataclass(frozen=True)
class Results:
    """What was found, and where.

    Args:
        package: Digest of the package.
        card: What the device calls itself.
        arch: Its architecture.
        driver: Version of CUDA that its driver is for.
        is_emulated: Whether that was the CPU emulator, whose times mean nothing.
        date: Day of the measurement, UTC.
        seconds: How long it took.
        results: One for each candidate of the package, baselines included.
    """

    package: str
    card: str
    arch: str
    driver: str
    is_emulated: bool
    date: str
    seconds: float
    results: tuple[CandidateResult, ...]

    @property
    def by_id(self) -> Mapping[str, CandidateResult]:
        """Id of a candidate -> what became of it."""
        return {one.id: one for one in self.results}


def save_results(file: Path, results: Results) -> None:
    """Write results; a file that is there stays whole until the new one is.

    Raises:
        UsageError: It cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **asdict(results)}, indent=1, allow_nan=False)
    write_file(file.absolute(), f"{text}\n".encode())


def read_results(file: Path) -> Results:
    """Read results.

    Raises:
        UsageError: There is no such file.
        ModelError: It holds no results, or is damaged.
    """
    if not file.is_file():
        raise UsageError(f"{file}: no such file", "`python DIR/run.py --json FILE` writes it, on the GPU")
    try:
        document = json.loads(file.read_bytes())
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, not {SCHEMA}")
        results: Results = make(Results, document, "")
        for one in results.results:
            if one.outcome not in _OUTCOMES:
                raise ValueError(f"{one.id}: outcome {one.outcome!r}, none of {', '.join(_OUTCOMES)}")
            if one.outcome == TIMED and not (one.times_s and min((*one.times_s, *one.baseline_s)) > 0):
                raise ValueError(f"{one.id}: it was timed, and its times are not all above 0")
            if one.baseline_s and len(one.baseline_s) != len(one.times_s):
                raise ValueError(f"{one.id}: its rounds are not those of the baseline")
    except ValueError as error:
        raise ModelError(f"{file}: not the results of a package of candidates: {error}") from error
    return results
