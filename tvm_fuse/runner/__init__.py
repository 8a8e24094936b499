"""Runs bundles of CUDA kernels with NumPy and the CUDA driver alone: ``python -m tvm_fuse.runner BUNDLE``."""
