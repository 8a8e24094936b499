// The dtypes of a bundle's tensors: NumPy's names, sizes and single elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tvm_fuse {

struct Dtype {
  const char* name;   // as in bundle.json
  const char* descr;  // as in an npy header, on a little-endian machine
  const char* c_type; // as in a generated header
  size_t size_bytes;
  char kind;          // 'f', 'i', 'u' or 'b', as NumPy's
};

// Null when there is no such dtype.
const Dtype* find_dtype(const std::string& name);

// The float16 nearest to a number, ties to even, as its bits; and back.
uint16_t to_half(double value);
double from_half(uint16_t bits);

// Element `index` as float64; of int64 and uint64 beyond 2^53 the nearest.
double element(const Dtype& dtype, const uint8_t* data, size_t index);

}  // namespace tvm_fuse
