"""The fold job: read a model, check its batch norms, fold them, and save a model that one can ship.

An ONNX file becomes an ONNX file with NumPy and onnx alone; a folder with a Relay module needs TVM, which is
imported only then. A manifest travels with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx

from tvm_fuse import __version__
from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.audit import Audit, audit_graph, compare_epsilons, mismatch
from tvm_fuse.core.epsilon import EpsilonCheck, EpsilonConfig, resolve_expected
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.fold import RULE, FoldRecord
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.manifest import Source, hash_files, make_manifest, to_json
from tvm_fuse.core.reason import Decision, Reason, refusal
from tvm_fuse.onnx.epsilon import set_epsilons
from tvm_fuse.onnx.fold import FoldedModel, fold_parts
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import external_files, with_manifest
from tvm_fuse.onnx.parts import Parts, put_together, take_apart
from tvm_fuse.onnx.read import OnnxModel
from tvm_fuse.onnx.save import save_onnx
from tvm_fuse.report import FoldReport

__all__ = ["FoldOptions", "fold_file", "fold_onnx_model"]

#: Names a step of the work; used as ``with progress("folding"): ...``.
Progress = Callable[[str], "AbstractContextManager[Any]"]


def _quietly(step: str) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class FoldOptions:
    """What the user may choose.

    Args:
        epsilon: Batch norm name or glob pattern -> the epsilon the model was trained with.
        epsilon_config: The same from a training config; ``epsilon`` comes before it.
        align_epsilon: Replace an epsilon that differs from the expected one, instead of failing.
        shapes: Shapes for the dynamic inputs of an ONNX model that becomes a Relay module.
        params: Parameters of a Relay module.
    """

    epsilon: Mapping[str, float] = field(default_factory=dict)
    epsilon_config: EpsilonConfig = field(default_factory=EpsilonConfig)
    align_epsilon: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    params: Path | None = None


def fold_file(
    path: Path, output: Path, options: FoldOptions | None = None, progress: Progress = _quietly
) -> FoldReport:
    """Fold the batch norms of a model file and save the result.

    Args:
        path: An ONNX file, or a Relay module (see ``relay.load.load_model``).
        output: ``OUT.onnx``, or a folder for a Relay module and its parameters.
        options: See ``FoldOptions``.
        progress: Called around each step.

    Returns:
        What was folded, what was not and why, and the manifest that was saved.

    Raises:
        UsageError: A file is missing, a name fits no batch norm, or the output cannot be written.
        ModelError: The model cannot be read, its statistics are broken, or an epsilon is not the
            expected one.
    """
    options = options or FoldOptions()
    if output.resolve() == path.resolve():
        raise UsageError(f"{output}: the folded model would overwrite its source", "give another name to -o")
    if output.suffix.lower() != ".onnx":
        return _fold_to_folder(path, output, options, progress)
    if path.suffix.lower() != ".onnx":
        raise UsageError(
            f"{output}: only an ONNX model can become one; {path} is none", "give a folder to -o"
        )
    if options.shapes:
        raise UsageError("--shape is for a folder: an ONNX file keeps its dynamic dimensions")
    if options.params is not None:
        raise UsageError("--params is for Relay modules; an ONNX model has its parameters inside")
    with progress("reading the model"):
        model = load_onnx(path)
    with progress("folding"):
        folded, report = fold_onnx_model(model, options)
    with progress("saving"):
        try:
            save_onnx(put_together(with_manifest(folded.parts, report.manifest)), output)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return report


# --- ONNX ------------------------------------------------------------------------------------


def fold_onnx_model(model: OnnxModel, options: FoldOptions) -> tuple[FoldedModel, FoldReport]:
    """Check and fold an ONNX model; needs NumPy and onnx only.

    Args:
        model: As ``load_onnx`` returns it.
        options: See ``FoldOptions``.

    Returns:
        The folded model and what was done.

    Raises:
        ModelError, UsageError: As for ``fold_file``.
    """
    parts, checks, audit = _check(model, options)
    folded = fold_parts(parts)
    report = _report(
        model.path.stem,
        Source(model.path.name, hash_files([model.path, *external_files(model.path)])),
        {},
        _Outcome(checks, audit.warnings, folded.folds, folded.affine_folds, folded.decisions),
        model.outputs,
    )
    return folded, report


def _check(model: OnnxModel, options: FoldOptions) -> tuple[Parts, tuple[EpsilonCheck, ...], Audit]:
    """Epsilons and statistics, before anything is changed; the model with its epsilons aligned."""
    parts = take_apart(model.proto)
    graph = read_graph(parts).graph
    names = tuple(str(node) for node in graph.of_kind(Kind.BATCH_NORM))
    expected = resolve_expected(names, model.epsilon, options.epsilon, options.epsilon_config)
    checks = tuple(compare_epsilons(graph, expected, align=options.align_epsilon).values())
    differing = [check for check in checks if not check.matches]
    if differing and not options.align_epsilon:
        raise refusal("batch norm(s) have another epsilon than expected", list(map(mismatch, differing)))
    audit = audit_graph(graph)
    if audit.problems:
        raise refusal("problem(s) in the numbers of batch norms", audit.problems)
    return set_epsilons(parts, {check.name: check.used for check in differing}), checks, audit


# --- Relay -----------------------------------------------------------------------------------


def _fold_to_folder(path: Path, output: Path, options: FoldOptions, progress: Progress) -> FoldReport:
    if output.suffix or (output.exists() and not output.is_dir()):
        raise UsageError(f"-o {output}: wanted OUT.onnx or a folder")
    with progress("loading TVM"):
        from tvm_fuse.relay.audit import check_model
        from tvm_fuse.relay.compat import find_tvm
        from tvm_fuse.relay.fold_pass import fold_batch_norms
        from tvm_fuse.relay.load import load_model, model_files
        from tvm_fuse.relay.record import last_report
        from tvm_fuse.relay.save import save_folder
    with progress("importing the model"):
        model = load_model(path, shapes=options.shapes, params=options.params)
    with progress("folding"):
        checked = check_model(model, options.epsilon, options.epsilon_config, align=options.align_epsilon)
        module = fold_batch_norms(checked.module)
        norms, runs = last_report()["FoldBatchNorm"], last_report()["FoldScaleShift"]
    report = _report(
        model.name,
        Source(path.name, hash_files(model_files(path, options.params))),
        {"tvm": find_tvm().version},
        _Outcome(
            checked.epsilon, checked.warnings, norms.details, runs.details, norms.decisions + runs.decisions
        ),
        model.outputs,
    )
    with progress("saving"):
        save_folder(module, to_json(report.manifest), output)
    return report


# --- both ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """What folding came to, on either front end."""

    epsilon: tuple[EpsilonCheck, ...]
    warnings: tuple[Reason, ...]
    folds: tuple[FoldRecord, ...]
    scale_shifts: tuple[AffineRecord, ...]
    decisions: tuple[Decision, ...]


def _report(
    name: str, source: Source, versions: Mapping[str, str], outcome: _Outcome, outputs: tuple[str, ...]
) -> FoldReport:
    left = tuple(decision for decision in outcome.decisions if not decision.applied)
    manifest = make_manifest(
        source,
        {"tvm-fuse": __version__, "numpy": np.__version__, "onnx": onnx.__version__, **versions},
        outcome.epsilon,
        outcome.folds,
        outcome.scale_shifts,
        [decision for decision in left if decision.rule == RULE],
        outputs,
    )
    return FoldReport(
        name, outcome.epsilon, outcome.folds, left, outcome.scale_shifts, outcome.warnings, manifest
    )
