// What the code of an embedded network (embed_main.cpp generates it) calls.
#pragma once

#include <cstddef>
#include <mutex>

namespace tvm_fuse {

class Session;

struct EmbeddedFile {
  const char* name;
  const unsigned char* begin;
  const unsigned char* end;
};

// One network of a process, behind a lock. It is not freed when the process ends: the driver may be gone by then.
class Embedded {
 public:
  constexpr Embedded(const char* name, const EmbeddedFile* files, size_t count)
      : name_(name), files_(files), count_(count) {}

  int init(int device, const char* driver) noexcept;  // NULL: libcuda.so.1
  int run(const void* const* inputs, void* const* outputs) noexcept;  // on device 0 where nothing was said
  void free() noexcept;

 private:
  void open(int device, const char* driver);

  const char* name_;
  const EmbeddedFile* files_;
  size_t count_;
  std::mutex lock_;
  Session* session_ = nullptr;
};

// In the place of all machine code, where a network was embedded with it; no file of a bundle is called so.
constexpr const char* kEmbeddedImage = "/image";

}  // namespace tvm_fuse
