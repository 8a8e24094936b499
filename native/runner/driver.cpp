#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace tvm_fuse {
namespace {

constexpr const char* kNoGpuHint =
    "run on a machine with an NVIDIA GPU, or try the kernels with `python -m tvm_fuse.runner --device emulator`";

template <class Function>
bool find_symbol(void* handle, const char* name, Function& function) {
  void* found = dlsym(handle, name);
  std::memcpy(&function, &found, sizeof found);  // POSIX: a function's address fits
  return found != nullptr;
}

}  // namespace

bool CudaApi::has_graphs() const {
#define TVM_FUSE_IS_THERE(name, parameters) name != nullptr &&
  return TVM_FUSE_CUDA_GRAPH_FUNCTIONS(TVM_FUSE_IS_THERE) true;
#undef TVM_FUSE_IS_THERE
}

PreparedLaunch::PreparedLaunch(const Kernel& kernel, CudaHandle function, std::vector<uint64_t> values)
    : kernel(&kernel), function(function), values_(std::move(values)) {
  for (uint64_t& value : values_) addresses.push_back(&value);
  addresses.push_back(nullptr);  // a kernel without parameters still gets an array
}

// --- opening -------------------------------------------------------------------------------------

Device::Device(int ordinal, const std::string& library) {
  load(library);
  start(ordinal);
  check("cuDeviceGet", api_.cuDeviceGet(&device_, ordinal));
  check("cuDevicePrimaryCtxRetain", api_.cuDevicePrimaryCtxRetain(&context_, device_));
  try {
    const Current current(*this);
    // 0: a stream that waits for copies and fills, which go to the default stream.
    check("cuStreamCreate", api_.cuStreamCreate(&stream_, 0));
    describe();
  } catch (...) {
    api_.cuDevicePrimaryCtxRelease_v2(device_);
    throw;
  }
}

Device::~Device() {
  if (api_.cuCtxPushCurrent_v2(context_) == kCudaSuccess) {
    CudaHandle ignored = nullptr;
    api_.cuStreamDestroy_v2(stream_);
    api_.cuCtxPopCurrent_v2(&ignored);
  }
  api_.cuDevicePrimaryCtxRelease_v2(device_);
}

// A driver stays loaded until the process ends: others may use it too.
void Device::load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw Error(Status::kNoDevice, std::string("the CUDA driver cannot be loaded: ") + dlerror(),
                "install the NVIDIA driver on a machine with a GPU, or try the kernels with "
                "`python -m tvm_fuse.runner --device emulator`");
  std::string missing;
#define TVM_FUSE_FIND(name, parameters) \
  if (!find_symbol(handle, #name, api_.name)) missing += " " #name;
  TVM_FUSE_CUDA_FUNCTIONS(TVM_FUSE_FIND)
#undef TVM_FUSE_FIND
#define TVM_FUSE_TRY(name, parameters) find_symbol(handle, #name, api_.name);
  TVM_FUSE_CUDA_GRAPH_FUNCTIONS(TVM_FUSE_TRY)
#undef TVM_FUSE_TRY
  if (!missing.empty())
    throw Error(Status::kNoDevice, library + " is no CUDA driver: it lacks" + missing, kNoGpuHint);
  api_.is_emulated = find_symbol(handle, "tvm_fuse_emulator_fault", api_.emulator_fault);
}

void Device::start(int ordinal) {
  int count = 0;
  CudaStatus status = api_.cuInit(0);
  if (status == kCudaSuccess) status = api_.cuDeviceGetCount(&count);
  if (status == kCudaNoDevice || (status == kCudaSuccess && count == 0))
    throw Error(Status::kNoDevice, "the CUDA driver sees no NVIDIA GPU", kNoGpuHint);
  if (status != kCudaSuccess)
    throw Error(Status::kNoDevice, "the CUDA driver does not start: " + explain(status), kNoGpuHint);
  if (ordinal < 0 || ordinal >= count)
    throw Error(Status::kUsage, "there is no device " + std::to_string(ordinal) + "; wanted one below " +
                                    std::to_string(count));
}

void Device::describe() {
  char name[256] = {};
  check("cuDeviceGetName", api_.cuDeviceGetName(name, sizeof name - 1, device_));
  int version = 0, major = 0, minor = 0;
  check("cuDriverGetVersion", api_.cuDriverGetVersion(&version));
  check("cuDeviceGetAttribute", api_.cuDeviceGetAttribute(&major, kComputeMajor, device_));
  check("cuDeviceGetAttribute", api_.cuDeviceGetAttribute(&minor, kComputeMinor, device_));
  check("cuDeviceGetAttribute", api_.cuDeviceGetAttribute(&info_.sms, kMultiprocessors, device_));
  info_.name = name;
  info_.arch = "sm_" + std::to_string(major) + std::to_string(minor);
  info_.driver = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Device::Current::Current(const Device& device) : device_(device) {
  device.check("cuCtxPushCurrent_v2", device.api_.cuCtxPushCurrent_v2(device.context_));
}

Device::Current::~Current() {
  CudaHandle ignored = nullptr;
  device_.api_.cuCtxPopCurrent_v2(&ignored);
}

// --- memory --------------------------------------------------------------------------------------

CudaAddress Device::allocate(size_t size_bytes) {
  CudaAddress address = 0;
  const CudaStatus status = api_.cuMemAlloc_v2(&address, std::max<size_t>(size_bytes, 1));
  if (status == kCudaOutOfMemory)
    throw CudaError("the device is out of memory: " + std::to_string(size_bytes) + " more bytes were wanted", status,
                    "other programs may use it; `nvidia-smi` tells");
  check("cuMemAlloc_v2", status);
  return address;
}

// After a failed kernel the driver refuses this as well.
void Device::free(CudaAddress address) noexcept { api_.cuMemFree_v2(address); }

void Device::fill(CudaAddress address, uint8_t byte, size_t size_bytes) {
  if (size_bytes != 0) check("cuMemsetD8_v2", api_.cuMemsetD8_v2(address, byte, size_bytes));
}

void Device::upload(CudaAddress address, const void* data, size_t size_bytes) {
  if (size_bytes == 0) return;
  check("cuMemcpyHtoD_v2", api_.cuMemcpyHtoD_v2(address, data, size_bytes));
  synchronize();
}

void Device::download(void* data, CudaAddress address, size_t size_bytes) {
  synchronize();
  if (size_bytes != 0) check("cuMemcpyDtoH_v2", api_.cuMemcpyDtoH_v2(data, address, size_bytes));
}

// --- kernels -------------------------------------------------------------------------------------

CudaHandle Device::load_module(Bytes image) {
  // PTX is text that ends with a NUL; a cubin does not mind one.
  std::vector<uint8_t> ended(image.data, image.data + image.size);
  ended.push_back(0);
  CudaHandle module = nullptr;
  check("cuModuleLoadData", api_.cuModuleLoadData(&module, ended.data()));
  return module;
}

void Device::unload_module(CudaHandle module) noexcept { api_.cuModuleUnload(module); }

CudaHandle Device::find_kernel(CudaHandle module, const Kernel& kernel) {
  CudaHandle function = nullptr;
  check("cuModuleGetFunction", api_.cuModuleGetFunction(&function, module, kernel.symbol.c_str()), kernel.symbol);
  if (kernel.smem_dynamic_bytes > 0) {  // what a block gets without asking is less where the kernel declares some
    const int bytes = static_cast<int>(kernel.smem_dynamic_bytes);
    check("cuFuncSetAttribute", api_.cuFuncSetAttribute(function, kMaxDynamicSharedSize, bytes), kernel.symbol);
  }
  return function;
}

void Device::launch(const PreparedLaunch& prepared) {
  const Kernel& of = *prepared.kernel;
  const CudaStatus status = api_.cuLaunchKernel(
      prepared.function, of.grid[0], of.grid[1], of.grid[2], of.block[0], of.block[1], of.block[2],
      of.smem_dynamic_bytes, stream_, const_cast<void**>(prepared.addresses.data()), nullptr);
  if (status != kCudaSuccess && api_.emulator_fault != nullptr && *api_.emulator_fault() != '\0')
    throw CudaError("cuLaunchKernel (" + of.symbol + ") failed: " + api_.emulator_fault(), status);
  check("cuLaunchKernel", status, of.symbol);
}

void Device::synchronize(const std::string& about) { check("cuCtxSynchronize", api_.cuCtxSynchronize(), about); }

// --- time and graphs -----------------------------------------------------------------------------

double Device::time(const std::function<void()>& work, int count) {
  struct Event {
    explicit Event(Device& device) : device(device) {
      device.check("cuEventCreate", device.api_.cuEventCreate(&handle, 0));
    }
    ~Event() { device.api_.cuEventDestroy_v2(handle); }
    Device& device;
    CudaHandle handle = nullptr;
  };
  Event start(*this), end(*this);
  check("cuEventRecord", api_.cuEventRecord(start.handle, stream_));
  for (int i = 0; i < count; ++i) work();
  check("cuEventRecord", api_.cuEventRecord(end.handle, stream_));
  check("cuEventSynchronize", api_.cuEventSynchronize(end.handle));
  float elapsed_ms = 0;
  check("cuEventElapsedTime", api_.cuEventElapsedTime(&elapsed_ms, start.handle, end.handle));
  return elapsed_ms * 1e-3 / count;
}

Graph::Graph(Device& device, const std::function<void()>& work) : device_(device) {
  const CudaApi& api = device.api_;
  if (!api.has_graphs()) throw CudaError("the driver has no CUDA graphs", kCudaNotSupported);
  device.check("cuStreamBeginCapture_v2", api.cuStreamBeginCapture_v2(device.stream_, kCaptureThreadLocal));
  try {
    work();
  } catch (...) {  // ends the capture in any case: the stream must be usable again
    if (api.cuStreamEndCapture(device.stream_, &graph_) == kCudaSuccess && graph_ != nullptr)
      api.cuGraphDestroy(graph_);
    throw;
  }
  device.check("cuStreamEndCapture", api.cuStreamEndCapture(device.stream_, &graph_));
  const CudaStatus status = api.cuGraphInstantiateWithFlags(&executable_, graph_, 0);
  if (status == kCudaSuccess) return;
  api.cuGraphDestroy(graph_);
  device.check("cuGraphInstantiateWithFlags", status);
}

Graph::~Graph() {
  device_.api_.cuCtxSynchronize();  // it may still run
  device_.api_.cuGraphExecDestroy(executable_);
  device_.api_.cuGraphDestroy(graph_);
}

void Graph::launch() { device_.check("cuGraphLaunch", device_.api_.cuGraphLaunch(executable_, device_.stream_)); }

// --- failures ------------------------------------------------------------------------------------

void Device::check(Name name, CudaStatus status, const std::string& about) const {
  if (status == kCudaSuccess) return;
  const std::string where = about.empty() ? "" : " (" + about + ")";
  throw CudaError(name + where + " failed: " + explain(status), status);
}

std::string Device::explain(CudaStatus status) const {
  std::string made;
  for (const auto get : {api_.cuGetErrorName, api_.cuGetErrorString}) {
    const char* text = nullptr;
    if (get(status, &text) == kCudaSuccess && text != nullptr) made += (made.empty() ? "" : ", ") + std::string(text);
  }
  return made.empty() ? "CUDA error " + std::to_string(status) : made;
}

}  // namespace tvm_fuse
