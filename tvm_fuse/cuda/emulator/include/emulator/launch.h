// Running a grid of blocks, and what a library of emulated kernels exports.
#pragma once

#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "emulator/abi.h"
#include "emulator/builtins.h"
#include "emulator/scheduler.h"
#include "emulator/signals.h"

namespace emu {

struct Kernel {
  const char* name;
  unsigned max_threads;          // its launch bounds
  size_t static_shared_bytes;
  bool uses_fibers;              // has barriers or warp operations
  const char* const* parameters; // their names
  const unsigned* shifts;        // of the cells of what they point at
  const bool* are_pointers;
  unsigned parameter_count;
  void (*call)(void**);
};

// Defined after the kernels.
extern const Kernel kernels[];
extern const int kernel_count;

template <class T>
struct Argument {
  static constexpr unsigned kShift = 0;
  static constexpr bool kIsPointer = std::is_pointer_v<T>;
  static T get(void* slot, size_t) { return *static_cast<T*>(slot); }
};

#ifdef EMU_CHECKED
inline std::vector<Region> regions;  // of the launch's pointer parameters

template <class T>
struct Argument<Pointer<T>> {
  static constexpr unsigned kShift = kCellShift<T>;
  static constexpr bool kIsPointer = true;
  static Pointer<T> get(void* slot, size_t i) { return {*static_cast<T**>(slot), &regions[i]}; }
};
#endif

template <class Function>
struct Signature;

template <class... Arguments>
struct Signature<void(Arguments...)> {
  static constexpr unsigned kCount = sizeof...(Arguments);
  static constexpr unsigned kShifts[kCount + 1] = {Argument<Arguments>::kShift..., 0};
  static constexpr bool kArePointers[kCount + 1] = {Argument<Arguments>::kIsPointer..., false};

  template <size_t... kIndices>
  static void call(void (*kernel)(Arguments...), void** slots, std::index_sequence<kIndices...>) {
    kernel(Argument<Arguments>::get(slots[kIndices], kIndices)...);
  }
};

template <auto kKernel>
constexpr Kernel make_kernel(const char* name, unsigned max_threads, size_t static_shared_bytes,
                             bool uses_fibers, const char* const* parameters) {
  using Called = Signature<std::remove_pointer_t<decltype(kKernel)>>;
  const auto call = [](void** slots) {
    Called::call(kKernel, slots, std::make_index_sequence<Called::kCount>());
  };
  return {name,           max_threads,          static_shared_bytes, uses_fibers, parameters,
          Called::kShifts, Called::kArePointers, Called::kCount,      call};
}

// ---- orders of threads and blocks -------------------------------------------------------------------

inline uint32_t next_random(uint32_t& state) {  // xorshift
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

inline void order_threads(uint32_t seed) {
  std::iota(machine.order, machine.order + machine.threads, uint16_t{0});
  for (unsigned left = machine.threads; seed != 0 && left > 1; --left) {
    std::swap(machine.order[left - 1], machine.order[next_random(seed) % left]);
  }
  for (unsigned turn = 0; turn < machine.threads; ++turn) machine.fibers[machine.order[turn]].rank = turn;
}

// The blocks' numbers in an order given by a seed: steps of a size that has no divisor in common with
// their count.
class BlockOrder {
 public:
  BlockOrder(uint64_t count, uint32_t seed) : count_(count) {
    if (seed == 0) return;
    at_ = next_random(seed) % count;
    do {
      step_ = next_random(seed) % count + 1;
    } while (std::gcd(step_, count) != 1);
  }

  uint64_t next() {
    const uint64_t number = at_;
    at_ = (at_ + step_) % count_;
    return number;
  }

 private:
  uint64_t count_, at_ = 0, step_ = 1;
};

// ---- checks before and after ------------------------------------------------------------------------

inline uint64_t product(const uint32_t (&sizes)[3]) { return uint64_t{sizes[0]} * sizes[1] * sizes[2]; }

inline int check_request(const Kernel& kernel, const Request& request) {
  const uint64_t threads = product(request.block);
  if (threads == 0 || product(request.grid) == 0) return report(kBadLaunch, "launch: an empty grid or block");
  if (threads > kernel.max_threads) {
    return report(kBadLaunch, "launch: blocks of %llu threads, the most is %u",
                  static_cast<unsigned long long>(threads), kernel.max_threads);
  }
  const size_t shared = kernel.static_shared_bytes + request.shared_bytes;
  if (shared > kMostSharedBytes) {
    return report(kBadLaunch, "launch: %zu bytes of shared memory, the most is %zu", shared, kMostSharedBytes);
  }
  return kNoFault;
}

#ifdef EMU_CHECKED

inline std::vector<std::vector<Cell>> cell_storage;

inline Cell* add_cells(size_t count) { return cell_storage.emplace_back(count).data(); }

// Parameters that point to the same memory share its cells.
inline Region make_region(const Kernel& kernel, const Extent& extent, unsigned i) {
  Region region{kernel.parameters[i], static_cast<char*>(extent.base), extent.bytes, kernel.shifts[i],
                false, extent.is_initialized != 0, nullptr};
  for (const Region& other : regions) {
    if (other.base == region.base && other.shift == region.shift) region.cells = other.cells;
  }
  if (region.cells == nullptr) region.cells = add_cells(region.count() + 1);
  return region;
}

inline void start_tracking(const Kernel& kernel, const Request& request) {
  cell_storage.clear();
  regions.clear();
  regions.reserve(kernel.parameter_count);
  for (unsigned i = 0; i < kernel.parameter_count; ++i) {
    regions.push_back(make_region(kernel, request.extents[i], i));
  }
  dynamic_region.bytes = request.shared_bytes;
  dynamic_region.cells = add_cells(request.shared_bytes);
}

inline int find_unwritten() {
  for (const Region& region : regions) {
    const Cell* end = region.cells + region.count();
    const auto is_missing = [&region](const Cell& cell) { return !is_written(cell, region); };
    const Cell* first = std::find_if(static_cast<const Cell*>(region.cells), end, is_missing);
    if (first != end) {
      return report(kUnwritten, "unwritten: %s[%zu] and %zu others of %zu elements", region.name,
                    static_cast<size_t>(first - region.cells),
                    static_cast<size_t>(std::count_if(first, end, is_missing)) - 1, region.count());
    }
  }
  return kNoFault;
}

constexpr bool kIsChecked = true;

#else

}  // namespace emu

// The section of all static shared arrays, as the linker names its ends; null when there is none.
extern "C" char __start_emu_shared[] __attribute__((weak));
extern "C" char __stop_emu_shared[] __attribute__((weak));

namespace emu {

// Shared memory holds poison when the first block begins; later blocks find what earlier ones left.
inline void start_tracking(const Kernel&, const Request& request) {
  std::memset(dynamic_memory, kPoisonByte, request.shared_bytes);
  if (__start_emu_shared == nullptr) return;
  std::memset(__start_emu_shared, kPoisonByte, static_cast<size_t>(__stop_emu_shared - __start_emu_shared));
}
inline int find_unwritten() { return kNoFault; }
constexpr bool kIsChecked = false;

#endif

// ---- the launch -------------------------------------------------------------------------------------

inline uint3 locate_index(uint64_t number, const uint3& sizes) {
  return {static_cast<unsigned>(number % sizes.x), static_cast<unsigned>(number / sizes.x % sizes.y),
          static_cast<unsigned>(number / sizes.x / sizes.y)};
}

inline void prepare(const Kernel& kernel, const Request& request, Fault& fault) {
  machine.fault = &fault;
  machine.body = kernel.call;
  machine.arguments = request.arguments;
  machine.grid = {request.grid[0], request.grid[1], request.grid[2]};
  machine.block = {request.block[0], request.block[1], request.block[2]};
  machine.threads = static_cast<unsigned>(product(request.block));
  machine.first_serial = machine.serial + 1;
  for (unsigned i = 0; i < machine.threads; ++i) {
    machine.fibers[i].linear = i;
    machine.fibers[i].index = locate_index(i, machine.block);
  }
  order_threads(request.seed);
}

inline int launch(const Kernel& kernel, const Request& request, Fault& fault) {
  fault = Fault{};
  machine.fault = &fault;
  if (check_request(kernel, request) != kNoFault) return fault.kind;
  prepare(kernel, request, fault);
  start_tracking(kernel, request);
  const bool needs_fibers = kIsChecked || (kernel.uses_fibers && machine.threads > 1);
  if (!allocate_stacks()) return report(kBadLaunch, "launch: no memory for stacks");
  const uint64_t blocks = product(request.grid);
  const SignalGuard guard;
  BlockOrder order(blocks, request.seed);
  for (uint64_t i = 0; i < blocks; ++i) {
    ++machine.serial;
    machine.block_index = locate_index(order.next(), machine.grid);
    needs_fibers ? run_fibers() : run_loop();
    if (fault.kind != kNoFault) return fault.kind;
  }
  return find_unwritten();
}

}  // namespace emu

#define EMU_EXPORT extern "C" __attribute__((visibility("default"), used)) inline

EMU_EXPORT int emu_count() { return emu::kernel_count; }

EMU_EXPORT const char* emu_name(int kernel) { return emu::kernels[kernel].name; }

EMU_EXPORT int emu_attribute(int kernel, int which) {
  const emu::Kernel& of = emu::kernels[kernel];
  switch (which) {
    case emu::kMaxThreadsPerBlock:
      return static_cast<int>(of.max_threads);
    case emu::kStaticSharedBytes:
      return static_cast<int>(of.static_shared_bytes);
    case emu::kParameterCount:
      return static_cast<int>(of.parameter_count);
    default:
      return -1;
  }
}

EMU_EXPORT int emu_is_pointer(int kernel, int parameter) {
  return emu::kernels[kernel].are_pointers[parameter];
}

EMU_EXPORT int emu_launch(int kernel, const emu::Request* request, emu::Fault* fault) {
  return emu::launch(emu::kernels[kernel], *request, *fault);
}
