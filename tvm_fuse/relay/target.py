"""Target strings: this machine's CPU with its real features, or CUDA with a stated arch."""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.core.errors import MissingDependency, UsageError
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.cpu_layout import register_cpu_layouts
from tvm_fuse.relay.cpu_strategy import register_cpu_schedules
from tvm_fuse.relay.cpu_target import TARGET_KEY
from tvm_fuse.relay.cuda_strategy import CUDA_KEY, register_cuda_schedules

__all__ = ["cuda_device_name", "has_cuda_device", "is_cuda", "resolve_target"]

#: What TVM takes where no arch is given and no GPU is visible: Maxwell, of 2014.
_TVM_DEFAULT_ARCH = "sm_50"

_CUDA_HINT = "add the GPU's: -arch=sm_75|sm_80|sm_86|sm_89|sm_90 (T4, A100, RTX 30, RTX 40, H100 and H200)"


def resolve_target(target: Any = None) -> Any:
    """Turn a user's target into a ``tvm.target.Target`` with a host.

    Args:
        target: None or ``"llvm"`` (this machine's CPU), ``"cuda -arch=sm_80"``, ``"cuda"`` (the
            visible GPU), any TVM target string, or a ``Target``.

    Returns:
        The target.

    Raises:
        UsageError: TVM does not know the target, or it is CUDA's without an arch and no GPU is visible.
        MissingDependency: This TVM was built without the target's code generator.
    """
    text = str(target or "llvm").strip()
    is_object = isinstance(target, tvm.target.Target)
    if not is_object:
        target = _parse(_complete(text), text)
    is_stated = not is_object and _TVM_DEFAULT_ARCH in text
    if is_cuda(target) and target.arch == _TVM_DEFAULT_ARCH and not is_stated and not has_cuda_device():
        raise _missing_arch(text)
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
        register_cpu_schedules()
        register_cpu_layouts()
        return f"{text} -keys={TARGET_KEY},cpu"
    if text.split()[:1] == ["cuda"] and "-arch" not in text:
        if not has_cuda_device():
            raise _missing_arch(text)
        text = f"{text} -arch={_visible_arch()}"
    if text.split()[:1] == ["cuda"] and "-keys=" not in text:
        register_cuda_schedules()
        return f"{text} -keys={CUDA_KEY},cuda,gpu"
    return text


def _missing_arch(target: str) -> UsageError:
    return UsageError(
        f"target {target!r}: no GPU architecture is named, and no GPU is visible; "
        f"TVM would take {_TVM_DEFAULT_ARCH}",
        _CUDA_HINT,
    )


def _parse(completed: str, asked: str) -> Any:
    try:
        return tvm.target.Target(completed)
    except (ValueError, TypeError, tvm.TVMError) as error:
        detail = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"unknown target {asked!r}: {detail}",
            "examples: llvm, 'llvm -mcpu=haswell', 'cuda -arch=sm_86'",
        ) from error


def is_cuda(target: Any) -> bool:
    """Whether the target generates CUDA kernels."""
    return bool(target.kind.name == "cuda")


def has_cuda_device(ordinal: int = 0) -> bool:
    """Whether TVM's runtime sees a GPU of this number."""
    return bool(tvm.cuda(ordinal).exist)


def cuda_device_name(ordinal: int = 0) -> str:
    """What a GPU that TVM's runtime sees calls itself."""
    return str(tvm.cuda(ordinal).device_name)


def _visible_arch() -> str:
    return "sm_" + str(tvm.cuda(0).compute_version).replace(".", "")
