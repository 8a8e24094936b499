"""The manifest of a folded model: what was folded, from what, with which numbers, by what.

It travels with the model (ONNX ``metadata_props``, ``manifest.json`` of a Relay folder), so that somebody
who gets the file can see where the batch norms went, and check every number of it against the source.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.epsilon import EpsilonCheck
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.fold import FoldRecord
from tvm_fuse.core.reason import Decision
from tvm_fuse.core.weights import FoldedLayer

__all__ = [
    "FILE_NAME",
    "METADATA_KEY",
    "FoldedNorm",
    "FoldedRun",
    "LeftAlone",
    "Manifest",
    "Source",
    "first_difference",
    "from_json",
    "hash_files",
    "make_manifest",
    "read_folder",
    "to_json",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/manifest", "version": 1}

#: Key in an ONNX model's ``metadata_props``.
METADATA_KEY = "tvm_fuse.manifest"

#: Name of the file in a Relay folder.
FILE_NAME = "manifest.json"

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
    """Other scales and shifts that are in the weights now, and where the layers are."""

    operators: tuple[str, ...]
    direction: str
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
        tuple(FoldedRun(run.operators, run.direction.value, run.layers) for run in runs),
        alone,
        tuple(outputs),
    )


def _used(check: EpsilonCheck | None) -> float | None:
    """The epsilon of a batch norm that is still there, where it is one."""
    return check.used if check is not None and math.isfinite(check.used) else None


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the contents of files, one after the other, in hexadecimal.

    Raises:
        UsageError: One of them cannot be read.
    """
    hasher = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    hasher.update(chunk)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return hasher.hexdigest()


# --- comparison ------------------------------------------------------------------------------

#: Bounds are sums in float64, in an order that the processor may choose.
_RTOL = 1e-6


def first_difference(stated: Manifest, found: Manifest) -> str:
    """Where a manifest differs from what folding the source again says; empty where it does not.

    The source is compared by itself. The versions may be others, and who named an epsilon cannot be seen.
    """
    return _difference("", _comparable(found), _comparable(stated))


def _comparable(manifest: Manifest) -> dict[str, Any]:
    document = asdict(manifest)
    del document["source"], document["versions"]
    for norm in document["batch_norms"]:
        del norm["epsilon_origin"]
    return document


def _difference(place: str, wanted: Any, got: Any) -> str:
    """The first place at which two plain values differ, with both."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping) and wanted.keys() == got.keys():
        name = f" ({wanted['name']})" if "name" in wanted else ""
        parts = [(f"{place}{name}.{key}".lstrip("."), wanted[key], got[key]) for key in wanted]
    elif isinstance(wanted, (tuple, list)) and isinstance(got, (tuple, list)) and len(wanted) == len(got):
        parts = [(f"{place}[{index}]", *pair) for index, pair in enumerate(zip(wanted, got))]
    elif wanted == got or (_are_numbers(wanted, got) and math.isclose(wanted, got, rel_tol=_RTOL)):
        return ""
    else:
        return f"{place}: wanted {_brief(wanted)}, got {_brief(got)}"
    return next(filter(None, (_difference(*part) for part in parts)), "")


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, float) for value in values)


def _brief(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, (tuple, list)) else repr(value)


# --- JSON ------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> str:
    """The manifest as one JSON document with sorted keys."""
    return json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1, sort_keys=True, allow_nan=False)


def from_json(text: str | bytes, where: str) -> Manifest:
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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: the manifest is damaged: {error!r}", _HINT) from error


_HINT = "`tvm-fuse fold MODEL -o OUT` writes one"


def read_folder(folder: Path) -> Manifest:
    """Read the manifest in the folder of a Relay module.

    Raises:
        UsageError: There is none.
        ModelError: It is damaged.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise UsageError(f"{folder}: no {FILE_NAME} in it", _HINT)
    return from_json(file.read_bytes(), str(file))


def _read(document: Mapping[str, Any]) -> Manifest:
    norms = (_make(FoldedNorm, norm, layers=_layers(norm)) for norm in document["batch_norms"])
    runs = (
        _make(FoldedRun, run, operators=_texts(run["operators"]), layers=_layers(run))
        for run in document["scale_shifts"]
    )
    return Manifest(
        _make(Source, document["source"]),
        dict(zip(document["versions"], _texts(document["versions"].values()))),
        tuple(norms),
        tuple(runs),
        tuple(_make(LeftAlone, left) for left in document["left_alone"]),
        _texts(document["outputs"]),
    )


def _layers(entry: Mapping[str, Any]) -> tuple[FoldedLayer, ...]:
    return tuple(_make(FoldedLayer, layer) for layer in entry["layers"])


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(_checked(value, "str") for value in values)


def _make(kind: type[Any], entry: Mapping[str, Any], **inner: Any) -> Any:
    """A record from its JSON form, with the types that its fields state."""
    plain = {
        item.name: _checked(entry[item.name], str(item.type))
        for item in fields(kind)
        if item.name not in inner
    }
    return kind(**plain, **inner)


#: Annotation of a field -> what JSON makes of it.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}


def _checked(value: Any, annotation: str) -> Any:
    if not isinstance(value, _TYPES[annotation]):
        raise TypeError(f"wanted {annotation}, got {value!r}")
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
