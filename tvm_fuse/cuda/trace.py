"""A trace: some elements of every operator's result, beside a bundle's golden outputs.

Golden outputs tell whether a bundle is right; a trace tells which operator is not. It lies in the
bundle's folder as ``trace.npz``, with an array for every result of every operator.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import ModelError
from tvm_fuse.cuda.bundle import Bundle

__all__ = ["SAMPLES", "TRACE_FILE", "Probe", "load_trace", "pack_trace", "sample_positions"]

TRACE_FILE = "trace.npz"

#: Elements that are looked at of one result, at the most.
SAMPLES = 512


@dataclass(frozen=True)
class Probe:
    """What one result of an operator holds at ``sample_positions``.

    Args:
        operator: Index into ``Bundle.operators``.
        tensor: The result: index into ``Bundle.tensors``.
        values: The elements, float64.
    """

    operator: int
    tensor: int
    values: Array


def sample_positions(size: int) -> Array:
    """Where a tensor is looked at.

    Args:
        size: Its number of elements.

    Returns:
        Positions in the flat tensor, ascending, int64: all of them where they are few; else the first, the
        last, and some between, the same for every tensor of this size and every version of NumPy.
    """
    if size <= SAMPLES:
        return np.arange(size, dtype=np.int64)
    inner = np.random.RandomState(size % 2**32).randint(0, size, SAMPLES - 2, dtype=np.int64)
    return np.sort(np.concatenate([inner, np.array([0, size - 1], np.int64)]))


def pack_trace(probes: Iterable[Probe]) -> bytes:
    """The contents of ``trace.npz``."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"{probe.operator}.{probe.tensor}": probe.values for probe in probes})
    return buffer.getvalue()


def load_trace(folder: Path, bundle: Bundle) -> tuple[Probe, ...]:
    """The trace of a bundle, in the order of its operators; nothing where it has none.

    Raises:
        ModelError: It is damaged, or of another bundle.
    """
    file = folder / TRACE_FILE
    if TRACE_FILE not in {record.name for record in bundle.files}:
        return ()
    try:
        with np.load(file, allow_pickle=False) as stored:
            probes = [_probe(key, stored[key]) for key in stored.files]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: cannot be read: {error}", _DAMAGED) from error
    for probe in probes:
        _check(file, probe, bundle)
    return tuple(sorted(probes, key=lambda probe: (probe.operator, probe.tensor)))


def _probe(key: str, values: Array) -> Probe:
    operator, tensor = map(int, key.split("."))
    return Probe(operator, tensor, values)


_DAMAGED = "copy the bundle again, or export it again"


def _check(file: Path, probe: Probe, bundle: Bundle) -> None:
    if not (0 <= probe.operator < len(bundle.operators) and 0 <= probe.tensor < len(bundle.tensors)):
        raise ModelError(
            f"{file}: the bundle has no operator {probe.operator} or tensor {probe.tensor}", _DAMAGED
        )
    shape = bundle.tensors[probe.tensor].shape
    wanted = sample_positions(int(np.prod(shape, dtype=np.int64))).shape
    if probe.values.shape != wanted or probe.values.dtype != np.float64:
        got = f"{probe.values.dtype}{list(probe.values.shape)}"
        raise ModelError(
            f"{file}: operator {probe.operator}: wanted float64{list(wanted)}, got {got}", _DAMAGED
        )
