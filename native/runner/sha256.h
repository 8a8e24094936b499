// SHA-256 (FIPS 180-4), so that no cryptographic library has to be there to notice a damaged copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tvm_fuse {

// 64 hexadecimal digits.
std::string sha256(const uint8_t* data, size_t size);

}  // namespace tvm_fuse
