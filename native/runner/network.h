// A bundle on a device: memory for its tensors, its kernels, its graph.
#pragma once

#include <string>
#include <vector>

#include "driver.h"
#include "package.h"

namespace tvm_fuse {

struct Step {
  std::string op;  // the operator that the launch belongs to
  PreparedLaunch launch;
};

// All members need the device's context to be current, the destructor too. `device` and `bundle` must outlive it.
class Network {
 public:
  // `image`: the kernels, as the device's driver loads them.
  Network(Device& device, const Bundle& bundle, Bytes image);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const std::vector<Step>& steps() const { return steps_; }

  // Copies a tensor to or from the device; `data` has Tensor::size_bytes() bytes.
  void set(const Port& port, const void* data);
  void get(const Port& port, void* data);

  // Fills all memory but inputs and parameters with NaN, which a missing write leaves there.
  void poison();

  void run();          // launches everything, without waiting for it
  void run_checked();  // kernel by kernel, each waited for, so that a failure names the one it is in

 private:
  void allocate();
  void prepare();
  void release() noexcept;
  uint64_t value_of(const Parameter& parameter, const Operand& operand) const;
  CudaAddress address_of(size_t tensor) const { return storages_[bundle_.tensors[tensor].storage]; }

  Device& device_;
  const Bundle& bundle_;
  CudaHandle module_ = nullptr;
  std::vector<CudaAddress> storages_;
  CudaAddress arena_ = 0;
  std::vector<Step> steps_;
};

}  // namespace tvm_fuse
