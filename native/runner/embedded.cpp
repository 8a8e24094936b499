#include "embedded.h"

#include "error.h"
#include "session.h"

namespace tvm_fuse {

void Embedded::open(int device, const char* driver) {
  Package package;
  package.where = name_;
  for (size_t i = 0; i < count_; ++i) {
    const size_t size = static_cast<size_t>(files_[i].end - files_[i].begin);
    package.files[files_[i].name] = {files_[i].begin, size};
  }
  const Bytes text = package.file("bundle.json");  // its files' hashes were checked when it was embedded
  package.bundle = read_bundle(std::string(text.data, text.data + text.size), name_);
  session_ = new Session(std::move(package), device, driver != nullptr ? driver : "libcuda.so.1", "");
}

int Embedded::init(int device, const char* driver) noexcept {
  return guarded([&] {
    const std::lock_guard<std::mutex> guard(lock_);
    if (session_ != nullptr)
      throw Error(Status::kUsage, std::string(name_) + ": it is initialised already; free it first");
    open(device, driver);
  });
}

int Embedded::run(const void* const* inputs, void* const* outputs) noexcept {
  return guarded([&] {
    const std::lock_guard<std::mutex> guard(lock_);
    if (session_ == nullptr) open(0, nullptr);
    const Bundle& bundle = session_->bundle();
    const auto bytes = [&bundle](const Port& port) { return bundle.tensors[port.tensor].size_bytes(); };
    for (size_t i = 0; i < bundle.inputs.size(); ++i) session_->set_input(i, inputs[i], bytes(bundle.inputs[i]));
    session_->run();
    for (size_t i = 0; i < bundle.outputs.size(); ++i) session_->get_output(i, outputs[i], bytes(bundle.outputs[i]));
  });
}

void Embedded::free() noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  delete session_;
  session_ = nullptr;
}

}  // namespace tvm_fuse
