// Arrays of an npz file as numpy.savez writes it: a ZIP archive (PKWARE APPNOTE 6.3.10) of stored npy files
// (NEP 1). Checksums of members are not looked at: the SHA-256 of the whole file is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bundle.h"

namespace tvm_fuse {

struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

class Npz {
 public:
  // The bytes must outlive this object. Throws Error (kBundle); `where` is named in messages.
  Npz(Bytes file, std::string where);

  // The elements of array `key`, which must have the tensor's shape and dtype, in C order.
  std::vector<uint8_t> read(const std::string& key, const std::string& port, const Tensor& tensor) const;

 private:
  std::string where_;
  std::map<std::string, Bytes> members_;  // by name, such as p0.npy
};

}  // namespace tvm_fuse
