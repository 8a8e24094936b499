// CUDA C++
