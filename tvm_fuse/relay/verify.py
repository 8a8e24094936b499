"""Check the folder of a folded Relay module against its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.graph import digest
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import Manifest
from tvm_fuse.core.parity import Tolerance, compare
from tvm_fuse.relay.audit import check_model
from tvm_fuse.relay.build import Runner, build_unfused
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.constant_pass import fold_constants
from tvm_fuse.relay.fold_pass import fold_batch_norms
from tvm_fuse.relay.load import RelayModel, load_model, model_files
from tvm_fuse.relay.save import lift_constants
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.report import Check, Verification
from tvm_fuse.verify import check_numbers, check_source, read_manifest

__all__ = ["verify_folder"]


def verify_folder(
    path: Path,
    source: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    params: Path | None,
    tolerance: Tolerance | None,
    seed: int,
) -> Verification:
    """``tvm_fuse.verify.verify`` for the folder of a Relay module; both models run unfused on this CPU."""
    manifest = read_manifest(path)
    the_source = check_source(manifest, model_files(source, params))
    if the_source.problem:
        return Verification(manifest, (the_source,), None, "nothing")
    folded = load_model(path, shapes={})
    model = load_model(source, shapes=shapes, params=params)
    checked = check_model(model, manifest.epsilon, EpsilonConfig(), align=True)
    after = _digests(folded.module)
    before = set(_digests(fold_constants(checked.module)).values())
    checks = (
        the_source,
        *_check_weights(manifest, before, set(after.values())),
        check_numbers(_digests(fold_batch_norms(checked.module)), after),
    )
    target = resolve_target("llvm")
    inputs = make_inputs(model.inputs, seed)
    want, got = (_run(each, target, inputs) for each in (model, folded))
    parity = compare(want, got, tolerance=tolerance, seed=seed)
    return Verification(manifest, checks, parity, f"TVM {find_tvm().version}")


def _run(model: RelayModel, target: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return Runner(build_unfused(model.module, target), target).run(inputs, model.outputs)


def _digests(module: Any) -> dict[str, str]:
    """Name of each constant, by its place in the graph -> digest."""
    return {name: digest(value.numpy()) for name, value in lift_constants(module)[1].items()}


def _check_weights(manifest: Manifest, before: set[str], after: set[str]) -> Iterator[Check]:
    """The weights that the manifest states are among the constants; Relay's layers have no lasting names."""
    for name, (first, last) in manifest.weights.items():
        problems = [
            f"{role}: no constant has the digest {wanted}"
            for role, wanted, found in (("source", first, before), ("folded model", last, after))
            if wanted not in found
        ]
        yield Check(f"weight of {name}", "; ".join(problems))
