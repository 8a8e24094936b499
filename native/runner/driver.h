// One device through the CUDA driver: memory, kernels, launches in order, events, graphs. All of it is freed by
// destructors; failures throw Error (kFailed, but kNoDevice and kUsage from Device's constructor).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bundle.h"
#include "cuda_api.h"
#include "error.h"
#include "npz.h"

namespace tvm_fuse {

// The driver refused a call.
class CudaError : public Error {
 public:
  CudaError(const std::string& message, CudaStatus code, std::string hint = "")
      : Error(Status::kFailed, message, std::move(hint)), code(code) {}
  CudaStatus code;
};

struct DeviceInfo {
  std::string name, arch, driver;  // arch such as sm_90; driver: the CUDA it is for, such as 13.0
  int sms;
};

// A kernel with its arguments in place, to be launched again and again. Not copied: it points into itself.
class PreparedLaunch {
 public:
  PreparedLaunch(const Kernel& kernel, CudaHandle function, std::vector<uint64_t> values);
  PreparedLaunch(PreparedLaunch&&) = default;  // a moved vector keeps its memory

  const Kernel* kernel;
  CudaHandle function;
  std::vector<void*> addresses;  // of the values

 private:
  std::vector<uint64_t> values_;
};

class Device {
 public:
  // `library`: file of the driver, or a name for the system's loader.
  Device(int ordinal, const std::string& library);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceInfo& info() const { return info_; }
  bool is_emulated() const { return api_.is_emulated; }

  // Makes the device's context current on this thread while it lives.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
  };

  CudaAddress allocate(size_t size_bytes);  // at least one byte
  void free(CudaAddress address) noexcept;
  void fill(CudaAddress address, uint8_t byte, size_t size_bytes);
  void upload(CudaAddress address, const void* data, size_t size_bytes);
  void download(void* data, CudaAddress address, size_t size_bytes);  // once all work is done

  CudaHandle load_module(Bytes image);  // a cubin, or PTX
  void unload_module(CudaHandle module) noexcept;
  CudaHandle find_kernel(CudaHandle module, const Kernel& kernel);  // allowed the shared memory it will get
  void launch(const PreparedLaunch& prepared);
  void synchronize(const std::string& about = "");

  // Seconds between two events around `count` calls of `work`, for one of them.
  double time(const std::function<void()>& work, int count);

 private:
  friend class Graph;
  using Name = const char*;

  void load(const std::string& library);
  void start(int ordinal);
  void describe();
  void check(Name name, CudaStatus status, const std::string& about = "") const;
  std::string explain(CudaStatus status) const;

  CudaApi api_;
  int device_ = 0;
  CudaHandle context_ = nullptr, stream_ = nullptr;
  DeviceInfo info_;
};

// The launches that `work` makes, as one CUDA graph. Throws CudaError where the driver cannot make one; the
// stream is usable again in any case.
class Graph {
 public:
  Graph(Device& device, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch();

 private:
  Device& device_;
  CudaHandle graph_ = nullptr, executable_ = nullptr;
};

}  // namespace tvm_fuse
