"""Bundles in folders: writing them whole or not at all, and reading them with every hash checked."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import ModelError, TvmFuseError, UsageError
from tvm_fuse.core.folders import write_files
from tvm_fuse.core.manifest import hash_files
from tvm_fuse.cuda.bundle import Bundle, Draw, FileRecord, Output, Port, Tensor
from tvm_fuse.cuda.bundle_json import from_json, to_json

__all__ = [
    "BUNDLE_FILE",
    "KERNELS_FILE",
    "draw_parameters",
    "load_bundle",
    "load_golden",
    "load_parameters",
    "measure_draw",
    "save_bundle",
]

BUNDLE_FILE = "bundle.json"
KERNELS_FILE = "kernels.cu"
_PARAMS_FILE = "params.npz"
_GOLDEN_FILE = "golden.npz"

_DAMAGED = "copy the bundle again, or export it again"


def save_bundle(
    folder: Path,
    bundle: Bundle,
    kernels: Mapping[str, bytes],
    parameters: Mapping[str, Array],
    golden: tuple[Mapping[str, Array], Mapping[str, Array]],
) -> Bundle:
    """Write a bundle.

    Args:
        folder: Made if need be; a bundle in it is replaced, other files stay.
        bundle: Its description; ``files`` is filled in here.
        kernels: File name -> contents of ``kernels.cu`` and of every image.
        parameters: Parameter name -> array; left out where the bundle draws them.
        golden: Arrays of the inputs and of the outputs, by name.

    Returns:
        The description as it was written.

    Raises:
        UsageError: The folder cannot be written; what was there before is still there.
        ModelError: The bundle could not be loaded again.
    """
    inputs, outputs = golden
    contents = dict(kernels)
    if not bundle.is_seeded:
        contents[_PARAMS_FILE] = _pack(_keys("p", bundle.parameters, parameters))
    contents[_GOLDEN_FILE] = _pack(
        {**_keys("input", bundle.inputs, inputs), **_keys("output", bundle.outputs, outputs)}
    )
    records = (
        FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    )
    bundle = replace(bundle, files=tuple(records))
    text = to_json(bundle)
    from_json(text, str(folder))
    contents[BUNDLE_FILE] = f"{text}\n".encode()
    write_files(folder, contents, stale=[*_older_files(folder), _PARAMS_FILE])
    return bundle


def _older_files(folder: Path) -> list[str]:
    """The files of a bundle that is there already."""
    try:
        return [record.name for record in _read_description(folder).files]
    except TvmFuseError:
        return []


def load_bundle(folder: Path) -> Bundle:
    """Read the description of a bundle, and check that every file is the one that was written.

    Raises:
        UsageError: There is no bundle.
        ModelError: It is of another version, or damaged.
    """
    bundle = _read_description(folder)
    wanted = {KERNELS_FILE, _GOLDEN_FILE, *(() if bundle.is_seeded else (_PARAMS_FILE,))}
    for name in sorted(wanted - {record.name for record in bundle.files}):
        raise ModelError(f"{folder / BUNDLE_FILE}: {name} is not among its files", _DAMAGED)
    for record in bundle.files:
        _check_file(folder / record.name, record)
    return bundle


def _read_description(folder: Path) -> Bundle:
    file = folder / BUNDLE_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder}: no {BUNDLE_FILE} in it", "`tvm-fuse export MODEL -o BUNDLE` writes a bundle"
        )
    return from_json(file.read_bytes(), str(file))


def _check_file(file: Path, record: FileRecord) -> None:
    if not file.is_file():
        raise ModelError(f"{file}: the file is missing", _DAMAGED)
    size_bytes = file.stat().st_size
    if size_bytes != record.size_bytes:
        raise ModelError(f"{file}: wanted {record.size_bytes} bytes, got {size_bytes}", _DAMAGED)
    if hash_files([file]) != record.sha256:
        raise ModelError(f"{file}: its contents are not those that were exported (SHA-256 differs)", _DAMAGED)


# --- arrays ----------------------------------------------------------------------------------


def load_parameters(folder: Path, bundle: Bundle) -> dict[str, Array]:
    """The parameters of a bundle, by name; drawn where it has only a seed for them.

    Raises:
        ModelError: One is missing, or of another shape or dtype than its tensor.
    """
    if bundle.is_seeded:
        specs = [bundle.tensors[port.tensor] for port in bundle.parameters]
        return dict(zip(_names(bundle.parameters), draw_parameters(specs, bundle.draws, bundle.seed)))
    return _unpack(folder / _PARAMS_FILE, "p", bundle.parameters, bundle.tensors)


def load_golden(folder: Path, bundle: Bundle) -> tuple[dict[str, Array], dict[str, Array]]:
    """The golden inputs and outputs of a bundle, by name.

    Raises:
        ModelError: One is missing, or of another shape or dtype than its tensor.
    """
    file = folder / _GOLDEN_FILE
    return (
        _unpack(file, "input", bundle.inputs, bundle.tensors),
        _unpack(file, "output", bundle.outputs, bundle.tensors),
    )


def _names(ports: Iterable[Port | Output]) -> list[str]:
    return [port.name for port in ports]


def _keys(prefix: str, ports: Iterable[Port | Output], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays under numbered keys: a name may be anything, a key of an npz file may not."""
    return {f"{prefix}{index}": arrays[name] for index, name in enumerate(_names(ports))}


def _pack(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpack(
    file: Path, prefix: str, ports: Sequence[Port | Output], tensors: Sequence[Tensor]
) -> dict[str, Array]:
    arrays = {}
    try:
        with np.load(file, allow_pickle=False) as stored:
            for index, port in enumerate(ports):
                array, spec = stored[f"{prefix}{index}"], tensors[port.tensor]
                if array.shape != spec.shape or str(array.dtype) != spec.dtype:
                    got = f"{array.dtype}{list(array.shape)}"
                    raise ModelError(f"{file}: {port.name!r}: wanted {spec}, got {got}", _DAMAGED)
                arrays[port.name] = array
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: cannot be read: {error}", _DAMAGED) from error
    return arrays


# --- drawn parameters ------------------------------------------------------------------------


def measure_draw(array: Array) -> Draw:
    """How to draw an array like this one.

    Raises:
        ValueError: A number is not finite.
    """
    numbers = array.astype(np.float64)
    if not numbers.size:
        return Draw(0.0, 0.0, 0.0, 0.0)
    if not np.isfinite(numbers).all():
        raise ValueError("infinite, or no number")
    statistics = numbers.min(), numbers.max(), numbers.mean(), numbers.std()
    return Draw(*map(float, statistics))


def draw_parameters(specs: Iterable[Tensor], draws: Iterable[Draw], seed: int) -> Iterator[Array]:
    """Parameters from a seed, the same with every version of NumPy.

    Args:
        specs: Shape and dtype of each.
        draws: How each is drawn.
        seed: Of the one stream that all are drawn from, in order.

    Yields:
        Their arrays.
    """
    stream = np.random.RandomState(seed)  # its stream is frozen
    for spec, draw in zip(specs, draws):
        drawn: Array
        if np.dtype(spec.dtype).kind == "f":
            drawn = draw.mean + draw.deviation * stream.standard_normal(spec.shape)
            drawn = np.clip(drawn, draw.minimum, draw.maximum)
        else:
            drawn = stream.randint(int(draw.minimum), int(draw.maximum) + 1, spec.shape, dtype=np.int64)
        yield np.asarray(drawn).astype(spec.dtype)
