"""The commands. Each gets the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm_fuse.cli.options import to_mapping
from tvm_fuse.cli.progress import show_progress
from tvm_fuse.cli.steering import check_folder, check_gates, read_epsilons, read_records, read_steering
from tvm_fuse.core.errors import MissingDependency, ParityFailed, ToolFailed, UsageError
from tvm_fuse.core.parity import GivenTolerance

__all__ = ["run_doctor", "run_export", "run_fold", "run_kernels", "run_manifest", "run_run", "run_verify"]


def run_doctor(args: argparse.Namespace) -> int:
    """Print what is installed; exit code 4 when something needed is missing."""
    from tvm_fuse.doctor import Status, diagnose, render

    checks = diagnose()
    print(render(checks))
    return MissingDependency.exit_code if any(check.status is Status.MISSING for check in checks) else 0


def run_run(args: argparse.Namespace) -> int:
    """The main job on one model file."""
    shapes = to_mapping(args.shape, "--shape")
    epsilons = read_epsilons(args)
    steering = read_steering(args)
    if args.output is not None:
        check_folder(args.output)
    with show_progress("loading TVM"):
        from tvm_fuse import pipeline
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.render import render
        from tvm_fuse.report import to_json
    options = pipeline.Options(
        tolerance=_tolerance(args),
        seed=args.seed,
        latency=not args.no_latency,
        device=args.device,
        checked=args.checked,
        **epsilons,
        **steering.options,
        **read_records(args),
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=shapes, params=args.params)
    compiled = pipeline.compile_model(model, args.target, options, show_progress)
    document = to_json(compiled.report)
    people = sys.stderr if args.json else sys.stdout
    print(render(compiled.report), file=people)
    if args.json:
        print(document)
    output = args.output
    if output is None and compiled.cuda_source and not _is_compiled(compiled):
        output = Path(f"{args.model.stem}-cuda")
    if output is not None:
        for file in _save(compiled, document, output):
            print(f"wrote {file}", file=people)
    parity = compiled.report.parity
    if parity is not None and not parity.passed:
        return ParityFailed.exit_code
    check_gates(steering, compiled.report.fused_layers, compiled.report.not_fused, compiled.plan)
    return 0


def run_kernels(args: argparse.Namespace) -> int:
    """Show what each CUDA kernel uses, or the source of one."""
    shapes = to_mapping(args.shape, "--shape")
    steering = read_steering(args)
    with show_progress("loading TVM"):
        from tvm_fuse import kernels
        from tvm_fuse.relay.fuse import FuseOptions
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.render import render_kernels
        from tvm_fuse.report import to_json
    target = kernels.resolve_cuda(args.target, args.compiler)
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=shapes, params=args.params)
    build = kernels.build_model(model, target, show_progress, FuseOptions(**steering.options))
    if args.source is not None:
        print(kernels.show_source(build, args.source))
        return 0
    with show_progress("compiling the kernels"):
        report = kernels.report_kernels(model.name, build, target, args.compiler)
    print(to_json(report) if args.json else render_kernels(report))
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write a model as a bundle of CUDA kernels."""
    shapes = to_mapping(args.shape, "--shape")
    epsilons = read_epsilons(args)
    steering = read_steering(args)
    check_folder(args.output, "-o")
    with show_progress("loading TVM"):
        from tvm_fuse.cuda.bundle_text import render_bundle
        from tvm_fuse.relay.export import ExportOptions, export_file
    options = ExportOptions(
        archs=tuple(args.arch),
        is_seeded=args.seeded,
        seed=args.seed,
        tolerance=_tolerance(args),
        **epsilons,
        **steering.options,
    )
    arguments = args.model, args.output, args.target, options
    bundle = export_file(*arguments, shapes=shapes, params=args.params, progress=show_progress)
    print(render_bundle(bundle))
    print(f"wrote {args.output}")
    return 0


def run_fold(args: argparse.Namespace) -> int:
    """Fold a model and save it."""
    from tvm_fuse.folding import FoldOptions, fold_file
    from tvm_fuse.render import render_fold
    from tvm_fuse.report import to_json

    options = FoldOptions(
        shapes=to_mapping(args.shape, "--shape"),
        params=args.params,
        **read_epsilons(args),
    )
    report = fold_file(args.model, args.output, options, show_progress)
    people = sys.stderr if args.json else sys.stdout
    print(render_fold(report), file=people)
    if args.json:
        print(to_json(report))
    print(f"wrote {args.output}", file=people)
    return 0


def run_manifest(args: argparse.Namespace) -> int:
    """Show what was folded into a saved model."""
    from tvm_fuse.core.manifest import to_json
    from tvm_fuse.render import render_manifest
    from tvm_fuse.verify import read_manifest

    manifest = read_manifest(args.model)
    print(to_json(manifest) if args.json else render_manifest(manifest))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Check a folded model against its source; exit code 1 when something does not hold."""
    from tvm_fuse.render import render_verification
    from tvm_fuse.report import to_json
    from tvm_fuse.verify import verify

    with show_progress("verifying"):
        outcome = verify(
            args.folded,
            args.source,
            shapes=to_mapping(args.shape, "--shape"),
            params=args.params,
            tolerance=_tolerance(args),
            seed=args.seed,
        )
    print(to_json(outcome) if args.json else render_verification(outcome))
    return 0 if outcome.passed else ParityFailed.exit_code


def _tolerance(args: argparse.Namespace) -> GivenTolerance:
    return GivenTolerance(args.atol, args.rtol)


def _is_compiled(compiled: Any) -> bool:
    """Whether the library can run: CUDA kernels are only source where no GPU is visible."""
    from tvm_fuse.relay.target import has_cuda_device

    return not compiled.cuda_source or has_cuda_device()


def _save(compiled: Any, document: str, folder: Path) -> list[Path]:
    """Write the results: all files, each complete, or none."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            files = _write_all(compiled, document, Path(scratch))
            return [file.replace(folder / file.name) for file in files]
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        if is_new:
            with suppress(OSError):  # it has files in it: all went well
                folder.rmdir()


def _write_all(compiled: Any, document: str, folder: Path) -> list[Path]:
    files = [folder / "report.json"]
    files[0].write_text(document + "\n", encoding="utf-8")
    if compiled.cuda_source:
        files.append(folder / "kernels.cu")
        files[-1].write_text(compiled.cuda_source, encoding="utf-8")
    if _is_compiled(compiled):
        files.append(folder / "model.so")
        with show_progress("linking the library"):
            _link(compiled.library, files[-1])
    return files


def _link(library: Any, file: Path) -> None:
    try:
        library.export_library(str(file))
    except (TypeError, FileNotFoundError) as error:  # TVM runs what it found, be it None
        raise MissingDependency(
            f"{file.name} cannot be linked: there is no C++ compiler", "install g++ or clang++"
        ) from error
    except RuntimeError as error:
        raise ToolFailed(
            f"{file.name} cannot be linked: {str(error).strip()}", "`tvm-fuse doctor` names the compiler"
        ) from error
