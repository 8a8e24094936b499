"""Target strings: this machine's CPU with its real features, or CUDA with a stated arch."""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.core.errors import MissingDependency, UsageError
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.strategy import TARGET_KEY, register_schedules

__all__ = ["DEFAULT_CUDA_ARCH", "has_cuda_device", "is_cuda", "resolve_target"]

#: The arch of ``--target cuda`` where no GPU says otherwise: A100. Stated in the report.
DEFAULT_CUDA_ARCH = "sm_80"


def resolve_target(target: Any = None) -> Any:
    """Turn a user's target into a ``tvm.target.Target`` with a host.

    Args:
        target: None or ``"llvm"`` (this machine's CPU), ``"cuda"`` (the visible GPU's arch, else
            ``DEFAULT_CUDA_ARCH``), any TVM target string, or a ``Target``.

    Returns:
        The target.

    Raises:
        UsageError: TVM does not know the target.
        MissingDependency: This TVM was built without the target's code generator.
    """
    if not isinstance(target, tvm.target.Target):
        text = str(target or "llvm").strip()
        target = _parse(_complete(text), text)
    kind = target.kind.name
    if tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is None:
        raise MissingDependency(
            f"this TVM cannot generate code for target kind {kind!r}",
            "`tvm-fuse doctor` tells what the TVM in use can generate",
        )
    if target.host is None and kind != "llvm":
        target = tvm.target.Target(target, host=_parse(_complete("llvm"), "llvm"))
    return target


def _complete(text: str) -> str:
    """Fill in what the short forms leave out."""
    if text == "llvm":
        text = f"llvm -mcpu={detect_cpu()}"
    if text.split()[:1] == ["llvm"] and "-keys=" not in text:
        register_schedules()
        return f"{text} -keys={TARGET_KEY},cpu"
    if text == "cuda":
        return f"cuda -arch={_visible_arch() or DEFAULT_CUDA_ARCH}"
    return text


def _parse(completed: str, asked: str) -> Any:
    try:
        return tvm.target.Target(completed)
    except (ValueError, TypeError, tvm.TVMError) as error:
        detail = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"unknown target {asked!r}: {detail}",
            "examples: llvm, 'llvm -mcpu=haswell', cuda, 'cuda -arch=sm_86'",
        ) from error


def is_cuda(target: Any) -> bool:
    """Whether the target generates CUDA kernels."""
    return bool(target.kind.name == "cuda")


def has_cuda_device() -> bool:
    """Whether TVM's runtime sees a GPU."""
    return bool(tvm.cuda(0).exist)


def _visible_arch() -> str | None:
    if not has_cuda_device():
        return None
    return "sm_" + str(tvm.cuda(0).compute_version).replace(".", "")
