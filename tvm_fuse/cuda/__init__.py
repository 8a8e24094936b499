"""CUDA kernels without TVM: compiling them, and reading what they use."""
