"""Fitted constants of the score on disk: one file for a device, beside the folders of its records.

::

    tuned/cuda-sm_80/3f1c09a77b52.json
    tuned/cuda-sm_80.score.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.folders import write_files
from tvm_fuse.core.tuning.score import ScoreConstants

__all__ = ["constants_file", "load_constants", "save_constants"]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/score-constants", "version": 1}


def constants_file(root: Path, device: str) -> Path:
    """Where the constants of a device are."""
    return root / f"{device}.score.json"


def save_constants(root: Path, device: str, constants: ScoreConstants, provenance: Mapping[str, Any]) -> Path:
    """Write constants.

    Args:
        root: Folder of records.
        device: Key of the device.
        constants: The constants.
        provenance: Where they come from.

    Raises:
        UsageError: The folder cannot be written.
    """
    file = constants_file(root, device)
    document = {"schema": SCHEMA, "constants": asdict(constants), "provenance": dict(provenance)}
    write_files(root, {file.name: f"{json.dumps(document, indent=1)}\n".encode()})
    return file


def load_constants(root: Path, device: str) -> ScoreConstants:
    """Read constants.

    Args:
        root: Folder of records.
        device: Key of the device.

    Returns:
        The fitted ones; the defaults where nothing was fitted.

    Raises:
        ModelError: The file is damaged.
    """
    file = constants_file(root, device)
    if not file.is_file():
        return ScoreConstants()
    try:
        document = json.loads(file.read_bytes())
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"no {SCHEMA}")
        values = {item.name: float(document["constants"][item.name]) for item in fields(ScoreConstants)}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: no constants of the score: {error}", "remove the file") from error
    wrong = [name for name, value in values.items() if not (value > 0 and math.isfinite(value))]
    if wrong:
        raise ModelError(f"{file}: {', '.join(wrong)}: wanted numbers above 0", "remove the file")
    return ScoreConstants(**values)
