"""The manifest of a folded model: what was folded, from what, with which numbers, by what.

It travels with the model (ONNX ``metadata_props``, ``manifest.json`` of a Relay folder), so that somebody
who gets the file can see where the batch norms went, and check every number of it against the source.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.epsilon import EpsilonCheck
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.reason import Decision
from tvm_fuse.core.weights import FoldedLayer

__all__ = [
    "METADATA_KEY",
    "FoldedNorm",
    "FoldedRun",
    "LeftAlone",
    "Manifest",
    "Source",
    "from_json",
    "hash_files",
    "make_manifest",
    "to_json",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/manifest", "version": 1}

#: Key in an ONNX model's ``metadata_props``.
METADATA_KEY = "tvm_fuse.manifest"

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """The files a model was read from: name of the first, and SHA-256 over all, in order."""

    name: str
    sha256: str


@dataclass(frozen=True)
class FoldedNorm:
    """One batch norm that is in the weights now.

    Args:
        name: Its name in the source.
        epsilon: The epsilon it was folded with.
        epsilon_origin: Who says so.
        direction: ``before`` or ``after``: where the layers are.
        variance_min: Smallest variance.
        gain_max: Largest ``abs(gamma) / sqrt(variance + epsilon)``.
        layers: The layers that took it in, with digests of the weights before and after.
    """

    name: str
    epsilon: float
    epsilon_origin: str
    direction: str
    variance_min: float
    gain_max: float
    layers: tuple[FoldedLayer, ...]


@dataclass(frozen=True)
class FoldedRun:
    """Other scales and shifts that are in the weights now."""

    operators: tuple[str, ...]
    layers: tuple[FoldedLayer, ...]


@dataclass(frozen=True)
class LeftAlone:
    """A batch norm that was not folded: its epsilon, and the reason with its code."""

    name: str
    epsilon: float | None
    code: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """What a folded model says about itself.

    Args:
        source: What it was made from.
        versions: Program -> version: ``tvm-fuse``, ``numpy``, ``onnx``, ``tvm`` (where TVM was used).
        batch_norms: What was folded, in order: a layer that took in several lists all of them.
        scale_shifts: Other scales and shifts that were folded.
        left_alone: Batch norms that are still there.
        outputs: Names of the model's outputs, in order.
    """

    source: Source
    versions: Mapping[str, str]
    batch_norms: tuple[FoldedNorm, ...]
    scale_shifts: tuple[FoldedRun, ...]
    left_alone: tuple[LeftAlone, ...]
    outputs: tuple[str, ...] = ()

    @property
    def epsilon(self) -> dict[str, float]:
        """Name of each batch norm of the source -> the epsilon that it was taken to have."""
        left = {norm.name: norm.epsilon for norm in self.left_alone if norm.epsilon is not None}
        return {**{norm.name: norm.epsilon for norm in self.batch_norms}, **left}

    @property
    def weights(self) -> dict[str, tuple[str, str]]:
        """Name of each folded layer -> digests of its weight in the source and in the saved model.

        A layer may be folded into several times, each time from what the time before made.
        """
        entries: tuple[FoldedNorm | FoldedRun, ...] = (*self.batch_norms, *self.scale_shifts)
        layers = [layer for entry in entries for layer in entry.layers]
        balance: dict[str, Counter[str]] = {layer.name: Counter() for layer in layers}
        ends = {layer.name: (layer.weight_before, layer.weight_after) for layer in layers}
        for layer in layers:
            balance[layer.name].update([layer.weight_after])
            balance[layer.name].subtract([layer.weight_before])
        for name, counts in balance.items():
            first = next((weight for weight, count in counts.items() if count < 0), ends[name][0])
            last = next((weight for weight, count in counts.items() if count > 0), first)
            ends[name] = (first, last)
        return ends


def make_manifest(
    source: Source,
    versions: Mapping[str, str],
    epsilon: Iterable[EpsilonCheck],
    folds: Iterable[FoldRecord],
    runs: Iterable[AffineRecord],
    left: Iterable[Decision],
    outputs: Iterable[str],
) -> Manifest:
    """Collect a manifest from what folding reported."""
    checks = {check.name: check for check in epsilon}
    origins = {name: check.origin.value for name, check in checks.items()}
    norms = tuple(
        FoldedNorm(
            fold.name,
            fold.epsilon,
            origins.get(fold.name, "graph attribute"),
            fold.direction.value,
            fold.variance_min,
            fold.gain_max,
            fold.layers,
        )
        for fold in folds
    )
    alone = tuple(
        LeftAlone(
            decision.at, _used(checks.get(decision.at)), decision.reason.code.value, str(decision.reason)
        )
        for decision in left
        if decision.reason is not None
    )
    return Manifest(
        source,
        dict(versions),
        norms,
        tuple(FoldedRun(run.operators, run.layers) for run in runs),
        alone,
        tuple(outputs),
    )


def _used(check: EpsilonCheck | None) -> float | None:
    return None if check is None else check.used


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the contents of files, one after the other, in hexadecimal."""
    hasher = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
    return hasher.hexdigest()


# --- JSON ------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> str:
    """The manifest as one JSON document with sorted keys."""
    return json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1, sort_keys=True, allow_nan=False)


def from_json(text: str, where: str) -> Manifest:
    """Read a manifest.

    Args:
        text: What ``to_json`` wrote.
        where: What it was found in, for messages.

    Raises:
        ModelError: It is no manifest, or of another version.
    """
    try:
        document = json.loads(text)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}: not a manifest of tvm-fuse: {error!r}", _HINT) from error
    if schema != SCHEMA:
        raise ModelError(
            f"{where}: the manifest is {schema}; wanted {SCHEMA}", "use the tvm-fuse that wrote it"
        )
    try:
        return _read(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: the manifest is damaged: {error!r}", _HINT) from error


_HINT = "`tvm-fuse fold MODEL -o OUT` writes one"


def _read(document: Mapping[str, Any]) -> Manifest:
    norms = (FoldedNorm(**{**norm, "layers": _layers(norm)}) for norm in document["batch_norms"])
    runs = (FoldedRun(tuple(run["operators"]), _layers(run)) for run in document["scale_shifts"])
    return Manifest(
        Source(**document["source"]),
        dict(document["versions"]),
        tuple(norms),
        tuple(runs),
        tuple(LeftAlone(**left) for left in document["left_alone"]),
        tuple(document["outputs"]),
    )


def _layers(entry: Mapping[str, Any]) -> tuple[FoldedLayer, ...]:
    return tuple(FoldedLayer(**layer) for layer in entry["layers"])
