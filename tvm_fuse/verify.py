"""Check a folded model against its source: every hash of its manifest, every number, and the outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import digest
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import Manifest, from_json, hash_files
from tvm_fuse.core.parity import Tolerance, compare
from tvm_fuse.folding import FoldOptions, fold_onnx_model
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import external_files, load_manifest
from tvm_fuse.onnx.parts import Parts, take_apart
from tvm_fuse.onnx.read import fix_shapes, read_onnx
from tvm_fuse.onnx.run import engine_name, run_onnx
from tvm_fuse.report import Check, Verification

__all__ = ["check_numbers", "check_source", "read_manifest", "verify"]

_MANIFEST = "manifest.json"


def read_manifest(path: Path) -> Manifest:
    """The manifest of a folded model: an ONNX file, or the folder of a Relay module.

    Raises:
        UsageError: There is no such file or folder.
        ModelError: It has no manifest.
    """
    if not path.is_dir():
        return load_manifest(path)
    file = path / _MANIFEST
    if not file.is_file():
        raise UsageError(f"{path}: no {_MANIFEST} in it", "`tvm-fuse fold MODEL -o FOLDER` writes one")
    return from_json(file.read_text(encoding="utf-8"), str(file))


def verify(
    path: Path,
    source: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    params: Path | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> Verification:
    """Check a folded model against the model it was made from.

    Args:
        path: The folded model: an ONNX file or the folder of a Relay module.
        source: The model it was made from.
        shapes: Shapes for dynamic inputs, to run both.
        params: Parameters of a Relay source.
        tolerance: For the outputs; None takes the default of each dtype.
        seed: Seed of the inputs.

    Returns:
        What holds and what does not.

    Raises:
        UsageError, ModelError: A file cannot be read.
        ToolFailed: A model cannot be run.
    """
    if path.is_dir():
        from tvm_fuse.relay.verify import verify_folder

        return verify_folder(path, source, shapes=shapes, params=params, tolerance=tolerance, seed=seed)
    manifest = load_manifest(path)
    if not source.is_file():
        raise UsageError(f"no such file: {source}")
    the_source = check_source(manifest, [source, *external_files(source)])
    if the_source.problem:
        return Verification(manifest, (the_source,), None, "nothing")
    folded = take_apart(read_onnx(path).proto)
    model = load_onnx(source)
    again, _ = fold_onnx_model(model, FoldOptions(epsilon=manifest.epsilon, align_epsilon=True))
    checks = (
        the_source,
        *_check_weights(manifest, take_apart(model.proto), folded),
        check_numbers(_digests(again.parts), _digests(folded)),
    )
    inputs = make_inputs(fix_shapes(model.inputs, shapes), seed)
    parity = compare(run_onnx(source, inputs), run_onnx(path, inputs), tolerance=tolerance, seed=seed)
    return Verification(manifest, checks, parity, engine_name())


# --- checks ----------------------------------------------------------------------------------


def check_source(manifest: Manifest, files: Iterable[Path]) -> Check:
    """The source is the file that the manifest names, byte by byte."""
    wanted, got = manifest.source.sha256, hash_files(files)
    problem = "" if got == wanted else f"wanted SHA-256 {wanted} ({manifest.source.name}), got {got}"
    return Check("the source is the file that was folded", problem)


def check_numbers(wanted: Mapping[str, str], got: Mapping[str, str]) -> Check:
    """Folding the source again gives the same constants, by name -> digest."""
    differing = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    first = differing[0] if differing else ""
    problem = f"{len(differing)} differ, the first is {first!r}" if differing else ""
    return Check(f"folding the source again gives the same {len(wanted)} constants", problem)


def _check_weights(manifest: Manifest, source: Parts, folded: Parts) -> Iterator[Check]:
    """Each folded layer has the weights that the manifest states, before and after."""
    before, after = _weight_digests(source), _weight_digests(folded)
    for name, (first, last) in manifest.weights.items():
        problems = [
            f"{role}: wanted {wanted}, got {found.get(name, 'no such layer')}"
            for role, wanted, found in (("source", first, before), ("folded model", last, after))
            if found.get(name) != wanted
        ]
        yield Check(f"weight of {name}", "; ".join(problems))


def _weight_digests(parts: Parts) -> dict[str, str]:
    """Name of each layer with a constant weight -> digest of the weight."""
    return {
        node.name: digest(parts.arrays[node.input[1]])
        for node in parts.structure.graph.node
        if len(node.input) > 1 and node.input[1] in parts.arrays
    }


def _digests(parts: Parts) -> dict[str, str]:
    return {name: digest(array) for name, array in parts.arrays.items()}
