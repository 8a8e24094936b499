// The threads of one block: fibers that take turns at barriers and at warp-wide operations.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "emulator/abi.h"
#include "emulator/context.h"

struct uint3 {
  unsigned x, y, z;
};

namespace emu {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Stacks do not begin a power of two apart, or all their tops would share a few lines of the cache.
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kStackStride = kStackBytes + 5 * 64;

// What an undefined value reads as; as a float it is a NaN, which arithmetic passes on.
constexpr uint64_t kPoison = ~uint64_t{0};
constexpr int kPoisonByte = 0xff;

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kDone };

constexpr int kVote = -1;  // in place of a source lane: asks for the lanes whose deposit is not 0

struct Fiber {
  Context context;
  uint3 index;       // threadIdx
  unsigned linear;   // its number in the block
  unsigned rank;     // its place in the order of turns
  State state;
  int line;          // of the barrier at which it waits
  uint32_t barriers; // how many it has passed
  uint32_t syncs;    // number of the last operation of its warp in which it took part
  // Of the operation of its warp in which it waits:
  unsigned mask;
  int source;
  uint64_t deposit;
  uint64_t result;

  unsigned warp() const { return linear / kWarpSize; }
  unsigned lane() const { return linear % kWarpSize; }
};

struct Warp {
  unsigned live;     // lanes, as bits
  unsigned waiting;
  uint32_t syncs;
};

struct Machine {
  uint3 grid, block, block_index;
  unsigned threads;
  unsigned live;
  unsigned at_barrier;
  uint32_t serial = 0;        // of the running block; never used twice
  uint32_t first_serial = 0;  // of this launch
  Fiber* current = nullptr;
  Fiber fibers[kMaxThreads];
  uint16_t order[kMaxThreads];  // turn -> fiber
  Warp warps[kMaxThreads / kWarpSize];
  Context host;
  char* stacks = nullptr;
  void (*body)(void**) = nullptr;
  void** arguments = nullptr;
  Fault* fault = nullptr;
};

inline Machine machine;

constexpr size_t kMostSharedBytes = 227 << 10;  // of a block on sm_90
alignas(128) inline unsigned char dynamic_memory[kMostSharedBytes];

inline void describe(FaultKind kind, const char* format, va_list arguments) {
  Fault& fault = *machine.fault;
  fault.kind = kind;
  vsnprintf(fault.what, sizeof fault.what, format, arguments);
}

// A fault outside of any thread.
__attribute__((format(printf, 2, 3))) inline int report(FaultKind kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe(kind, format, arguments);
  va_end(arguments);
  return kind;
}

// A fault of the running thread: leaves the launch for good; the other fibers are abandoned.
[[noreturn]] __attribute__((cold, noinline, format(printf, 2, 3))) inline void fail(
    FaultKind kind, const char* format, ...) {
  const uint3 block = machine.block_index, thread = machine.current->index;
  va_list arguments;
  va_start(arguments, format);
  describe(kind, format, arguments);
  va_end(arguments);
  std::copy_n(&block.x, 3, machine.fault->block);
  std::copy_n(&thread.x, 3, machine.fault->thread);
  machine.current->context.switch_to(machine.host);
  __builtin_unreachable();
}

inline Fiber* find_ready() {
  const unsigned rank = machine.current->rank;
  for (unsigned step = 1; step <= machine.threads; ++step) {
    const unsigned turn = rank + step < machine.threads ? rank + step : rank + step - machine.threads;
    Fiber& fiber = machine.fibers[machine.order[turn]];
    if (fiber.state == State::kReady) return &fiber;
  }
  return nullptr;
}

[[noreturn]] inline void fail_deadlock() {
  const Fiber* end = machine.fibers + machine.threads;
  const Fiber* at_barrier = std::find_if(
      static_cast<const Fiber*>(machine.fibers), end,
      [](const Fiber& fiber) { return fiber.state == State::kAtBarrier; });
  const Fiber* in_warp = std::find_if(
      static_cast<const Fiber*>(machine.fibers), end,
      [](const Fiber& fiber) { return fiber.state == State::kInWarp; });
  if (at_barrier == end) {
    fail(kBarrier, "deadlock: thread number %u waits for lanes that never come to its warp operation",
         in_warp->linear);
  }
  fail(kBarrier, "deadlock: %u of %u threads wait at the barrier of line %d, thread number %u elsewhere",
       machine.at_barrier, machine.threads, at_barrier->line, in_warp == end ? 0 : in_warp->linear);
}

// Lets another fiber run; returns when this one's turn comes.
inline void yield() {
  Fiber* me = machine.current;
  Fiber* next = find_ready();
  if (next == me) return;
  if (next == nullptr) {
    if (machine.live != 0) fail_deadlock();
    me->context.switch_to(machine.host);
  }
  machine.current = next;
  me->context.switch_to(next->context);
}

inline void release_barrier() {
  const int line = machine.current->line;
  machine.at_barrier = 0;
  for (unsigned i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    if (fiber.line != line) {
      fail(kBarrier, "divergent barrier: this thread waits at line %d, thread number %u at line %d",
           line, i, fiber.line);
    }
    ++fiber.barriers;
    fiber.state = State::kReady;
  }
}

__attribute__((noinline)) inline void barrier(int line) {
  if (machine.threads == 1) return;
  Fiber& me = *machine.current;
  me.state = State::kAtBarrier;
  me.line = line;
  if (++machine.at_barrier == machine.threads) release_barrier();
  if (machine.at_barrier != 0 && machine.at_barrier == machine.live) {
    fail(kBarrier, "divergent barrier: %u of %u threads wait at line %d, the others have ended",
         machine.live, machine.threads, line);
  }
  yield();
}

inline uint64_t result_of(const Fiber& fiber, unsigned group, unsigned votes) {
  if (fiber.source == kVote) return votes;
  if ((group >> fiber.source & 1) == 0) return kPoison;  // undefined in CUDA
  return machine.fibers[fiber.warp() * kWarpSize + fiber.source].deposit;
}

template <class Visit>
inline void for_each_lane(unsigned warp, unsigned lanes, Visit visit) {
  for (; lanes != 0; lanes &= lanes - 1) visit(machine.fibers[warp * kWarpSize + __builtin_ctz(lanes)]);
}

// Ends the operation in which the lanes of a mask wait, once all of them do that still live.
inline void release_warp(unsigned number, unsigned mask) {
  Warp& warp = machine.warps[number];
  const unsigned group = mask & warp.live;
  if ((warp.waiting & group) != group) return;
  ++warp.syncs;
  warp.waiting &= ~group;
  unsigned votes = 0;
  for_each_lane(number, group, [&](Fiber& fiber) {
    if ((fiber.mask & warp.live) != group) {
      fail(kBarrier, "warp operation: masks %#x and %#x (lane %u) differ", mask, fiber.mask, fiber.lane());
    }
    votes |= unsigned{fiber.deposit != 0} << fiber.lane();
  });
  for_each_lane(number, group, [&](Fiber& fiber) {
    fiber.result = result_of(fiber, group, votes);
    fiber.syncs = warp.syncs;
    fiber.state = State::kReady;
  });
}

// One warp-wide operation: each lane of the mask leaves a value and takes the one of its source lane.
__attribute__((noinline)) inline uint64_t exchange(unsigned mask, uint64_t deposit, int source) {
  Fiber& me = *machine.current;
  const unsigned bit = 1u << me.lane();
  if ((mask & bit) == 0) return kPoison;  // undefined in CUDA; TVM does so and drops the value
  me.mask = mask;
  me.deposit = deposit;
  me.source = source;
  me.state = State::kInWarp;
  machine.warps[me.warp()].waiting |= bit;
  release_warp(me.warp(), mask);
  yield();
  return me.result;
}

inline void end_thread() {
  Fiber& me = *machine.current;
  Warp& warp = machine.warps[me.warp()];
  me.state = State::kDone;
  warp.live &= ~(1u << me.lane());
  --machine.live;
  if (machine.live != 0 && machine.at_barrier == machine.live) {
    fail(kBarrier, "divergent barrier: this thread ends while all others wait at a barrier");
  }
  if (warp.waiting != 0) {
    release_warp(me.warp(), machine.fibers[me.warp() * kWarpSize + __builtin_ctz(warp.waiting)].mask);
  }
}

inline void reset_block() {
  machine.live = machine.threads;
  machine.at_barrier = 0;
  for (unsigned w = 0; w * kWarpSize < machine.threads; ++w) {
    const unsigned lanes = std::min(kWarpSize, machine.threads - w * kWarpSize);
    machine.warps[w] = Warp{kFullWarp >> (kWarpSize - lanes), 0, 0};
  }
}

inline void reset_fiber(Fiber& fiber) {
  fiber.state = State::kReady;
  fiber.line = 0;
  fiber.barriers = 0;
  fiber.syncs = 0;
}

inline bool allocate_stacks() {
  if (machine.stacks != nullptr) return true;
  void* memory = mmap(nullptr, kMaxThreads * kStackStride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) machine.stacks = static_cast<char*>(memory);
  return machine.stacks != nullptr;
}

// One thread, on its own stack.
inline void enter_thread() {
  machine.body(machine.arguments);
  end_thread();
  yield();
  __builtin_unreachable();
}

// Runs one block whose threads may wait for each other.
inline void run_fibers() {
  reset_block();
  for (unsigned i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    reset_fiber(fiber);
    fiber.context.start(machine.stacks + i * kStackStride, kStackBytes, enter_thread);
  }
  machine.current = &machine.fibers[machine.order[0]];
  machine.host.switch_to(machine.current->context);
}

// All threads of a block one after the other, on one stack.
inline void enter_loop() {
  for (unsigned turn = 0; turn < machine.threads; ++turn) {
    machine.current = &machine.fibers[machine.order[turn]];
    reset_fiber(*machine.current);
    machine.body(machine.arguments);
  }
  machine.current->context.switch_to(machine.host);
  __builtin_unreachable();
}

// Runs one block whose threads do not wait.
inline void run_loop() {
  reset_block();
  Context loop;
  loop.start(machine.stacks, kStackBytes, enter_loop);
  machine.host.switch_to(loop);
}

}  // namespace emu
