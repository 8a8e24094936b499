"""The forms of a model that are compared, each as a bundle with drawn weights and a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvm_fuse.core.manifest import Source, hash_files
from tvm_fuse.cuda.bundle import Bundle
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.constant_pass import fold_all_constants, fold_constants
from tvm_fuse.relay.export import ExportOptions, export_module
from tvm_fuse.relay.fuse import fuse_model
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import resolve_target

__all__ = ["export_forms"]


def export_forms(
    model: RelayModel, file: Path, folder: Path, archs: tuple[str, ...], forms: tuple[str, ...]
) -> Iterator[tuple[str, Bundle]]:
    """Export a model in several forms.

    Args:
        model: The model.
        file: What it was loaded from.
        folder: Each bundle gets a folder in it, named after the form.
        archs: Architectures; the first is the target's.
        forms: Some of ``fused``, ``unfused`` and ``topi``.

    Yields:
        Form and bundle, once it is written.
    """
    ours, theirs = (resolve_target(f"cuda{keys} -arch={archs[0]}") for keys in ("", " -keys=cuda,gpu"))
    source = Source(file.name, hash_files([file]))
    options = ExportOptions(archs=archs, is_seeded=True, is_traced=True)
    for form in forms:
        target = theirs if form == "topi" else ours
        module = _BUILDERS[form](model, target)
        yield (
            form,
            export_module(
                model, module, model.module, source, folder / form, target, options,
                keep_scalars=form != "unfused",
            ),
        )  # fmt: skip


def _fused(model: RelayModel, target: Any) -> Any:
    return fuse_model(model, target).module


def _unfused(model: RelayModel, target: Any) -> Any:
    """Every operator a primitive function: nothing is folded, and a build fuses nothing."""
    with target, tvm.transform.PassContext(opt_level=0):
        module = relay.transform.SimplifyInference()(relay.transform.InferType()(model.module))
        return relay.transform.InferType()(relay.transform.FuseOps(0)(module))


def _topi(model: RelayModel, target: Any) -> Any:
    """What ``relay.build`` does before it fuses, all of it; constants are computed in NumPy, not in LLVM."""
    prefix = tvm.get_global_func("relay.backend.GetPassPrefixSeq")(True, False)
    module = fold_constants(model.module)
    with target, tvm.transform.PassContext(opt_level=3, disabled_pass=["FoldConstant"]):
        module = prefix(module)
    return fold_all_constants(module)


_BUILDERS = {"fused": _fused, "unfused": _unfused, "topi": _topi}
