#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"

namespace tvm_fuse {
namespace {

template <class T>
void put(std::vector<uint8_t>& to, size_t index, T value) {
  std::memcpy(to.data() + index * sizeof(T), &value, sizeof(T));
}

void put_real(const Dtype& dtype, std::vector<uint8_t>& to, size_t index, double value) {
  if (dtype.size_bytes == 2) return put(to, index, to_half(value));
  if (dtype.size_bytes == 4) return put(to, index, static_cast<float>(value));
  put(to, index, value);
}

void put_integer(const Dtype& dtype, std::vector<uint8_t>& to, size_t index, int64_t value) {
  if (dtype.kind == 'b') return put<uint8_t>(to, index, value != 0);
  std::memcpy(to.data() + index * dtype.size_bytes, &value, dtype.size_bytes);  // the low bytes, as astype
}

}  // namespace

// 53 bits: random_double of NumPy's mt19937.h.
double Stream::uniform() {
  const uint32_t high = random_() >> 5, low = random_() >> 6;
  return (high * 67108864.0 + low) / 9007199254740992.0;
}

// The polar method, which makes two at a time: legacy_gauss of NumPy's legacy-distributions.c.
double Stream::normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  double x1, x2, r2;
  do {
    x1 = 2.0 * uniform() - 1.0;
    x2 = 2.0 * uniform() - 1.0;
    r2 = x1 * x1 + x2 * x2;
  } while (r2 >= 1.0 || r2 == 0.0);
  const double factor = std::sqrt(-2.0 * std::log(r2) / r2);
  spare_ = factor * x1;
  has_spare_ = true;
  return factor * x2;
}

// From 0 to `range`, by masks and rejection: random_bounded_uint64_fill of NumPy's distributions.c.
uint64_t Stream::bounded(uint64_t range) {
  uint64_t mask = range;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  if (range == 0) return 0;
  uint64_t drawn;
  do {
    if (range <= 0xffffffff) {
      drawn = random_() & mask;
    } else {
      const uint64_t high = random_();
      drawn = (high << 32 | random_()) & mask;
    }
  } while (drawn > range);
  return drawn;
}

std::vector<uint8_t> Stream::draw(const Tensor& tensor, const Draw& how) {
  std::vector<uint8_t> made(tensor.size_bytes());
  if (tensor.dtype->kind == 'f') {
    for (size_t i = 0; i < tensor.elements; ++i) {
      const double drawn = how.mean + how.deviation * normal();
      put_real(*tensor.dtype, made, i, std::min(std::max(drawn, how.minimum), how.maximum));
    }
    return made;
  }
  constexpr double kLimit = 9e18;  // inside int64
  if (!(how.minimum >= -kLimit && how.minimum <= how.maximum && how.maximum <= kLimit))
    throw damaged("a parameter is drawn from " + std::to_string(how.minimum) + " to " + std::to_string(how.maximum));
  const int64_t least = static_cast<int64_t>(how.minimum), most = static_cast<int64_t>(how.maximum);
  const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
  for (size_t i = 0; i < tensor.elements; ++i)
    put_integer(*tensor.dtype, made, i, static_cast<int64_t>(static_cast<uint64_t>(least) + bounded(range)));
  return made;
}

}  // namespace tvm_fuse
