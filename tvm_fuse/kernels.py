"""The job of ``tvm-fuse kernels``: fold, fuse, generate CUDA C, compile it, and read what kernels use."""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.gpu import find_gpu
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.resources import KernelResources, read_resources
from tvm_fuse.cuda.source import choose_kernel, read_kernels
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.kernels import KernelBuild, build_kernels
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import is_cuda, resolve_target
from tvm_fuse.report import Kernel, KernelReport

__all__ = ["build_model", "report_kernels", "resolve_cuda", "show_source"]


def resolve_cuda(target: Any, compiler: str = "nvrtc") -> Any:
    """A CUDA target for which kernels can be compiled and judged, known before the work begins.

    Args:
        target: Such as ``"cuda -arch=sm_80"``, or a ``tvm.target.Target``.
        compiler: As `tvm_fuse.cuda.compile.compile_cuda` takes it.

    Returns:
        The ``tvm.target.Target``.

    Raises:
        UsageError: The target is not CUDA's, names no architecture, or one without known limits.
        MissingDependency: The compiler is not there.
        ToolFailed: The compiler does not know the architecture.
    """
    resolved = resolve_target(target)
    if not is_cuda(resolved):
        raise UsageError(f"target {str(target)!r} has no CUDA kernels", "give one such as 'cuda -arch=sm_80'")
    find_gpu(str(resolved.arch))
    compile_cuda("", str(resolved.arch), compiler=compiler)
    return resolved


def build_model(
    model: RelayModel, target: Any, progress: Progress = quietly, options: FuseOptions | None = None
) -> KernelBuild:
    """Fold, fuse and build a model for CUDA.

    Args:
        model: The model.
        target: What `resolve_cuda` returned.
        progress: Told of each step.
        options: See ``FuseOptions``.

    Returns:
        The build, with CUDA C and launches.
    """
    fused = fuse_model(model, target, options, progress)
    with progress("building the fused model"):
        return build_kernels(fused.module, target)


def report_kernels(name: str, build: KernelBuild, target: Any, compiler: str = "nvrtc") -> KernelReport:
    """Compile the kernels of a build and read what they use.

    Args:
        name: Name of the model.
        build: What `build_model` returned.
        target: The target of the build.
        compiler: As `tvm_fuse.cuda.compile.compile_cuda` takes it.

    Returns:
        The kernels that an inference calls, the worst first.
    """
    compiled = compile_cuda(build.artifact.cuda_source, str(target.arch), compiler=compiler)
    launches = [launch for launch in build.launches if build.calls[launch.symbol]]
    kernels = (
        _kernel(build, launch, resources)
        for launch, resources in zip(launches, read_resources(compiled, launches))
    )
    by_name = sorted(kernels, key=lambda kernel: kernel.launch.symbol)
    worst_first = sorted(by_name, key=lambda kernel: kernel.resources.badness, reverse=True)
    return KernelReport(
        name, str(target), compiled.arch, compiled.compiler, tuple(worst_first), build.computed
    )


def _kernel(build: KernelBuild, launch: Launch, resources: KernelResources) -> Kernel:
    choice, calls = build.choices.get(launch.symbol), build.calls[launch.symbol]
    if choice is None:
        return Kernel(launch, resources, calls)
    return Kernel(launch, resources, calls, choice.schedule.value, choice.reason)


def show_source(build: KernelBuild, name: str) -> str:
    """The CUDA C of one kernel, by its name or a part of it."""
    return choose_kernel(read_kernels(build.artifact.cuda_source), name).text
