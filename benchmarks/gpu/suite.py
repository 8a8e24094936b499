"""What there is to run on a GPU: the entries of a suite, the jobs they make, and the archive they are in."""

from __future__ import annotations

import json
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["FORMS", "Entry", "Job", "pack", "plan_jobs", "unpack"]

#: A model as CUDA kernels of ours, and what it is compared with.
FORMS = {
    "fused": "tvm-fuse: batch norms folded, chains fused, our schedules",
    "unfused": "the imported graph, every operator a kernel of its own, our schedules",
    "topi": "TVM's own opt_level 3 with TVM's schedules for CUDA, no tuning records",
    "by_hand": "the textbook kernel, one thread an output element",
    "torch": "PyTorch: float32 without TF32, cuDNN chooses by measuring",
}

SUITE_FILE = "suite.json"
ARCHIVE = "suite.tar.xz"

#: xz finds what was there 64 MiB before: the inputs of a batch, which many files hold, are stored once.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 1 << 26}]

_CHECK_LIMIT_S = 60.0
_COMPARE_LIMIT_S = 90.0
_COMPILE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Entry:
    """One thing to run.

    Args:
        subject: A model, or a layer of one.
        batch: Images at a time.
        form: One of ``FORMS``.
        folder: Where it lies in the suite: a bundle, or the description of a network for PyTorch.
        is_layer: Whether the subject is a single layer.
    """

    subject: str
    batch: int
    form: str
    folder: str
    is_layer: bool = False


@dataclass(frozen=True)
class Job:
    """What one process does.

    Args:
        name: For people, and for ``--only``.
        kind: ``check``, ``compare``, or ``kernels`` for every launch by itself.
        entries: What it is about; the first of a comparison is what the others are divided by.
        compiles: Whether PyTorch compiles its network; else it runs operator by operator.
        limit_s: Longest time that it may take, seconds.
    """

    name: str
    kind: str
    entries: tuple[Entry, ...]
    compiles: bool = False
    limit_s: float = _COMPARE_LIMIT_S


def plan_jobs(entries: Iterable[Entry]) -> tuple[Job, ...]:
    """The jobs, what is worth most first.

    Correctness of every model, then one image at a time (our forms and TVM's, PyTorch, PyTorch compiled,
    single layers, every kernel by itself), then the same for each larger batch. Layers are checked where
    they are compared.
    """
    entries = tuple(entries)
    batches = sorted({entry.batch for entry in entries})
    checks = [
        Job(f"check {_title(entry)} {entry.form}", "check", (entry,), limit_s=_CHECK_LIMIT_S)
        for batch in batches
        for form in ("fused", "unfused", "topi")
        for entry in entries
        if (entry.batch, entry.form) == (batch, form) and not entry.is_layer
    ]
    comparisons = [job for batch in batches for job in _compare(_by_subject(entries, batch))]
    return (*checks, *comparisons)


def _by_subject(entries: Iterable[Entry], batch: int) -> list[dict[str, Entry]]:
    subjects: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if entry.batch == batch:
            subjects.setdefault(entry.subject, {})[entry.form] = entry
    return list(subjects.values())


def _compare(subjects: list[dict[str, Entry]]) -> list[Job]:
    models = [forms for forms in subjects if not forms["fused"].is_layer]
    layers = [forms for forms in subjects if forms["fused"].is_layer]
    jobs = [_job(forms, "forms of", ("fused", "unfused", "topi")) for forms in models]
    jobs += [_job(forms, "PyTorch on", ("fused", "torch")) for forms in models if "torch" in forms]
    jobs += [
        _job(forms, "compiled PyTorch on", ("fused", "torch"), True) for forms in models if "torch" in forms
    ]
    jobs += [_job(forms, "layer", ("fused", "by_hand", "torch")) for forms in layers]
    jobs += [Job(f"kernels of {_title(forms['fused'])}", "kernels", (forms["fused"],)) for forms in models]
    return jobs


def _job(forms: Mapping[str, Entry], what: str, wanted: tuple[str, ...], compiles: bool = False) -> Job:
    entries = tuple(forms[form] for form in wanted if form in forms)
    limit_s = _COMPILE_LIMIT_S if compiles else _COMPARE_LIMIT_S
    return Job(f"{what} {_title(entries[0])}", "compare", entries, compiles, limit_s)


def _title(entry: Entry) -> str:
    return f"{entry.subject} batch {entry.batch}"


# --- the archive -----------------------------------------------------------------------------


def pack(folder: Path, archive: Path, about: Mapping[str, Any], entries: Iterable[Entry]) -> int:
    """Write a suite as one file.

    Args:
        folder: Where the entries' folders are.
        archive: The file to write.
        about: What else to say of the suite; JSON.
        entries: Its entries.

    Returns:
        Size of the archive, bytes.
    """
    document = {**about, "entries": [asdict(entry) for entry in entries]}
    (folder / SUITE_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    # Files of one name beside each other: the inputs of a batch are then near each other as well.
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name, path))
    partial = archive.with_suffix(".tmp")
    with lzma.open(partial, "wb", filters=_FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in files:
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    partial.replace(archive)
    return archive.stat().st_size


def unpack(archive: Path, folder: Path) -> tuple[dict[str, Any], tuple[Entry, ...]]:
    """Read a suite.

    Args:
        archive: What ``pack`` wrote.
        folder: An empty folder for its contents.

    Returns:
        What was said of it, and its entries.

    Raises:
        ValueError: The archive holds what ``pack`` does not write.
    """
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            data = tar.extractfile(member) if member.isfile() else None
            if data is None or name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{archive}: {member.name} is no plain file inside the suite")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.read())
    about = json.loads((folder / SUITE_FILE).read_text(encoding="utf-8"))
    return about, tuple(Entry(**entry) for entry in about.pop("entries"))
