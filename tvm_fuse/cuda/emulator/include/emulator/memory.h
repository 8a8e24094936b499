// Memory of checked builds: pointers and references that look at every access.
//
// The source's pointer parameters become Pointer<T>, its shared arrays Shared<T, N>. An access must lie
// inside its region, be aligned, read only what was written, and be ordered by a barrier against
// conflicting accesses of other threads. Writing the value that is there already conflicts with nothing.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "emulator/scheduler.h"

namespace emu {

// In place of one thread, when several accessed a cell.
constexpr uint16_t kSeveralInWarp = kMaxThreads;  // + the warp
constexpr uint16_t kSeveral = 2 * kMaxThreads;
constexpr uint32_t kSeveralBlocks = ~uint32_t{0};

struct Access {
  uint32_t block = 0;  // serial; 0: never
  uint32_t barriers = 0;
  uint32_t syncs = 0;
  uint16_t thread = 0;
  bool is_atomic = false;
};

// The last write of a cell, and the reads since then.
struct Cell {
  Access write, read;
};

struct Region {
  const char* name;
  char* base;
  size_t bytes;
  unsigned shift;  // a cell is 1 << shift bytes
  bool is_shared;
  bool is_initialized;
  Cell* cells;

  size_t count() const { return bytes >> shift; }
};

// Large types are tracked in cells of 4 bytes, so that they can be accessed in part.
template <class T>
constexpr unsigned kCellShift = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 8 ? 3 : 2;

inline Access access_now(bool is_atomic = false) {
  const Fiber& me = *machine.current;
  return {machine.serial, me.barriers, me.syncs, static_cast<uint16_t>(me.linear), is_atomic};
}

inline unsigned warp_of(const Access& access) {
  return access.thread < kMaxThreads ? access.thread / kWarpSize : access.thread - kMaxThreads;
}

// Whether nothing orders an earlier access against what the running thread does now.
inline bool is_concurrent(const Access& before, const Region& region) {
  if (before.block != machine.serial) return !region.is_shared && before.block >= machine.first_serial;
  const Fiber& me = *machine.current;
  if (before.thread == me.linear || before.barriers != me.barriers) return false;
  return warp_of(before) != me.warp() || before.syncs >= me.syncs;
}

inline bool is_written(const Cell& cell, const Region& region) {
  if (region.is_shared) return cell.write.block == machine.serial;
  return region.is_initialized || (cell.write.block != 0 && cell.write.block >= machine.first_serial);
}

// Bytes that are accessed together, inside their region.
struct Place {
  const Region& region;
  size_t offset;
  size_t bytes;
};

[[noreturn]] __attribute__((cold, noinline)) inline void fail_race(
    const Region& region, size_t index, const char* action, const Access& before, const char* earlier) {
  if (before.block != machine.serial) {
    fail(kRace, "race: %s %s[%zu], which another block %s", action, region.name, index, earlier);
  }
  if (before.thread >= kMaxThreads) {
    fail(kRace, "race: %s %s[%zu], which several threads %s since the last barrier", action, region.name,
         index, earlier);
  }
  const uint3 other = machine.fibers[before.thread].index;
  fail(kRace, "race: %s %s[%zu], which thread (%u, %u, %u) %s since the last barrier", action, region.name,
       index, other.x, other.y, other.z, earlier);
}

[[noreturn]] __attribute__((cold, noinline)) inline void fail_place(
    const Region& region, std::ptrdiff_t offset, size_t bytes, size_t alignment) {
  const long long index = offset >> region.shift;
  if (offset < 0 || static_cast<size_t>(offset) + bytes > region.bytes) {
    fail(kOutOfBounds, "out of bounds: %zu bytes at %s[%lld], which has %zu elements", bytes, region.name,
         index, region.count());
  }
  fail(kMisaligned, "misaligned: %zu bytes at %s[%lld], wanted at a multiple of %zu bytes", bytes,
       region.name, index, alignment);
}

[[noreturn]] __attribute__((cold, noinline)) inline void fail_uninitialized(const Region& region, size_t index) {
  fail(kUninitialized, "uninitialized: reads %s[%zu], which nothing has written", region.name, index);
}

inline Place locate(const Region& region, const void* address, size_t bytes, size_t alignment) {
  const std::ptrdiff_t offset = static_cast<const char*>(address) - region.base;
  const bool is_inside = offset >= 0 && static_cast<size_t>(offset) + bytes <= region.bytes;
  if (!is_inside || static_cast<size_t>(offset) % alignment != 0) fail_place(region, offset, bytes, alignment);
  return {region, static_cast<size_t>(offset), bytes};
}

template <class Visit>
inline void for_each_cell(const Place& place, Visit visit) {
  const size_t end = (place.offset + place.bytes - 1) >> place.region.shift;
  for (size_t i = place.offset >> place.region.shift; i <= end; ++i) visit(i, place.region.cells[i]);
}

inline Access join_reads(const Access& before, Access now) {
  if (before.block != now.block) {
    now.block = kSeveralBlocks;
  } else {
    const unsigned warp = warp_of(now);
    now.thread = static_cast<uint16_t>(warp_of(before) == warp ? kSeveralInWarp + warp : kSeveral);
  }
  return now;
}

inline void note_read(const Place& place) {
  const Region& region = place.region;
  for_each_cell(place, [&region](size_t i, Cell& cell) {
    if (!is_written(cell, region)) fail_uninitialized(region, i);
    if (is_concurrent(cell.write, region)) fail_race(region, i, "reads", cell.write, "wrote");
    const Access now = access_now();
    cell.read = is_concurrent(cell.read, region) ? join_reads(cell.read, now) : now;
  });
}

inline void note_write(const Place& place, bool changes) {
  const Region& region = place.region;
  for_each_cell(place, [&region, changes](size_t i, Cell& cell) {
    if (changes || cell.write.is_atomic) {
      if (is_concurrent(cell.write, region)) fail_race(region, i, "writes", cell.write, "wrote");
      if (is_concurrent(cell.read, region)) fail_race(region, i, "writes", cell.read, "read");
    }
    cell.write = access_now();
  });
}

inline void note_atomic(const Place& place) {
  const Region& region = place.region;
  for_each_cell(place, [&region](size_t i, Cell& cell) {
    if (!is_written(cell, region)) fail_uninitialized(region, i);
    if (!cell.write.is_atomic && is_concurrent(cell.write, region)) {
      fail_race(region, i, "changes", cell.write, "wrote");
    }
    if (is_concurrent(cell.read, region)) fail_race(region, i, "changes", cell.read, "read");
    cell.write = access_now(true);
  });
}

template <class T>
class Pointer;

// What `p[i]` and `*p` are: reads when it is converted, writes when it is assigned. Values are passed by
// value, since binding a reference to an element past the end of an array would be no fault.
template <class T>
class Reference {
 public:
  using Value = std::remove_cv_t<T>;

  Reference(T* at, const Region* region) : at_(at), region_(region) {}
  Reference(const Reference&) = default;

  operator Value() const { return load(); }
  template <class U>
  explicit operator U() const {
    return static_cast<U>(load());
  }
  Pointer<T> operator&() const { return {at_, region_}; }

  Value load() const {
    note_read(locate(*region_, at_, sizeof(T), alignof(T)));
    return *at_;
  }

  const Reference& operator=(const Reference& other) const { return store(other.load()); }
  const Reference& operator=(Value value) const { return store(value); }
  const Reference& operator+=(Value value) const { return store(load() + value); }
  const Reference& operator-=(Value value) const { return store(load() - value); }
  const Reference& operator*=(Value value) const { return store(load() * value); }
  const Reference& operator/=(Value value) const { return store(load() / value); }
  const Reference& operator|=(Value value) const { return store(load() | value); }
  const Reference& operator&=(Value value) const { return store(load() & value); }
  const Reference& operator^=(Value value) const { return store(load() ^ value); }
  const Reference& operator++() const { return *this += Value(1); }

 private:
  const Reference& store(Value value) const {
    const Place place = locate(*region_, at_, sizeof(T), alignof(T));
    note_write(place, std::memcmp(at_, &value, sizeof value) != 0);
    std::memcpy(at_, &value, sizeof value);
    return *this;
  }

  T* at_;
  const Region* region_;
};

template <class T>
class Pointer {
 public:
  Pointer(T* at, const Region* region) : at_(at), region_(region) {}

  Reference<T> operator*() const { return {at_, region_}; }
  Reference<T> operator[](std::ptrdiff_t i) const { return {at_ + i, region_}; }
  Pointer operator+(std::ptrdiff_t i) const { return {at_ + i, region_}; }
  Pointer operator-(std::ptrdiff_t i) const { return {at_ - i, region_}; }
  Pointer& operator+=(std::ptrdiff_t i) { return *this = *this + i; }
  Pointer& operator++() { return *this += 1; }

  template <class U>
  Pointer<U> cast() const {
    return {(U*)at_, region_};  // as the source's cast: it may drop a const
  }
  T* claim() const {
    note_atomic(locate(*region_, at_, sizeof(T), alignof(T)));
    return at_;
  }

 private:
  T* at_;
  const Region* region_;
};

// `__shared__ T name[kCount]`.
template <class T, size_t kCount>
class Shared {
 public:
  explicit Shared(const char* name)
      : region_{name, reinterpret_cast<char*>(data_), sizeof data_, kCellShift<T>, true, false, cells_} {}

  Reference<T> operator*() { return begin()[0]; }
  Reference<T> operator[](std::ptrdiff_t i) { return begin()[i]; }
  Pointer<T> operator+(std::ptrdiff_t i) { return begin() + i; }
  Pointer<T> begin() { return {data_, &region_}; }

 private:
  alignas(16) T data_[kCount];
  Cell cells_[sizeof(T) * kCount >> kCellShift<T>];
  Region region_;
};

// `__shared__ T name[kRows][kColumns]`.
template <class T, size_t kRows, size_t kColumns>
class SharedTable {
 public:
  explicit SharedTable(const char* name) : all_(name) {}

  Pointer<T> operator[](std::ptrdiff_t row) { return all_ + row * static_cast<std::ptrdiff_t>(kColumns); }

 private:
  Shared<T, kRows * kColumns> all_;
};

// `extern __shared__`: one region for all names, in cells of one byte since its types are not known.
// Its extent is that of the launch.
inline Region dynamic_region{"dynamic shared memory", reinterpret_cast<char*>(dynamic_memory), 0, 0, true,
                             false, nullptr};

template <class T>
Pointer<T> dynamic_shared() {
  return {reinterpret_cast<T*>(dynamic_memory), &dynamic_region};
}

// For atomic operations: the address, once the access is allowed.
template <class T>
T* claim(Pointer<T> pointer) {
  return pointer.claim();
}

// `(U*)(pointer)` and `reinterpret_cast<U*>(pointer)` of the source.
template <class U, class T>
Pointer<U> cast(Pointer<T> pointer) {
  return pointer.template cast<U>();
}
template <class U, class T, size_t kCount>
Pointer<U> cast(Shared<T, kCount>& array) {
  return array.begin().template cast<U>();
}
template <class U, class T>
U* cast(T* pointer) {
  return (U*)pointer;
}

// The value of what an expression of the source names.
template <class T>
auto plain(Reference<T> reference) {
  return reference.load();
}

}  // namespace emu

// Called where GCC's and Clang's -fsanitize=bounds,integer-divide-by-zero find a fault.
namespace emu {
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
}  // namespace emu

extern "C" inline __attribute__((used)) void __ubsan_handle_out_of_bounds(emu::SourceLocation* at, void* index) {
  emu::fail(emu::kOutOfBounds, "out of bounds: element %lld of an array, line %u",
            static_cast<long long>(reinterpret_cast<std::intptr_t>(index)), at->line);
}
extern "C" inline __attribute__((used)) void __ubsan_handle_divrem_overflow(emu::SourceLocation* at, void*, void*) {
  emu::fail(emu::kArithmetic, "division by zero, line %u", at->line);
}
