"""Check a folded model against its source: every hash of its manifest, every number, and the outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from tvm_fuse.core.epsilon import EpsilonCheck
from tvm_fuse.core.errors import ModelError, ToolFailed, UsageError
from tvm_fuse.core.graph import digest
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import FoldedNorm, FoldedRun, Manifest, first_difference, hash_files, read_folder
from tvm_fuse.core.parity import ToleranceChoice, compare
from tvm_fuse.folding import FoldOptions, fold_onnx_model
from tvm_fuse.onnx.epsilon import set_epsilons
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import external_files, load_manifest, with_manifest
from tvm_fuse.onnx.parts import Parts, put_together, take_apart
from tvm_fuse.onnx.read import OnnxModel, fix_shapes, read_onnx
from tvm_fuse.onnx.run import run_models
from tvm_fuse.onnx.save import save_onnx
from tvm_fuse.report import Check, Verification

__all__ = [
    "check_manifest",
    "check_numbers",
    "check_source",
    "check_weights",
    "not_again",
    "read_manifest",
    "verify",
]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a folded model: an ONNX file, or the folder of a Relay module.

    Raises:
        UsageError: There is no such file or folder.
        ModelError: It has no manifest, or a damaged one.
    """
    return read_folder(path) if path.is_dir() else load_manifest(path)


def verify(
    path: Path,
    source: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    params: Path | None = None,
    tolerance: ToleranceChoice = None,
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
        UsageError, ModelError: A file cannot be read, or an option does not fit it.
        ToolFailed: The models cannot be run.
    """
    if path.is_dir():
        from tvm_fuse.relay.verify import verify_folder

        return verify_folder(path, source, shapes=shapes, params=params, tolerance=tolerance, seed=seed)
    manifest = load_manifest(path)
    if params is not None:
        raise UsageError("--params is for Relay modules; an ONNX model has its parameters inside")
    the_source = check_source(manifest, [source, *external_files(source)])
    if the_source.problem:
        return Verification(manifest, (the_source,))
    folded = take_apart(read_onnx(path).proto)
    model = load_onnx(source)
    inputs = make_inputs(fix_shapes(model.inputs, shapes), seed)
    try:
        again, report = fold_onnx_model(model, FoldOptions(epsilon=manifest.epsilon, align_epsilon=True))
    except (UsageError, ModelError) as error:
        return Verification(manifest, (the_source, not_again(error)))
    checks = (
        the_source,
        check_manifest(manifest, report.manifest),
        *check_weights(manifest, _digests(take_apart(model.proto)).values(), _digests(folded).values()),
        check_numbers(_digests(again.parts), _digests(folded)),
        _check_operators(again.parts, folded, manifest),
    )
    try:
        with _aligned(model, report.epsilon) as reference:
            engine, (want, got) = run_models([reference, path], inputs)
    except ToolFailed:
        if not any(check.problem for check in checks):
            raise
        return Verification(manifest, checks)
    return Verification(manifest, checks, compare(want, got, tolerance=tolerance, seed=seed), engine)


@contextmanager
def _aligned(model: OnnxModel, epsilon: Iterable[EpsilonCheck]) -> Iterator[Path]:
    """A file of the source with the epsilons that it was folded with: its own, unless they were aligned."""
    differing = {check.name: check.used for check in epsilon if not check.matches}
    if not differing:
        yield model.path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / model.path.name
        save_onnx(put_together(set_epsilons(take_apart(model.proto), differing)), path)
        yield path


# --- checks ----------------------------------------------------------------------------------


def check_source(manifest: Manifest, files: Iterable[Path]) -> Check:
    """The source is the file that the manifest names, byte by byte."""
    wanted, got = manifest.source.sha256, hash_files(files)
    problem = f"it is another file: wanted SHA-256 {wanted} ({manifest.source.name}), got {got}"
    return Check("the source is the file that was folded", "" if got == wanted else problem)


def not_again(error: UsageError | ModelError) -> Check:
    """What the manifest says of epsilons does not fit the source."""
    return Check("the source can be folded again with the epsilons of the manifest", error.message)


def check_manifest(stated: Manifest, found: Manifest) -> Check:
    """The manifest says what folding the source again finds."""
    return Check("the manifest says what folding the source again finds", first_difference(stated, found))


def check_weights(manifest: Manifest, before: Iterable[str], after: Iterable[str]) -> Iterator[Check]:
    """Each weight that the manifest states is there.

    A layer may be folded into several times, each time from what the time before made.

    Args:
        manifest: The manifest.
        before: Digests of the constants of the source.
        after: Those of the folded model.
    """
    entries: tuple[FoldedNorm | FoldedRun, ...] = (*manifest.batch_norms, *manifest.scale_shifts)
    layers = [layer for entry in entries for layer in entry.layers]
    sources = {*before, *(layer.weight_after for layer in layers)}
    results = {*after, *(layer.weight_before for layer in layers)}
    for layer in layers:
        problems = [
            f"no constant of the {role} has the digest {wanted}"
            for role, wanted, found in (
                ("source", layer.weight_before, sources),
                ("folded model", layer.weight_after, results),
            )
            if wanted not in found
        ]
        yield Check(f"weight of {layer.name}", "; ".join(problems))


def check_numbers(wanted: Mapping[str, str], got: Mapping[str, str]) -> Check:
    """Folding the source again gives the same constants, by name -> digest."""
    differing = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    problem = f"{len(differing)} differ: {', '.join(differing[:_MOST_NAMES])}" if differing else ""
    return Check(f"folding the source again gives the same {len(wanted)} constants", problem)


#: How many constants a check names.
_MOST_NAMES = 5


def _check_operators(wanted: Parts, got: Parts, manifest: Manifest) -> Check:
    """Folding the source again gives the same operators, inputs, outputs and properties."""
    one, other = (with_manifest(parts, manifest).structure for parts in (wanted, got))
    pairs = zip_longest(one.graph.node, other.graph.node)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    problem = "" if one == other else "inputs, outputs, shapes of constants or properties differ"
    if differing:
        names = [f"{node.op_type} {node.name!r}" if node is not None else "nothing" for node in differing[0]]
        problem = f"{len(differing)} differ, the first: wanted {names[0]}, got {names[1]}"
    return Check("folding the source again gives the same operators", problem)


def _digests(parts: Parts) -> dict[str, str]:
    return {name: digest(array) for name, array in parts.arrays.items()}
