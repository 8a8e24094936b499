// Parameters from a seed, bit for bit those of tvm_fuse/cuda/bundle_files.py: numpy.random.RandomState, whose
// stream NumPy froze (NEP 19), on MT19937.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "bundle.h"

namespace tvm_fuse {

class Stream {
 public:
  explicit Stream(uint32_t seed) : random_(seed) {}

  // The next parameter: floating ones normal, clipped to their range; others uniform in it.
  std::vector<uint8_t> draw(const Tensor& tensor, const Draw& how);

 private:
  double uniform();
  double normal();
  uint64_t bounded(uint64_t range);

  std::mt19937 random_;
  bool has_spare_ = false;
  double spare_ = 0;
};

}  // namespace tvm_fuse
