// Outputs compared with golden ones by the rule of tvm_fuse/core/parity.py: an element passes when
// |got - reference| <= atol + rtol x |reference|, in float64; two NaN or two equal infinities are equal.
#pragma once

#include <string>
#include <vector>

#include "bundle.h"

namespace tvm_fuse {

struct ParityRow {
  std::string output;
  const Tensor* tensor;  // its shape and dtype
  Tolerance tolerance;
  size_t failing = 0;
  double max_abs = 0, max_rel = 0, mean_abs = 0;
  std::vector<size_t> worst_index;  // furthest outside, or nearest to, the tolerance
  double worst_got = 0, worst_reference = 0;
  double needed = 0;  // the factor on the tolerance with which the output would just pass
  double reference_max = 0;

  bool passed() const { return failing == 0; }
  // Whether an output of zeros would pass as well.
  bool proves_little() const { return tensor->elements > 0 && reference_max <= tolerance.atol; }
};

// Both have the tensor's size.
ParityRow compare(const Port& port, const Tensor& tensor, const std::vector<uint8_t>& reference,
                  const std::vector<uint8_t>& got);

}  // namespace tvm_fuse
