"""How ``relay.build`` turns CUDA C into something to load: not by TVM's call of nvcc.

TVM calls the global function ``tvm_callback_cuda_postproc`` with the source of all kernels, and
``tvm_callback_cuda_compile`` with what it returns; a result of that which starts with "/" is PTX, any other
a cubin. Inside `cuda_compilation` both are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.source import keep_registers, sort_kernels
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.target import has_cuda_device, is_cuda

__all__ = ["cuda_compilation"]

_CALLBACK = "tvm_callback_cuda_compile"
_POSTPROCESS = "tvm_callback_cuda_postproc"

#: What stands for the code where nothing could run it. It is stored with the library as PTX would be.
_NOT_COMPILED = "// not compiled: no GPU on the building machine"


@contextmanager
def cuda_compilation(target: Any) -> Iterator[None]:
    """Lets ``relay.build`` compile CUDA kernels with NVRTC, or not at all where no GPU is visible.

    Args:
        target: The target of the build; any other than CUDA's changes nothing.

    Yields:
        Nothing; afterwards TVM's own functions are back.
    """
    if not is_cuda(target):
        yield
        return
    ours = {_CALLBACK: _compile if has_cuda_device() else _keep_source, _POSTPROCESS: _postprocess}
    before = {name: tvm.get_global_func(name, allow_missing=True) for name in ours}
    for name, function in ours.items():
        tvm.register_func(name, function, override=True)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is not None:
                tvm.register_func(name, function, override=True)
            else:
                tvm._ffi.registry.remove_global_func(name)


def _postprocess(source: str, target: Any) -> str:
    return sort_kernels(keep_registers(source))


def _compile(source: str, target: Any) -> bytearray | str:
    compiled = compile_cuda(source, str(target.arch))
    return bytearray(compiled.cubin) if compiled.cubin else compiled.ptx


def _keep_source(source: str, target: Any) -> str:
    return _NOT_COMPILED
