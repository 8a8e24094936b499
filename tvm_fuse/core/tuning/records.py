"""Tuned kernels on disk: one file for each device and chain, each with where it came from.

::

    schedules/tuned/llvm-cascadelake-2cores/3f1c09a77b52.json

A record is used where it was measured faster than the kernel that the build makes without it, on that device
and no other. A *draft* is a record that nobody measured: its times are predicted (``score``), and it is used
only where that is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.folders import write_file
from tvm_fuse.core.tuning.log import locked

__all__ = [
    "StoredRecords",
    "TunedRecord",
    "beats",
    "from_json",
    "load_records",
    "merge_records",
    "prune_records",
    "remove_record",
    "save_record",
    "steps_of",
    "to_json",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/tuned-record", "version": 2}

#: The version before had no drafts: all its records were measured.
_BEFORE = {"name": "tvm-fuse/tuned-record", "version": 1}

_LOCK = ".lock"


@dataclass(frozen=True)
class TunedRecord:
    """A schedule that was measured faster, or is predicted to be.

    Args:
        digest: Of its chain.
        device: Key of the device that it is for.
        name: Its chain, for people.
        chain: The lines that the digest was made of.
        workload_key: What the code generator calls its computation.
        schedule: Text of the code generator.
        cost_s: Seconds of a call; of a draft, predicted.
        baseline_s: Seconds of a call of the kernel that is built without it, measured in turn, or predicted.
        max_abs: Largest difference from the reference.
        needed: Share of the tolerance that was needed.
        provenance: Model, versions, date, trials: whatever says where it came from.
        measured: Whether it was measured on the device; if not, it is a draft.
    """

    digest: str
    device: str
    name: str
    chain: tuple[str, ...]
    workload_key: str
    schedule: str
    cost_s: float
    baseline_s: float
    max_abs: float
    needed: float
    provenance: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True

    @property
    def speedup(self) -> float:
        """Time without it over time with it."""
        return self.baseline_s / self.cost_s


def beats(record: TunedRecord, other: TunedRecord | None) -> bool:
    """Whether a record is to replace another of the same device and chain.

    A measured one replaces a draft and never the other way round; of two of a kind, the one with the greater
    speed-up over its own baseline is better: both times of a ratio were measured in turn, times of two jobs
    were not.
    """
    if other is None or record.measured != other.measured:
        return other is None or record.measured
    return record.speedup > other.speedup


def steps_of(schedule: str) -> str:
    """What makes two schedules of the code generator the same: all but what was measured."""
    return schedule.partition('"r":')[0]


def to_json(record: TunedRecord) -> str:
    """The file's text."""
    return json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1, sort_keys=True) + "\n"


def from_json(text: str) -> TunedRecord:
    """Read a file's text.

    Raises:
        ValueError: It is no record, or damaged.
    """
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == _BEFORE:
        document["measured"] = True
    elif schema != SCHEMA:
        raise ValueError(f"schema {schema}, not {SCHEMA}")
    missing = [entry.name for entry in fields(TunedRecord) if entry.name not in document]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    values = {entry.name: document[entry.name] for entry in fields(TunedRecord)}
    values["chain"] = tuple(map(str, values["chain"]))
    for name in ("cost_s", "baseline_s", "max_abs", "needed"):
        values[name] = float(values[name])
    if not (values["cost_s"] > 0 and values["baseline_s"] > 0 and isinstance(values["schedule"], str)):
        raise ValueError("a time is not positive, or the schedule is no text")
    if not isinstance(values["measured"], bool):
        raise ValueError(f"measured is {values['measured']!r}, neither true nor false")
    return TunedRecord(**values)


@dataclass(frozen=True)
class StoredRecords:
    """What is stored for one device.

    Args:
        records: Digest -> record.
        elsewhere: Digest -> keys of other devices of its kind that have a record of it.
        damaged: File -> what is wrong with it.
    """

    records: Mapping[str, TunedRecord]
    elsewhere: Mapping[str, tuple[str, ...]]
    damaged: Mapping[str, str]


def load_records(root: Path, device: str) -> StoredRecords:
    """Read what a folder of records has.

    Args:
        root: The folder; one that is not there has none.
        device: Key of the device in question.

    Returns:
        Its records. One whose text names another device than its folder counts as damaged.
    """
    records: dict[str, TunedRecord] = {}
    damaged: dict[str, str] = {}
    elsewhere: dict[str, tuple[str, ...]] = {}
    for file in sorted(root.glob("*/*.json")):
        if file.parent.name != device:
            if _kind(file.parent.name) != _kind(device):
                continue  # what a GPU has says nothing about a CPU
            elsewhere[file.stem] = (*elsewhere.get(file.stem, ()), file.parent.name)
            continue
        try:
            record = from_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            damaged[str(file)] = str(error)
            continue
        if (record.device, record.digest) != (device, file.stem):
            damaged[str(file)] = f"it is of {record.digest} on {record.device}"
            continue
        records[record.digest] = record
    return StoredRecords(records, elsewhere, damaged)


def _kind(device: str) -> str:
    return device.partition("-")[0]


def save_record(root: Path, record: TunedRecord) -> Path:
    """Write a record, whatever was there of the same device and chain.

    Raises:
        UsageError: The folder cannot be written.
    """
    with _exclusive(root / record.device) as folder:
        file = folder / f"{record.digest}.json"
        write_file(file, to_json(record).encode())
    return file


def remove_record(root: Path, device: str, digest: str) -> None:
    """Remove a record, if it is there."""
    with _exclusive(root / device) as folder:
        (folder / f"{digest}.json").unlink(missing_ok=True)


def merge_records(root: Path, other: Path) -> tuple[TunedRecord, ...]:
    """Take over the records of another folder, of all devices, where they beat those that are there.

    Args:
        root: The folder that gets them.
        other: The folder that has them.

    Returns:
        The records that were taken over.
    """
    taken = []
    for folder in sorted(path for path in other.glob("*") if path.is_dir()):
        here = load_records(root, folder.name).records
        for record in load_records(other, folder.name).records.values():
            if beats(record, here.get(record.digest)):
                save_record(root, record)
                taken.append(record)
    return tuple(taken)


def prune_records(root: Path, device: str, least: float = 1.02) -> tuple[str, ...]:
    """Remove what is of no use: damaged files, and measured records with a speed-up below ``least``.

    Returns:
        The names of the files that went away.
    """
    stored = load_records(root, device)
    gone = [Path(file) for file in stored.damaged]
    slow = (one for one in stored.records.values() if one.measured and one.speedup < least)
    gone += [root / device / f"{one.digest}.json" for one in slow]
    if gone:
        with _exclusive(root / device):
            for file in gone:
                file.unlink(missing_ok=True)
    return tuple(file.name for file in gone)


@contextmanager
def _exclusive(folder: Path) -> Iterator[Path]:
    """The folder, made if need be, with no other process writing to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"{folder}: records cannot be written: {error.strerror}") from error
    try:
        with locked(descriptor):
            yield folder
    finally:
        os.close(descriptor)
