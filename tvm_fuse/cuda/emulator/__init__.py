"""CUDA kernels on the CPU: compiled as C++, with a fiber for each thread of a block.

It is slow beside a GPU and needs none. What it gives is the values, and what a GPU does not tell:
which thread reads out of bounds, reads what nothing wrote, or races.
"""

from tvm_fuse.cuda.emulator.driver import build_driver
from tvm_fuse.cuda.emulator.module import EmulatedModule, KernelFault, build_emulator
from tvm_fuse.cuda.emulator.translate import EmulatedKernel

__all__ = ["EmulatedKernel", "EmulatedModule", "KernelFault", "build_driver", "build_emulator"]
