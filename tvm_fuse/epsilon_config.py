"""Reads the epsilons that a model was trained with from its training config, JSON or YAML.

::

    {"bn1": 1e-3, "layer4.*": 1e-5}                  names of batch norms, or glob patterns
    {"epsilon": {"bn1": 1e-3, "layer4.*": 1e-5}}     the same
    {"epsilon": 1e-3}, {"eps": 1e-3}                 one for all
    {"class_name": "Functional", "config": ...}      a Keras model: model.to_json()

Anything else is a ``UsageError`` with file, place, wanted and got: an epsilon that was overlooked
would be a wrong one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import MissingDependency, UsageError

__all__ = ["read_epsilon_config"]

_HINT = (
    'wanted: {"bn1": 0.001, "layer4.*": 1e-05}, {"epsilon": 0.001}, or a Keras model.to_json(); '
    "YAML wants quotes around a name with a *"
)
_KERAS_BATCH_NORMS = frozenset(
    {"BatchNormalization", "BatchNormalizationV1", "BatchNormalizationV2", "SyncBatchNormalization"}
)


def read_epsilon_config(path: Path) -> EpsilonConfig:
    """Read a training config.

    Args:
        path: A ``.json``, ``.yaml`` or ``.yml`` file.

    Returns:
        Its epsilons.

    Raises:
        MissingDependency: It is YAML, and PyYAML is not installed.
        UsageError: It cannot be read, or has none of the forms above.
    """
    parse = {".json": _parse_json, ".yaml": _parse_yaml, ".yml": _parse_yaml}.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"{path}: wanted a .json, .yaml or .yml file, got {path.suffix or 'no suffix'}")
    try:
        document = _expect_entries("", parse(path.read_text(encoding="utf-8-sig")))
        if _is_keras(document):
            return EpsilonConfig(_read_keras(document), names_layers=True, source=str(path))
        return EpsilonConfig(_read_names(document), source=str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}", _HINT) from error


# --- files -----------------------------------------------------------------------------------


def _parse_json(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: wanted JSON, got an error: {error.msg}") from error


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(
            "a training config in YAML needs PyYAML, which is not installed",
            "pip install PyYAML, or write the config as JSON",
        ) from error

    class Loader(yaml.SafeLoader):
        """Plain data, without repeated keys."""

    def construct_mapping(loader: Any, node: Any) -> dict[str, Any]:
        return _unique(loader.construct_pairs(node, deep=True))

    Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}wanted YAML, got an error: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"wanted YAML, got an error: {' '.join(str(error).split())}") from error


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """A mapping of names, each of them once."""
    pairs = list(pairs)
    for key, _ in pairs:
        if not isinstance(key, str) or not key:
            raise ValueError(f"key {key!r}: wanted a name (in quotes), got {_describe(key)}")
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{key}: wanted it once, got it {count} times")
    return dict(pairs)


# --- forms -----------------------------------------------------------------------------------


def _read_names(document: dict[str, Any]) -> dict[str, float]:
    """Name or pattern -> epsilon, whole or under a key of its own."""
    key = next((key for key in ("epsilon", "eps") if key in document), "")
    if not key:
        return {name: _read_number(name, value) for name, value in document.items()}
    others = [repr(other) for other in document if other != key]
    if others:
        raise ValueError(f"{key}: wanted no other key beside it, got {', '.join(others[:5])}")
    value = document[key]
    if not isinstance(value, dict):
        return {"*": _read_number(key, value)}
    entries = _expect_entries(key, value)
    return {name: _read_number(f"{key}.{name}", entry) for name, entry in entries.items()}


def _is_keras(document: dict[str, Any]) -> bool:
    return isinstance(document.get("config"), (dict, list)) or isinstance(document.get("layers"), list)


def _read_keras(document: dict[str, Any]) -> dict[str, float]:
    """Name of each batch norm layer, also of models within the model -> epsilon."""
    values: dict[str, float] = {}
    for place, layer in _find_batch_norms("", document):
        config = _expect_entries(f"{place}config", layer.get("config"))
        name = config.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{place}config.name: wanted the name of the layer, got {_describe(name)}")
        epsilon = _read_number(f"{place}config.epsilon", config.get("epsilon"))
        if values.setdefault(name, epsilon) != epsilon:
            raise ValueError(
                f"{place}config.epsilon: wanted {values[name]:g}, as of another {name!r}, got {epsilon:g}"
            )
    if not values:
        raise ValueError("layers: wanted at least one BatchNormalization, got none")
    return values


def _find_batch_norms(place: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (``config.layers[3].``) and content of each batch norm layer, wherever it is nested."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_batch_norms(f"{place.rstrip('.')}[{index}].", item)
    elif isinstance(value, dict):
        if value.get("class_name") in _KERAS_BATCH_NORMS:
            yield place, value
            return
        for key, item in value.items():
            yield from _find_batch_norms(f"{place}{key}.", item)


# --- values ----------------------------------------------------------------------------------


def _expect_entries(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        where = f"{place}: " if place else ""
        raise ValueError(f"{where}wanted a mapping with entries, got {_describe(value)}")
    return value


def _read_number(place: str, value: Any) -> float:
    """An epsilon; text as well, since YAML 1.1 reads ``1e-3`` as such (it wants ``1.0e-3``)."""
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{place}: wanted a finite number >= 0, got {_describe(value)}")
    return number


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
