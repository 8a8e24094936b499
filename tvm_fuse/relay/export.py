"""A model as a bundle of CUDA kernels: fold, fuse, build without a driver, compile, and what to expect.

Weights are free inputs of the graph that is built, so that TVM cannot change them on the way; scalars
stay in the kernels. The golden outputs are the unfused model's, computed on this machine's CPU. A
bundle with drawn parameters has weights that no unfused model knows: its golden outputs come from the
graph before fusion with these weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse import __version__
from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import InternalError, ModelError, UsageError
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import Source, hash_files
from tvm_fuse.core.parity import Tolerance, ToleranceChoice, choose_tolerance
from tvm_fuse.cuda.bundle import Bundle, Draw, Image, Output, Port, Provenance, Tensor
from tvm_fuse.cuda.bundle_files import KERNELS_FILE, draw_parameters, measure_draw, save_bundle
from tvm_fuse.cuda.compile import compile_cuda, parse_arch
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.trace import TRACE_FILE, pack_trace
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import Runner, build_unfused
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.fuse import FusedModel, FuseOptions, fuse_model
from tvm_fuse.relay.graph_plan import GraphPlan, read_graph_plan
from tvm_fuse.relay.kernels import KernelBuild, build_kernels
from tvm_fuse.relay.load import RelayModel, load_model, model_files
from tvm_fuse.relay.partition_pass import dissolve_groups
from tvm_fuse.relay.save import lift_constants
from tvm_fuse.relay.target import is_cuda, resolve_target
from tvm_fuse.relay.trace import trace_operators

__all__ = [
    "ExportOptions",
    "compile_images",
    "export_file",
    "export_fused",
    "export_model",
    "export_module",
]


@dataclass(frozen=True)
class ExportOptions(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        archs: Architectures to compile for, beside the target's.
        is_seeded: Draw parameters like the model's from ``seed``, instead of shipping them.
        seed: Of the golden input, and of drawn parameters.
        tolerance: For every output; None takes the default of its dtype.
        is_traced: Also keep some elements of every operator's result (``cuda.trace``).
    """

    archs: tuple[str, ...] = ()
    is_seeded: bool = False
    seed: int = 0
    tolerance: ToleranceChoice = None
    is_traced: bool = False


def export_file(
    path: Path,
    folder: Path,
    target: Any,
    options: ExportOptions | None = None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    params: Path | None = None,
    progress: Progress = quietly,
) -> Bundle:
    """Export a model file as a bundle.

    Args:
        path: As for ``relay.load.load_model``.
        folder: Where the bundle goes; one that is there is replaced.
        target: ``cuda -arch=sm_80`` or the like.
        options: See ``ExportOptions``.
        shapes: Shapes for an ONNX model's dynamic inputs.
        params: Parameters of a Relay module.
        progress: Called around each step.

    Returns:
        The description of the bundle.

    Raises:
        UsageError: An argument is wrong, or the folder cannot be written.
        ModelError: The model cannot be read or folded, or needs more of the host than launches.
        MissingDependency: There is no NVRTC.
        ToolFailed: TVM or NVRTC failed.
    """
    target = _cuda_target(target)
    with progress("importing the model"):
        model = load_model(path, shapes=shapes or {}, params=params)
    source = Source(path.resolve().name, hash_files(model_files(path, params)))
    return export_model(model, source, folder, target, options, progress)


def export_model(
    model: RelayModel,
    source: Source,
    folder: Path,
    target: Any,
    options: ExportOptions | None = None,
    progress: Progress = quietly,
) -> Bundle:
    """Export a loaded model; see ``export_file``."""
    options = options or ExportOptions()
    target = _cuda_target(target)
    _check_archs(target, options)
    fused = fuse_model(model, target, options, progress)
    return export_fused(model, fused, source, folder, target, options, progress)


def export_fused(
    model: RelayModel,
    fused: FusedModel,
    source: Source,
    folder: Path,
    target: Any,
    options: ExportOptions,
    progress: Progress = quietly,
) -> Bundle:
    """Export what `fuse_model` made of a model for the same target; see ``export_file``."""
    return export_module(model, fused.module, fused.reference, source, folder, target, options, progress)


def export_module(
    model: RelayModel,
    module: Any,
    reference: Any,
    source: Source,
    folder: Path,
    target: Any,
    options: ExportOptions,
    progress: Progress = quietly,
    *,
    keep_scalars: bool = True,
) -> Bundle:
    """Export any form of a model that computes what it computes.

    Args:
        model: The model: its name, its inputs, the names of its outputs.
        module: What is built as it is: layouts decided, chains grouped or not.
        reference: Where the golden outputs come from, unless parameters are drawn.
        source: The model's files.
        folder: See ``export_file``.
        target: A ``tvm.target.Target`` for CUDA.
        options: See ``ExportOptions``.
        progress: Called around each step.
        keep_scalars: Leave scalars in the kernels; where operators are functions already that take them,
            they have to be parameters.

    Returns:
        The description of the bundle.

    Raises:
        TvmFuseError: As of ``export_file``.
    """
    archs = _check_archs(target, options)
    lifted, constants = lift_constants(module, prefix="w", keep_scalars=keep_scalars)
    with progress("generating kernels"):
        build = build_kernels(lifted, target)
        plan = read_graph_plan(build)
    parameters = _collect_parameters(build, plan, constants)
    draws: tuple[Draw, ...] = ()
    if options.is_seeded:
        draws = tuple(_measure_draw(name, array) for name, array in parameters.items())
        parameters = _draw(plan, parameters, draws, options.seed)
        reference = _with_parameters(lifted, parameters)
    with progress("compiling kernels"):
        images, files, compiler = compile_images(build.artifact.cuda_source, archs)
    inputs = make_inputs(model.inputs, options.seed)
    with progress("computing the golden outputs"):
        outputs: dict[str, Array] = {}
        if options.is_traced:
            outputs, probes = trace_operators(lifted, build, target, parameters, inputs, model.outputs)
            files[TRACE_FILE] = pack_trace(probes)
        if not (options.is_traced and options.is_seeded):  # with drawn parameters, both are the same graph
            outputs = _run_unfused(reference, inputs, model.outputs)
    bundle = Bundle(
        model=model.name,
        provenance=Provenance(source, _versions(compiler), str(target)),
        inputs=tuple(Port(name, plan.arguments[name]) for name in inputs if name in plan.arguments),
        outputs=_make_outputs(plan, model.outputs, options, outputs),
        parameters=tuple(Port(name, plan.arguments[name]) for name in parameters),
        seed=options.seed,
        draws=draws,
        operators=plan.operators,
        kernels=_used_kernels(build, plan),
        tensors=plan.tensors,
        storages=plan.storages,
        workspaces=plan.workspaces,
        images=images,
    )
    with progress("writing the bundle"):
        return save_bundle(folder, bundle, files, parameters, (inputs, outputs))


def _cuda_target(target: Any) -> Any:
    target = resolve_target(target)
    if not is_cuda(target):
        raise UsageError(
            f"a bundle holds CUDA kernels; the target is {target.kind.name}", "--target 'cuda -arch=sm_80'"
        )
    return target


def _check_archs(target: Any, options: ExportOptions) -> tuple[str, ...]:
    """The target's architecture and the others, each once."""
    archs = tuple(dict.fromkeys([str(target.arch), *options.archs]))
    for arch in archs:
        parse_arch(arch)
    return archs


def _versions(compiler: str) -> dict[str, str]:
    return {
        "tvm-fuse": __version__,
        "tvm": find_tvm().version,
        "numpy": np.__version__,
        "compiler": compiler,
    }


# --- kernels and graph -----------------------------------------------------------------------


def compile_images(source: str, archs: Iterable[str]) -> tuple[tuple[Image, ...], dict[str, bytes], str]:
    """Compile CUDA C: a cubin for each architecture, and PTX of the lowest for all others.

    Args:
        source: CUDA C.
        archs: Architectures, at least one.

    Returns:
        The images; file name -> contents, the source among them; the compiler.

    Raises:
        MissingDependency: There is no NVRTC.
        ToolFailed: The source does not compile.
    """
    compiled = {arch: compile_cuda(source, arch) for arch in archs}
    lowest = min(compiled, key=parse_arch)
    files = {KERNELS_FILE: source.encode()}
    images = []
    for arch, module in compiled.items():
        forms = {"cubin": module.cubin, "ptx": module.ptx.encode() if arch == lowest else b""}
        for form, data in forms.items():
            if data:
                images.append(Image(arch, form, f"kernels.{arch}.{form}"))
                files[images[-1].file] = data
    return tuple(images), files, compiled[lowest].compiler


def _used_kernels(build: KernelBuild, plan: GraphPlan) -> tuple[Launch, ...]:
    """The kernels that the graph launches, in the order of their first use."""
    launches = {launch.symbol: launch for launch in build.launches}
    used = dict.fromkeys(call.symbol for operator in plan.operators for call in operator.calls)
    return tuple(launches[symbol] for symbol in used)


def _make_outputs(
    plan: GraphPlan, names: tuple[str, ...], options: ExportOptions, golden: Mapping[str, Array]
) -> tuple[Output, ...]:
    if len(names) != len(plan.outputs):
        raise InternalError(f"the model has {len(names)} outputs, its build {len(plan.outputs)}")
    return tuple(
        Output(name, tensor, _choose_tolerance(options, plan.tensors[tensor].dtype, golden[name]))
        for name, tensor in zip(names, plan.outputs)
    )


def _choose_tolerance(options: ExportOptions, dtype: str, golden: Array) -> Tolerance:
    """The default is for outputs of about 1; those of drawn weights may be of any size."""
    tolerance = choose_tolerance(options.tolerance, dtype)
    largest = float(np.abs(golden.astype(np.float64)).max(initial=0.0))
    if not options.is_seeded or options.tolerance is not None or not 1.0 < largest < np.inf:
        return tolerance
    why = f"{tolerance.why}; atol x {largest:.3g}, the largest output of drawn weights"
    return Tolerance(tolerance.atol * largest, tolerance.rtol, why)


# --- parameters and golden outputs -----------------------------------------------------------


def _collect_parameters(
    build: KernelBuild, plan: GraphPlan, constants: Mapping[str, Any]
) -> dict[str, Array]:
    """Every parameter of the graph by name: the model's constants, and what TVM made of its own."""
    made = build.artifact.library.get_params()
    if made.keys() & constants.keys():
        raise InternalError(f"TVM has constants called {sorted(made.keys() & constants.keys())}")
    values = {**constants, **made}
    return {name: values[name].numpy() for name in plan.arguments if name in values}


def _measure_draw(name: str, array: Array) -> Draw:
    try:
        return measure_draw(array)
    except ValueError as error:
        raise ModelError(
            f"parameters cannot be drawn like {name}: it has numbers that are {error}",
            "export the model with its own parameters",
        ) from error


def _draw(
    plan: GraphPlan, parameters: Mapping[str, Array], draws: Iterable[Draw], seed: int
) -> dict[str, Array]:
    specs: list[Tensor] = [plan.tensors[plan.arguments[name]] for name in parameters]
    return dict(zip(parameters, draw_parameters(specs, draws, seed)))


def _with_parameters(lifted: Any, parameters: Mapping[str, Array]) -> Any:
    """The graph before fusion, in its final layouts, with other weights."""
    names = {str(param.name_hint) for param in lifted["main"].params}
    unknown = [name for name in parameters if name not in names]
    if unknown:
        raise ModelError(
            f"parameters cannot be drawn: TVM made {', '.join(unknown)} while it built the model",
            "export the model with its own parameters",
        )
    module = relay.transform.InferType()(dissolve_groups(lifted))
    values = {name: tvm.nd.array(array) for name, array in parameters.items()}
    module["main"] = relay.build_module.bind_params_by_name(module["main"], values)
    return relay.transform.InferType()(module)


def _run_unfused(reference: Any, inputs: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
    target = resolve_target("llvm")
    runner = Runner(build_unfused(reference, target), target)
    used = {str(param.name_hint) for param in reference["main"].params}
    return runner.run({name: array for name, array in inputs.items() if name in used}, names)
