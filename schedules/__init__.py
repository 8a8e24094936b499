"""TE schedules of tvm-fuse, one file each: a short program over named block sizes.

Imports ``tvm.te``, ``tvm.topi`` and ``tvm_fuse.core`` only. ``tvm_fuse/relay/cpu_strategy.py`` (CPU) and
``cuda_strategy.py`` (CUDA) register them with Relay for targets that carry the key ``tvm_fuse`` or
``tvm_fuse_cuda``, so a plain target keeps TVM's own schedules.
"""
