"""Options that several commands share, each parsed into a value with a clear message when it is wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.budget import parse_duration

__all__ = [
    "add_epsilon",
    "add_gates",
    "add_json",
    "add_model",
    "add_parity",
    "add_records",
    "add_shapes",
    "add_steering",
    "count",
    "duration",
    "to_mapping",
    "tracker",
]


def add_model(parser: Any, *, is_optional: bool = False) -> None:
    """The model, and what it needs to be read."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        nargs="?" if is_optional else None,
        help="ONNX file, Relay text (.relay) or JSON (.json), or a folder that `tvm-fuse fold` wrote",
    )
    add_shapes(parser)


def add_shapes(parser: Any) -> None:
    """Parameters and shapes of a model."""
    parser.add_argument(
        "--params", type=Path, metavar="FILE", help="parameters of a Relay module (save_param_dict)"
    )
    parser.add_argument(
        "--shape",
        type=_argument(_parse_shape),
        action="append",
        default=[],
        metavar="NAME=1x3x224x224",
        help="whole shape of an input with dynamic dimensions; may be repeated",
    )


def add_epsilon(parser: Any) -> None:
    """The epsilons that batch norms were trained with."""
    parser.add_argument(
        "--epsilon",
        type=_argument(_parse_epsilon),
        action="append",
        default=[],
        metavar="NAME=1e-3",
        help="epsilon a batch norm was trained with; NAME may be a pattern such as '*'; may be repeated",
    )
    parser.add_argument(
        "--epsilon-config",
        type=Path,
        metavar="FILE",
        help="training config with these epsilons, JSON or YAML: names or patterns, one number under "
        "'epsilon', or a Keras model.to_json(); --epsilon wins",
    )
    parser.add_argument(
        "--align-epsilon", action="store_true", help="use the expected epsilon where the graph's differs"
    )


def add_parity(parser: Any) -> None:
    """How outputs are compared."""
    for name, kind in (("--atol", "absolute"), ("--rtol", "relative")):
        parser.add_argument(
            name,
            type=_argument(_parse_tolerance),
            metavar="X",
            help=f"{kind} tolerance of parity, for all outputs (default: by dtype, 1e-5 for float32)",
        )
    parser.add_argument(
        "--seed",
        type=_argument(_parse_seed),
        default=0,
        metavar="N",
        help="seed of the parity inputs (default: 0)",
    )


def add_json(parser: Any) -> None:
    """JSON instead of text."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def add_steering(parser: Any) -> None:
    """What to fuse, and where to keep the plan."""
    parser.add_argument(
        "--fuse",
        default="all",
        metavar="all|none|PLAN.json",
        help="fuse what is legal and pays (the default), nothing at all, or exactly what a plan file says",
    )
    for name, verb in (("--only", "fuse only"), ("--skip", "do not fuse")):
        parser.add_argument(
            name,
            action="append",
            default=[],
            metavar="CHAIN",
            help=f"{verb} this chain: its id or name in `tvm-fuse plan`, its anchor's name, or a pattern; "
            "may be repeated",
        )
    parser.add_argument(
        "--max-ops",
        type=count,
        metavar="N",
        help="at most so many operators in one kernel",
    )
    parser.add_argument("--save-plan", type=Path, metavar="FILE", help="write the fusion plan as JSON")


def add_records(parser: Any) -> None:
    """Tuned records."""
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="use the tuned records in this folder that are of this device (default: those of tvm-fuse)",
    )
    parser.add_argument("--no-records", action="store_true", help="use no tuned records")
    parser.add_argument(
        "--drafts",
        action="store_true",
        help="use records that nobody measured, too: their times are predicted",
    )


def duration(text: str) -> float:
    """Seconds of a duration such as ``30m``, for ``type=``."""
    return _argument(parse_duration)(text)  # type: ignore[no-any-return]


def tracker(text: str) -> tuple[str, int]:
    """Host and port, for ``type=``."""
    return _argument(_parse_tracker)(text)  # type: ignore[no-any-return]


def add_gates(parser: Any) -> None:
    """Expectations, for continuous integration."""
    parser.add_argument(
        "--expect-fused",
        type=_argument(_parse_seed),
        metavar="N",
        help="exit code 6 when fewer convolutions and dense layers are fused, with the reason for each",
    )
    parser.add_argument(
        "--expect-plan", type=Path, metavar="FILE", help="exit code 6 when the plan differs from this one"
    )


def count(text: str) -> int:
    """A whole number above 0, for ``type=``."""
    return _argument(_parse_count)(text)  # type: ignore[no-any-return]


def to_mapping(pairs: Iterable[tuple[str, Any]], option: str) -> dict[str, Any]:
    """Collect repeated ``NAME=VALUE`` options.

    Raises:
        UsageError: A name was given twice.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise UsageError(f"{option} {name}=... was given twice")
        values[name] = value
    return values


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report a ``ValueError`` with its message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _split(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r}: wanted {form}")
    return name, value


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    form = "NAME=1x3x224x224"
    name, value = _split(text, form)
    sizes = value.lower().replace(",", "x").split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r}: wanted {form}, with sizes above 0")
    return name, tuple(int(size) for size in sizes)


def _parse_tracker(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r}: wanted HOST:PORT")
    return host, int(port)


def _parse_epsilon(text: str) -> tuple[str, float]:
    name, value = _split(text, "NAME=1e-3")
    return name, _parse_tolerance(value)


def _parse_seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r}: wanted a whole number >= 0")
    return int(text)


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{text!r}: wanted a whole number >= 1")
    return int(text)


def _parse_tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r}: wanted a number such as 1e-5") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r}: wanted a finite number >= 0")
    return value
