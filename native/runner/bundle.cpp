#include "bundle.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "error.h"

namespace tvm_fuse {
namespace {

int number_of(const std::string& arch) {
  int number = 0;
  for (const char digit : arch)
    if (digit >= '0' && digit <= '9') number = number * 10 + (digit - '0');
  return number;
}

// A cubin runs on newer devices of its major version, PTX on all newer ones; code for sm_90a on that.
bool suits(const Image& image, int number) {
  const int made_for = number_of(image.arch);
  const char last = image.arch.back();
  if (last < '0' || last > '9') return made_for == number;
  return made_for <= number && (image.form == "ptx" || made_for / 10 == number / 10);
}

}  // namespace

std::string Tensor::text() const {
  std::string made = std::string(dtype->name) + "[";
  for (size_t i = 0; i < shape.size(); ++i) made += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return made + "]";
}

size_t Bundle::arena_bytes() const {
  size_t end = 0;
  for (const Workspace& space : workspaces) end = std::max(end, space.offset_bytes + space.size_bytes);
  return end;
}

size_t Bundle::memory_bytes() const { return std::accumulate(storages.begin(), storages.end(), arena_bytes()); }

size_t Bundle::launch_count() const {
  size_t count = 0;
  for (const Operator& node : operators) count += node.calls.size();
  return count;
}

const Image& choose_image(const Bundle& bundle, const std::string& arch) {
  const int number = number_of(arch);
  const auto rank = [](const Image& image) {
    return std::make_tuple(image.form == "cubin", number_of(image.arch), image.arch);
  };
  const Image* best = nullptr;
  std::string got;
  for (const Image& image : bundle.images) {
    got += (got.empty() ? "" : ", ") + image.form + " for " + image.arch;
    if (suits(image, number) && (best == nullptr || rank(*best) < rank(image))) best = &image;
  }
  if (best != nullptr) return *best;
  throw Error(Status::kUsage, "the bundle has no machine code for " + arch + "; it has " + got,
              "export it with --arch " + arch + " as well");
}

}  // namespace tvm_fuse
