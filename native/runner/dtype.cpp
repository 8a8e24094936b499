#include "dtype.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace tvm_fuse {
namespace {

constexpr Dtype kDtypes[] = {
    {"bool", "|b1", "bool", 1, 'b'},         {"float16", "<f2", "uint16_t", 2, 'f'},
    {"float32", "<f4", "float", 4, 'f'},     {"float64", "<f8", "double", 8, 'f'},
    {"int8", "|i1", "int8_t", 1, 'i'},       {"int16", "<i2", "int16_t", 2, 'i'},
    {"int32", "<i4", "int32_t", 4, 'i'},     {"int64", "<i8", "int64_t", 8, 'i'},
    {"uint8", "|u1", "uint8_t", 1, 'u'},     {"uint16", "<u2", "uint16_t", 2, 'u'},
    {"uint32", "<u4", "uint32_t", 4, 'u'},   {"uint64", "<u8", "uint64_t", 8, 'u'},
};

template <class T>
T read(const uint8_t* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

template <class Signed, class Unsigned>
double read_integer(const Dtype& dtype, const uint8_t* data, size_t index) {
  return dtype.kind == 'i' ? static_cast<double>(read<Signed>(data, index))
                           : static_cast<double>(read<Unsigned>(data, index));
}

}  // namespace

const Dtype* find_dtype(const std::string& name) {
  for (const Dtype& dtype : kDtypes)
    if (name == dtype.name) return &dtype;
  return nullptr;
}

uint16_t to_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;  // halfway to 2^16 rounds to infinity
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);  // size = 0.1... x 2^exponent
  const int step = (exponent < -13 ? -13 : exponent) - 11;  // of the last of 11 bits; subnormals share one
  const double rounded = std::nearbyint(std::ldexp(size, -step));
  // The implicit bit adds one to the exponent field, and so does a carry out of the fraction.
  const int field = exponent < -13 ? 0 : exponent + 13;
  return static_cast<uint16_t>(sign + (field << 10) + static_cast<int>(rounded));
}

double from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size;
  if (exponent == 31) {
    size = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else {
    size = std::ldexp(exponent == 0 ? fraction : fraction + 1024, (exponent == 0 ? 1 : exponent) - 25);
  }
  return bits & 0x8000 ? -size : size;
}

double element(const Dtype& dtype, const uint8_t* data, size_t index) {
  if (dtype.kind == 'b') return data[index] != 0;
  if (dtype.kind == 'f') {
    if (dtype.size_bytes == 2) return from_half(read<uint16_t>(data, index));
    return dtype.size_bytes == 4 ? read<float>(data, index) : read<double>(data, index);
  }
  switch (dtype.size_bytes) {
    case 1: return read_integer<int8_t, uint8_t>(dtype, data, index);
    case 2: return read_integer<int16_t, uint16_t>(dtype, data, index);
    case 4: return read_integer<int32_t, uint32_t>(dtype, data, index);
    default: return read_integer<int64_t, uint64_t>(dtype, data, index);
  }
}

}  // namespace tvm_fuse
