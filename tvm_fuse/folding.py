"""The fold job: read a model, check its batch norms, fold them, and save a model that one can ship.

An ONNX file becomes an ONNX file with NumPy and onnx alone; a folder with a Relay module needs TVM, which is
imported only then. A manifest travels with both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from tvm_fuse import __version__
from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.audit import audit_graph, compare_epsilons, mismatch
from tvm_fuse.core.epsilon import EpsilonCheck, EpsilonConfig, resolve_expected
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.fold import RULE, FoldRecord
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.manifest import (
    FILE_NAME,
    Manifest,
    Source,
    hash_files,
    make_manifest,
    read_folder,
    to_json,
)
from tvm_fuse.core.reason import Decision, Reason, refusal
from tvm_fuse.onnx.epsilon import set_epsilons
from tvm_fuse.onnx.fold import FoldedModel, fold_parts
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import find_manifest, with_manifest
from tvm_fuse.onnx.parts import Parts, put_together, take_apart
from tvm_fuse.onnx.prune import remove_dead
from tvm_fuse.onnx.read import OnnxModel
from tvm_fuse.onnx.save import data_file, save_onnx
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.report import FoldReport

if TYPE_CHECKING:
    from tvm_fuse.relay.load import RelayModel

__all__ = ["FoldOptions", "fold_file", "fold_onnx_model", "fold_relay_model"]


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
    path: Path, output: Path, options: FoldOptions | None = None, progress: Progress = quietly
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
    try:
        output.exists()
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error
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
    _refuse_overwriting(model.files, [output, data_file(output)])
    with progress("folding"):
        folded, report = fold_onnx_model(model, options)
    with progress("saving"):
        save_onnx(put_together(with_manifest(folded.parts, report.manifest)), output)
    return report


def _refuse_overwriting(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """A source must stay what it is: the manifest has its hash."""
    read = {path.resolve() for path in sources}
    for target in targets:
        if target.resolve() in read:
            raise UsageError(
                f"{target}: the folded model would overwrite its source", "give another name to -o"
            )


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
    parts, checks, warnings = _check(model, options)
    folded = fold_parts(parts)
    report = _report(
        model.path.stem,
        Source(model.path.name, hash_files(model.files)),
        {},
        _Outcome(checks, warnings, folded.folds, folded.affine_folds, folded.decisions),
        model.outputs,
        find_manifest(model.proto, model.path),
    )
    return folded, report


def _check(
    model: OnnxModel, options: FoldOptions
) -> tuple[Parts, tuple[EpsilonCheck, ...], tuple[Reason, ...]]:
    """Epsilons and statistics, before anything is folded.

    Returns:
        The model with its epsilons aligned, without what no output needs; the comparisons; warnings.
    """
    parts = remove_dead(take_apart(model.proto))
    graph = read_graph(parts).graph
    names = tuple(str(node) for node in graph.of_kind(Kind.BATCH_NORM))
    expected = resolve_expected(names, model.epsilon, options.epsilon, options.epsilon_config)
    checks = tuple(compare_epsilons(graph, expected, align=options.align_epsilon).values())
    differing = [check for check in checks if not check.matches]
    if differing and not options.align_epsilon:
        raise refusal("batch norm(s) have another epsilon than expected", list(map(mismatch, differing)))
    if differing:
        parts = set_epsilons(parts, {check.name: check.used for check in differing})
        graph = read_graph(parts).graph
    audit = audit_graph(graph)
    if audit.problems:
        raise refusal("problem(s) in the numbers of batch norms", audit.problems)
    return parts, checks, audit.warnings


# --- Relay -----------------------------------------------------------------------------------


def _fold_to_folder(path: Path, output: Path, options: FoldOptions, progress: Progress) -> FoldReport:
    if not output.is_dir() and (output.suffix or output.exists()):
        raise UsageError(
            f"-o {output}: wanted OUT.onnx or a folder", "a folder with a dot in its name must exist"
        )
    with progress("loading TVM"):
        from tvm_fuse.relay.load import load_model, model_files
        from tvm_fuse.relay.save import FILES, save_folder
    with progress("importing the model"):
        model = load_model(path, shapes=options.shapes, params=options.params)
    files = model_files(path, options.params)
    _refuse_overwriting(files, [output / name for name in FILES])
    source = Source(path.resolve().name, hash_files(files))
    earlier = read_folder(path) if (path / FILE_NAME).is_file() else None
    with progress("folding"):
        module, report = fold_relay_model(model, options, source, earlier)
    with progress("saving"):
        save_folder(module, to_json(report.manifest), output)
    return report


def fold_relay_model(
    model: RelayModel, options: FoldOptions, source: Source, earlier: Manifest | None = None
) -> tuple[Any, FoldReport]:
    """Check and fold a Relay module.

    Args:
        model: The model.
        options: See ``FoldOptions``.
        source: Where the model is from.
        earlier: The manifest of a model that was folded before.

    Returns:
        The folded module and what was done.

    Raises:
        ModelError, UsageError: As for ``fold_file``.
    """
    from tvm_fuse.relay.audit import check_model
    from tvm_fuse.relay.compat import find_tvm
    from tvm_fuse.relay.fold_pass import fold_batch_norms
    from tvm_fuse.relay.record import last_report

    checked = check_model(model, options.epsilon, options.epsilon_config, align=options.align_epsilon)
    module = fold_batch_norms(checked.module)
    norms, runs = last_report()["FoldBatchNorm"], last_report()["FoldScaleShift"]
    decisions = norms.decisions + runs.decisions
    report = _report(
        model.name,
        source,
        {"tvm": find_tvm().version},
        _Outcome(checked.epsilon, checked.warnings, norms.details, runs.details, decisions),
        model.outputs,
        earlier,
    )
    return module, report


# --- both ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """What folding came to, on either front end."""

    epsilon: tuple[EpsilonCheck, ...]
    warnings: tuple[Reason, ...]
    folds: tuple[FoldRecord, ...]
    scale_shifts: tuple[AffineRecord, ...]
    decisions: tuple[Decision, ...]

    @property
    def changed(self) -> bool:
        """Whether the model is another one now."""
        aligned = any(not check.matches for check in self.epsilon)
        return bool(self.folds or self.scale_shifts or aligned)


def _report(
    name: str,
    source: Source,
    versions: Mapping[str, str],
    outcome: _Outcome,
    outputs: tuple[str, ...],
    earlier: Manifest | None,
) -> FoldReport:
    """The report; a model that was folded before and stays as it is keeps its manifest."""
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
    if earlier is not None and not outcome.changed:
        manifest = earlier
    return FoldReport(
        name, outcome.epsilon, outcome.folds, left, outcome.scale_shifts, outcome.warnings, manifest
    )
