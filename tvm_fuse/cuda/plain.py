"""Frozen records from plain JSON values, with every type checked and every fault placed."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["make"]


def make(kind: Any, value: Any, place: str) -> Any:
    """A value of a type from its JSON form, as ``dataclasses.asdict`` and ``json`` make it.

    Args:
        kind: A dataclass, ``str``, ``bool``, ``int``, ``float`` (which takes whole numbers), a ``tuple``,
            ``Mapping`` or ``Union`` of such.
        value: What ``json.loads`` returned.
        place: Where it stands, for messages.

    Returns:
        The value.

    Raises:
        ValueError: It is of another type, or a field is missing or unknown; says where.
    """
    if is_dataclass(kind):
        return _make_record(kind, value, place)
    makers: dict[Any, Callable[[Any, Any, str], Any]] = {
        tuple: _make_tuple,
        collections.abc.Mapping: _make_mapping,
        Union: _make_either,
    }
    origin = get_origin(kind)
    return makers[origin](get_args(kind), value, place) if origin else _make_plain(kind, value, place)


def _make_record(kind: Any, value: Any, place: str) -> Any:
    names = [item.name for item in fields(kind)]
    _require(isinstance(value, dict), f"a {kind.__name__}", value, place)
    for name in (*names, *value):
        if name not in value or name not in names:
            raise ValueError(f"{place}: {'no' if name in names else 'unknown'} field {name!r}")
    hints = get_type_hints(kind)
    return kind(**{name: make(hints[name], value[name], f"{place}.{name}".lstrip(".")) for name in names})


def _make_tuple(kinds: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), "a list", value, place)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    _require(len(kinds) == len(value), f"{len(kinds)} entries", value, place)
    return tuple(make(*pair, f"{place}[{index}]") for index, pair in enumerate(zip(kinds, value)))


def _make_mapping(kinds: tuple[Any, ...], value: Any, place: str) -> dict[str, Any]:
    _require(isinstance(value, dict), "names with values", value, place)
    return {name: make(kinds[1], entry, f"{place}[{name!r}]") for name, entry in value.items()}


def _make_either(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    _require(type(value) in kinds, " or ".join(kind.__name__ for kind in kinds), value, place)
    return value


def _make_plain(kind: Any, value: Any, place: str) -> Any:
    allowed = (float, int) if kind is float else (kind,)
    _require(type(value) in allowed, kind.__name__, value, place)
    return kind(value)


def _require(holds: bool, wanted: str, got: Any, place: str) -> None:
    if not holds:
        text = repr(got)
        raise ValueError(f"{place}: wanted {wanted}, got {text[:60]}{'...' * (len(text) > 60)}")
