#include "parity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tvm_fuse {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Equal non-finite pairs differ by 0, others by infinity. float64 holds no integer beyond 2^53 exactly, so a
// difference that it loses counts as 1.
double difference_of(double reference, double got, bool same) {
  if (same || (std::isnan(reference) && std::isnan(got))) return 0;
  if (!std::isfinite(reference) || !std::isfinite(got)) return kInfinity;
  const double difference = std::fabs(reference - got);
  return difference == 0 ? 1 : difference;
}

// difference / scale where that is a number.
double ratio(double difference, double scale, double otherwise) {
  return scale > 0 && std::isfinite(difference) ? difference / scale : otherwise;
}

std::vector<size_t> unravel(size_t flat, const std::vector<int64_t>& shape) {
  std::vector<size_t> index(shape.size());
  for (size_t axis = shape.size(); axis-- > 0; flat /= static_cast<size_t>(shape[axis]))
    index[axis] = flat % static_cast<size_t>(shape[axis]);
  return index;
}

}  // namespace

ParityRow compare(const Port& port, const Tensor& tensor, const std::vector<uint8_t>& reference,
                  const std::vector<uint8_t>& got) {
  ParityRow row;
  row.output = port.name;
  row.tensor = &tensor;
  row.tolerance = port.tolerance;
  size_t worst = 0;
  double sum = 0, worst_excess = -1;
  for (size_t i = 0; i < tensor.elements; ++i) {
    const size_t item = tensor.dtype->size_bytes;
    const double ref = element(*tensor.dtype, reference.data(), i), value = element(*tensor.dtype, got.data(), i);
    const bool is_exact = tensor.dtype->kind != 'f';
    const bool same =
        is_exact ? std::memcmp(reference.data() + i * item, got.data() + i * item, item) == 0 : ref == value;
    const double difference = difference_of(ref, value, same);
    const double magnitude = std::isfinite(ref) ? std::fabs(ref) : 0;
    const double allowed = port.tolerance.atol + port.tolerance.rtol * magnitude;
    const double excess = ratio(difference, allowed, difference > 0 ? kInfinity : 0);
    row.failing += difference > allowed || std::isinf(difference);
    row.max_abs = std::max(row.max_abs, difference);
    row.max_rel = std::max(row.max_rel, ratio(difference, magnitude, std::isinf(difference) ? kInfinity : 0));
    row.reference_max = std::max(row.reference_max, std::fabs(ref));
    row.needed = std::max(row.needed, excess);
    sum += difference;
    if (excess <= worst_excess) continue;
    worst_excess = excess;
    worst = i;
    row.worst_got = value;
    row.worst_reference = ref;
  }
  if (tensor.elements == 0) return row;
  row.mean_abs = sum / static_cast<double>(tensor.elements);
  row.worst_index = unravel(worst, tensor.shape);
  return row;
}

}  // namespace tvm_fuse
