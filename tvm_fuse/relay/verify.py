"""Check the folder of a folded Relay module against its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import ModelError, ToolFailed, UsageError
from tvm_fuse.core.graph import digest
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import read_folder
from tvm_fuse.core.parity import ToleranceChoice, compare
from tvm_fuse.folding import FoldOptions, fold_relay_model
from tvm_fuse.relay.audit import check_model
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.build import Runner, build_unfused
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.constant_pass import fold_constants
from tvm_fuse.relay.load import RelayModel, load_model, model_files
from tvm_fuse.relay.save import lift_constants
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.relay.view import view_array
from tvm_fuse.report import Check, Verification
from tvm_fuse.verify import check_manifest, check_numbers, check_source, check_weights, not_again

__all__ = ["verify_folder"]


def verify_folder(
    path: Path,
    source: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    params: Path | None,
    tolerance: ToleranceChoice,
    seed: int,
) -> Verification:
    """``tvm_fuse.verify.verify`` for the folder of a Relay module; both models run unfused on this CPU."""
    manifest = read_folder(path)
    the_source = check_source(manifest, model_files(source, params))
    if the_source.problem:
        return Verification(manifest, (the_source,))
    folded = load_model(path, shapes={})
    model = load_model(source, shapes=shapes, params=params)
    options = FoldOptions(epsilon=manifest.epsilon, align_epsilon=True)
    try:
        again, report = fold_relay_model(model, options, manifest.source)
    except (UsageError, ModelError) as error:
        return Verification(manifest, (the_source, not_again(error)))
    before, after = _digests(fold_constants(model.module)), _digests(folded.module)
    checks = (
        the_source,
        check_manifest(manifest, report.manifest),
        *check_weights(manifest, before.values(), after.values()),
        check_numbers(_digests(again), after),
        _check_operators(again, folded.module),
    )
    aligned = check_model(model, manifest.epsilon, EpsilonConfig(), align=True)
    reference = replace(model, module=aligned.module)
    target = resolve_target("llvm")
    inputs = make_inputs(model.inputs, seed)
    try:
        want, got = (_run(each, target, inputs) for each in (reference, folded))
    except ToolFailed:
        if not any(check.problem for check in checks):
            raise
        return Verification(manifest, checks)
    parity = compare(want, got, tolerance=tolerance, seed=seed)
    return Verification(manifest, checks, parity, f"TVM {find_tvm().version}")


def _run(model: RelayModel, target: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return Runner(build_unfused(model.module, target), target).run(inputs, model.outputs)


def _digests(module: Any) -> dict[str, str]:
    """Name of each constant, by its place in the graph -> digest."""
    return {name: digest(view_array(value)) for name, value in lift_constants(module)[1].items()}


def _check_operators(wanted: Any, got: Any) -> Check:
    """Folding the source again gives the same operators."""
    same = tvm.ir.structural_equal(*(lift_constants(module)[0] for module in (wanted, got)))
    return Check("folding the source again gives the same operators", "" if same else "they differ")
