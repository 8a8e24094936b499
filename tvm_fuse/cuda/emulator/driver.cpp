// A libcuda for emulated kernels: device memory is host memory, a module is a library of kernels, and every
// call is done when it returns. It has the calls that a runner needs; stream capture is "not supported".
//
// After a faulty launch `tvm_fuse_emulator_fault` tells what a real driver does not: kernel, block, thread.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/abi.h"

namespace {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kFileNotFound = 301,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kMisalignedAddress = 716,
  kLaunchFailed = 719,
  kNotSupported = 801,
};

struct ResultText {
  int code;
  const char* name;
  const char* text;
};

constexpr ResultText kTexts[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kFileNotFound, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kLaunchOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {kMisalignedAddress, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

const ResultText* find_text(int code) {
  const auto* found = std::find_if(std::begin(kTexts), std::end(kTexts),
                                   [code](const ResultText& row) { return row.code == code; });
  return found == std::end(kTexts) ? nullptr : found;
}

// ---- state ------------------------------------------------------------------------------------------

bool is_initialized = false;
char the_context, the_stream;  // there is one of each
thread_local void* current_context = nullptr;

// Calls that need no context say how they end; those that need one say whether it is there.
int after_init(int result) { return is_initialized ? result : kNotInitialized; }
bool has_context() { return is_initialized && current_context != nullptr; }

// ---- memory -----------------------------------------------------------------------------------------

using Address = uint64_t;

// What nothing has written reads as NaN; on both sides of an allocation this shows stray writes.
constexpr unsigned char kPoison = 0xff;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kAlignment = 256;

struct Allocation {
  unsigned char* start;
  size_t bytes;

  size_t padded() const { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  bool is_guard_whole() const {
    const auto is_poison = [](unsigned char byte) { return byte == kPoison; };
    const unsigned char* end = start + bytes;
    return std::all_of(start - kGuardBytes, start, is_poison) &&
           std::all_of(end, static_cast<const unsigned char*>(start) + padded() + kGuardBytes, is_poison);
  }
};

std::mutex mutex;
std::map<Address, Allocation> allocations;
std::string last_fault;

template <class T>
T* pointer_to(Address address) {
  return reinterpret_cast<T*>(address);
}

// The allocation in which an address lies; null when it lies in none.
const Allocation* find_allocation(Address address) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return nullptr;
  const Allocation& before = std::prev(after)->second;
  return address <= std::prev(after)->first + before.bytes ? &before : nullptr;
}

bool is_inside(Address address, size_t bytes) {
  const Allocation* found = find_allocation(address);
  return found != nullptr && pointer_to<unsigned char>(address) + bytes <= found->start + found->bytes;
}

// ---- modules ----------------------------------------------------------------------------------------

struct Library {
  void* handle;
  int (*count)();
  const char* (*name)(int);
  int (*attribute)(int, int);
  int (*is_pointer)(int, int);
  int (*launch)(int, const emu::Request*, emu::Fault*);
};

struct Function {
  Library* library;
  int index;
  int most_dynamic_bytes;
};

constexpr int kStaticLimit = 48 << 10;  // what a launch gets without asking
constexpr int kMostSharedBytes = 227 << 10;

template <class T>
bool load_symbol(void* handle, const char* name, T& function) {
  function = reinterpret_cast<T>(dlsym(handle, name));
  return function != nullptr;
}

int open_library(const char* path, void** module) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return kInvalidImage;
  Library library{handle, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (!load_symbol(handle, "emu_count", library.count) || !load_symbol(handle, "emu_name", library.name) ||
      !load_symbol(handle, "emu_attribute", library.attribute) ||
      !load_symbol(handle, "emu_is_pointer", library.is_pointer) ||
      !load_symbol(handle, "emu_launch", library.launch)) {
    dlclose(handle);
    return kInvalidImage;
  }
  *module = new Library(library);
  return kSuccess;
}

// Size of a shared library in memory: linkers put the section headers last.
size_t size_of_image(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return 0;
  return header.e_shoff + size_t{header.e_shentsize} * header.e_shnum;
}

int result_of(int32_t fault) {
  switch (fault) {
    case emu::kNoFault:
      return kSuccess;
    case emu::kBadLaunch:
      return kLaunchOutOfResources;
    case emu::kOutOfBounds:
      return kIllegalAddress;
    case emu::kMisaligned:
      return kMisalignedAddress;
    default:
      return kLaunchFailed;
  }
}

void remember_fault(const char* kernel, const emu::Fault& fault) {
  char text[512];
  snprintf(text, sizeof text, "%s: %s (block (%u, %u, %u), thread (%u, %u, %u))", kernel, fault.what,
           fault.block[0], fault.block[1], fault.block[2], fault.thread[0], fault.thread[1], fault.thread[2]);
  last_fault = text;
}

// What each pointer parameter may touch; nothing, when it is no address of ours.
std::vector<emu::Extent> find_extents(const Function& function, void** arguments) {
  const int count = function.library->attribute(function.index, emu::kParameterCount);
  std::vector<emu::Extent> extents(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    if (!function.library->is_pointer(function.index, i)) continue;
    const Allocation* found = find_allocation(*static_cast<Address*>(arguments[i]));
    if (found != nullptr) extents[static_cast<size_t>(i)] = {found->start, found->bytes, 1};
  }
  return extents;
}

struct Event {
  std::chrono::steady_clock::time_point time;
  bool is_recorded;
};

struct DeviceAttribute {
  int number;
  int value;
};

constexpr int kMajor = 8, kMinor = 0;
constexpr DeviceAttribute kDeviceAttributes[] = {
    {1, 1024},                          // threads of a block
    {2, 1024},      {3, 1024},  {4, 64},  // a block in x, y, z
    {5, 0x7fffffff}, {6, 65535}, {7, 65535},  // a grid
    {8, kStaticLimit},                  // shared memory of a block
    {10, 32},                           // lanes of a warp
    {12, 65536},                        // registers of a block
    {13, 1000000},                      // clock, kHz
    {16, 1},                            // multiprocessors
    {36, 1000000},                      // memory clock, kHz
    {37, 64},                           // memory bus, bits
    {38, 1 << 20},                      // L2, bytes
    {39, 1024},                         // threads of a multiprocessor
    {75, kMajor},   {76, kMinor},
    {81, kMostSharedBytes + 1024},      // shared memory of a multiprocessor
    {82, 65536},                        // registers of a multiprocessor
    {97, kMostSharedBytes},             // shared memory of a block that asks for it
};

template <class T>
int give(T* where, T value) {
  if (where == nullptr) return kInvalidValue;
  *where = value;
  return kSuccess;
}

int copy(void* to, const void* from, size_t bytes, bool are_inside) {
  if (!are_inside) return kInvalidValue;
  std::memmove(to, from, bytes);
  return kSuccess;
}

template <class T>
int fill(Address address, T value, size_t count) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!is_inside(address, count * sizeof(T))) return kInvalidValue;
  std::fill_n(pointer_to<T>(address), count, value);
  return kSuccess;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Marks this library; and the fault of the last launch that failed.
API const int tvm_fuse_emulated_driver = 1;
API const char* tvm_fuse_emulator_fault() { return last_fault.c_str(); }

// ---- set-up -----------------------------------------------------------------------------------------

API int cuInit(unsigned flags) {
  is_initialized = is_initialized || flags == 0;
  return flags == 0 ? kSuccess : kInvalidValue;
}
API int cuDriverGetVersion(int* version) { return give(version, 12090); }
API int cuDeviceGetCount(int* count) { return after_init(give(count, 1)); }
API int cuDeviceGet(int* device, int ordinal) {
  return after_init(ordinal == 0 ? give(device, 0) : kInvalidDevice);
}
API int cuDeviceTotalMem_v2(size_t* bytes, int) { return give(bytes, size_t{8} << 30); }

API int cuDeviceGetName(char* name, int length, int) {
  if (name == nullptr || length <= 0) return kInvalidValue;
  snprintf(name, static_cast<size_t>(length), "tvm-fuse CPU emulator");
  return kSuccess;
}

API int cuDeviceGetAttribute(int* value, int attribute, int) {
  const auto* found =
      std::find_if(std::begin(kDeviceAttributes), std::end(kDeviceAttributes),
                   [attribute](const DeviceAttribute& row) { return row.number == attribute; });
  return give(value, found == std::end(kDeviceAttributes) ? 0 : found->value);
}

API int cuGetErrorName(int error, const char** name) {
  const ResultText* found = find_text(error);
  const int status = give(name, found != nullptr ? found->name : nullptr);
  return found != nullptr ? status : kInvalidValue;
}

API int cuGetErrorString(int error, const char** text) {
  const ResultText* found = find_text(error);
  const int status = give(text, found != nullptr ? found->text : nullptr);
  return found != nullptr ? status : kInvalidValue;
}

API int cuDevicePrimaryCtxRetain(void** context, int) { return after_init(give<void*>(context, &the_context)); }
API int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
API int cuCtxGetCurrent(void** context) { return give(context, current_context); }
API int cuCtxSynchronize() { return has_context() ? kSuccess : kInvalidContext; }
API int cuCtxGetDevice(int* device) { return has_context() ? give(device, 0) : kInvalidContext; }
API int cuCtxDestroy_v2(void*) { return kSuccess; }

API int cuCtxSetCurrent(void* context) {
  current_context = context;
  return kSuccess;
}
API int cuCtxPushCurrent_v2(void* context) { return cuCtxSetCurrent(context); }
API int cuCtxCreate_v2(void** context, unsigned, int) {
  current_context = &the_context;
  return give<void*>(context, &the_context);
}
API int cuCtxPopCurrent_v2(void** context) {
  if (context != nullptr) *context = current_context;
  current_context = nullptr;
  return kSuccess;
}

// ---- memory -----------------------------------------------------------------------------------------

API int cuMemAlloc_v2(Address* address, size_t bytes) {
  if (!has_context()) return kInvalidContext;
  if (address == nullptr || bytes == 0) return kInvalidValue;
  const size_t padded = Allocation{nullptr, bytes}.padded();
  void* memory = std::aligned_alloc(kGuardBytes, (padded + 3 * kGuardBytes - 1) / kGuardBytes * kGuardBytes);
  if (memory == nullptr) return kOutOfMemory;
  std::memset(memory, kPoison, padded + 2 * kGuardBytes);
  unsigned char* start = static_cast<unsigned char*>(memory) + kGuardBytes;
  const std::lock_guard<std::mutex> lock(mutex);
  *address = reinterpret_cast<Address>(start);
  allocations[*address] = Allocation{start, bytes};
  return kSuccess;
}

API int cuMemFree_v2(Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (address == 0) return kSuccess;
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  std::free(found->second.start - kGuardBytes);
  allocations.erase(found);
  return kSuccess;
}

API int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  return give(free_bytes, size_t{8} << 30) | give(total, size_t{8} << 30);
}

API int cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  return copy(pointer_to<void>(to), from, bytes, is_inside(to, bytes));
}
API int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  return copy(to, pointer_to<void>(from), bytes, is_inside(from, bytes));
}
API int cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  return copy(pointer_to<void>(to), pointer_to<void>(from), bytes, is_inside(to, bytes) && is_inside(from, bytes));
}
API int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void*) {
  return cuMemcpyHtoD_v2(to, from, bytes);
}
API int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void*) {
  return cuMemcpyDtoH_v2(to, from, bytes);
}
API int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void*) {
  return cuMemcpyDtoD_v2(to, from, bytes);
}

API int cuMemsetD8_v2(Address to, unsigned char value, size_t count) { return fill(to, value, count); }
API int cuMemsetD32_v2(Address to, unsigned value, size_t count) { return fill(to, value, count); }
API int cuMemsetD8Async(Address to, unsigned char value, size_t count, void*) { return fill(to, value, count); }
API int cuMemsetD32Async(Address to, unsigned value, size_t count, void*) { return fill(to, value, count); }

// ---- modules and launches ---------------------------------------------------------------------------

API int cuModuleLoad(void** module, const char* path) {
  if (!has_context()) return kInvalidContext;
  if (module == nullptr || path == nullptr) return kInvalidValue;
  return access(path, R_OK) == 0 ? open_library(path, module) : kFileNotFound;
}

API int cuModuleLoadData(void** module, const void* image) {
  if (!has_context()) return kInvalidContext;
  if (module == nullptr || image == nullptr) return kInvalidValue;
  const size_t bytes = size_of_image(image);
  if (bytes == 0) return kInvalidImage;
  const int file = memfd_create("kernels", MFD_CLOEXEC);
  if (file < 0) return kOutOfMemory;
  const bool is_written = write(file, image, bytes) == static_cast<ssize_t>(bytes);
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const int result = is_written ? open_library(path.c_str(), module) : kOutOfMemory;
  close(file);
  return result;
}

API int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(module, image);
}

API int cuModuleUnload(void* module) {
  if (module == nullptr) return kInvalidHandle;
  dlclose(static_cast<Library*>(module)->handle);
  delete static_cast<Library*>(module);  // its functions, a few bytes each, are left
  return kSuccess;
}

API int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (function == nullptr || module == nullptr || name == nullptr) return kInvalidValue;
  Library* library = static_cast<Library*>(module);
  for (int i = 0; i < library->count(); ++i) {
    if (std::strcmp(library->name(i), name) != 0) continue;
    *function = new Function{library, i, kStaticLimit - library->attribute(i, emu::kStaticSharedBytes)};
    return kSuccess;
  }
  return kNotFound;
}

API int cuFuncGetAttribute(int* value, int attribute, void* function) {
  if (function == nullptr) return kInvalidHandle;
  const Function& of = *static_cast<Function*>(function);
  switch (attribute) {
    case 0:  // MAX_THREADS_PER_BLOCK
      return give(value, of.library->attribute(of.index, emu::kMaxThreadsPerBlock));
    case 1:  // SHARED_SIZE_BYTES
      return give(value, of.library->attribute(of.index, emu::kStaticSharedBytes));
    case 8:  // MAX_DYNAMIC_SHARED_SIZE_BYTES
      return give(value, of.most_dynamic_bytes);
    default:  // registers, local memory, versions: nothing is known
      return give(value, 0);
  }
}

API int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (function == nullptr) return kInvalidHandle;
  if (attribute != 8) return kSuccess;
  Function& of = *static_cast<Function*>(function);
  const int most = kMostSharedBytes - of.library->attribute(of.index, emu::kStaticSharedBytes);
  if (value < 0 || value > most) return kInvalidValue;
  of.most_dynamic_bytes = value;
  return kSuccess;
}

API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** arguments,
                       void** extra) {
  if (!has_context()) return kInvalidContext;
  if (function == nullptr) return kInvalidHandle;
  const Function& of = *static_cast<Function*>(function);
  if (extra != nullptr || arguments == nullptr) return kInvalidValue;
  if (static_cast<int>(shared_bytes) > of.most_dynamic_bytes) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::vector<emu::Extent> extents = find_extents(of, arguments);
  const emu::Request request{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes,
                             0,                        arguments,                   extents.data()};
  emu::Fault fault{};
  const int32_t kind = of.library->launch(of.index, &request, &fault);
  if (kind != emu::kNoFault) remember_fault(of.library->name(of.index), fault);
  for (const emu::Extent& extent : extents) {
    if (kind != emu::kNoFault || extent.base == nullptr) continue;
    if (!allocations[reinterpret_cast<Address>(extent.base)].is_guard_whole()) {
      last_fault = std::string(of.library->name(of.index)) + ": out of bounds: wrote beside an allocation";
      return kIllegalAddress;
    }
  }
  return result_of(kind);
}

// ---- streams and events -----------------------------------------------------------------------------

API int cuStreamCreate(void** stream, unsigned) {
  return has_context() ? give<void*>(stream, &the_stream) : kInvalidContext;
}
API int cuStreamDestroy_v2(void*) { return kSuccess; }
API int cuStreamSynchronize(void*) { return kSuccess; }
API int cuStreamQuery(void*) { return kSuccess; }
API int cuStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
API int cuStreamBeginCapture_v2(void*, int) { return kNotSupported; }
API int cuStreamEndCapture(void*, void**) { return kNotSupported; }
API int cuGraphInstantiateWithFlags(void**, void*, unsigned long long) { return kNotSupported; }
API int cuGraphLaunch(void*, void*) { return kNotSupported; }
API int cuGraphExecDestroy(void*) { return kNotSupported; }
API int cuGraphDestroy(void*) { return kNotSupported; }

API int cuEventCreate(void** event, unsigned) {
  return has_context() ? give<void*>(event, new Event{}) : kInvalidContext;
}

API int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}

API int cuEventRecord(void* event, void*) {
  if (event == nullptr) return kInvalidHandle;
  *static_cast<Event*>(event) = {std::chrono::steady_clock::now(), true};
  return kSuccess;
}

API int cuEventSynchronize(void* event) { return event == nullptr ? kInvalidHandle : kSuccess; }
API int cuEventQuery(void* event) { return event == nullptr ? kInvalidHandle : kSuccess; }

API int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  if (begin == nullptr || end == nullptr) return kInvalidHandle;
  const Event &from = *static_cast<Event*>(begin), &to = *static_cast<Event*>(end);
  if (!from.is_recorded || !to.is_recorded) return kInvalidHandle;
  return give(milliseconds, std::chrono::duration<float, std::milli>(to.time - from.time).count());
}
