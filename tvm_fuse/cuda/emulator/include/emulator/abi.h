// What a library of emulated kernels and its callers (Python, the emulated driver) exchange.
//
// A library exports
//   int emu_count(); const char* emu_name(int kernel);
//   int emu_attribute(int kernel, int which); int emu_is_pointer(int kernel, int parameter);
//   int emu_launch(int kernel, const emu::Request*, emu::Fault*);   0, or the kind of the fault
#pragma once

#include <cstdint>

namespace emu {

enum FaultKind : int32_t {
  kNoFault,
  kBadLaunch,
  kOutOfBounds,
  kMisaligned,
  kUninitialized,
  kRace,
  kBarrier,
  kArithmetic,
  kUnwritten,
};

// `which` of emu_attribute.
enum Attribute : int32_t { kMaxThreadsPerBlock, kStaticSharedBytes, kParameterCount };

// The memory that a pointer parameter may touch.
struct Extent {
  void* base;
  unsigned long bytes;
  int32_t is_initialized;  // else every element must be written, and none be read before
};

struct Request {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;  // dynamic shared memory
  uint32_t seed;          // 0: threads and blocks in order; else an order of its own
  void** arguments;       // where each parameter's value lies, as for cuLaunchKernel
  const Extent* extents;  // one a parameter; read by checked libraries only
};

struct Fault {
  int32_t kind;
  uint32_t block[3];
  uint32_t thread[3];
  char what[256];
};

}  // namespace emu
