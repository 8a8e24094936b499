// The keywords, variables and functions of CUDA C++ that generated kernels use.
#pragma once

#include <math.h>  // the global names, with overloads

#include <climits>

#include "emulator/half.h"
#include "emulator/scheduler.h"
#include "emulator/vectors.h"
#ifdef EMU_CHECKED
#include "emulator/memory.h"
#endif

#define __CUDA_ARCH__ 800
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __inline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#ifndef EMU_CHECKED  // checked builds have theirs rewritten; whatever is left must not compile
#define __shared__ static __attribute__((aligned(16), section("emu_shared")))
#endif

#define threadIdx (emu::machine.current->index)
#define blockIdx (emu::machine.block_index)
#define blockDim (emu::machine.block)
#define gridDim (emu::machine.grid)
constexpr int warpSize = emu::kWarpSize;

// ---- barriers and warps -----------------------------------------------------------------------------

#define __syncthreads() emu::barrier(__LINE__)

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __syncwarp(unsigned mask = emu::kFullWarp) { emu::exchange(mask, 0, emu::kVote); }
inline unsigned __activemask() { return emu::machine.warps[emu::machine.current->warp()].live; }

namespace emu {

// The value behind what a checked build hands out.
template <class T>
T plain(T value) {
  return value;
}
template <class T>
using Plain = decltype(plain(std::declval<T>()));

template <class T>
Plain<T> shuffle(unsigned mask, T variable, int source) {
  Plain<T> value = plain(variable);
  static_assert(sizeof value <= sizeof(uint64_t), "a register or two");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int lane() { return static_cast<int>(machine.current->lane()); }
// Warps are cut into parts of `width` lanes, a power of two.
inline int first_lane(int width) { return lane() & -width; }

}  // namespace emu

template <class T>
emu::Plain<T> __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu::shuffle(mask, value, emu::first_lane(width) + (source & (width - 1)));
}
template <class T>
emu::Plain<T> __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = emu::lane() + static_cast<int>(delta);
  return emu::shuffle(mask, value, source < emu::first_lane(width) + width ? source : emu::lane());
}
template <class T>
emu::Plain<T> __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = emu::lane() - static_cast<int>(delta);
  return emu::shuffle(mask, value, source >= emu::first_lane(width) ? source : emu::lane());
}
template <class T>
emu::Plain<T> __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int source = emu::lane() ^ bits;
  return emu::shuffle(mask, value, source < emu::first_lane(width) + width ? source : emu::lane());
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(emu::exchange(mask, predicate != 0, emu::kVote));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate == 0) == 0; }

// ---- memory -----------------------------------------------------------------------------------------

namespace emu {

#ifndef EMU_CHECKED
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(dynamic_memory);
}
#endif

template <class T>
T* claim(T* pointer) {
  return pointer;
}

// A type that is given, not deduced.
template <class T>
struct Given {
  using Type = T;
};
template <class T>
using Target = std::remove_reference_t<decltype(*claim(std::declval<T>()))>;

template <class P, class Change>
Target<P> change(P pointer, Change new_value) {
  Target<P>* at = claim(pointer);
  const Target<P> before = *at;
  *at = new_value(before);
  return before;
}

}  // namespace emu

template <class P>
auto __ldg(P pointer) {
  return emu::plain(*pointer);
}

// Only one thread runs at any time, so each of these is atomic as it stands.
#define EMU_ATOMIC(name, expression)                                            \
  template <class P, class T = emu::Target<P>>                                  \
  T name(P pointer, typename emu::Given<T>::Type value) {                       \
    return emu::change(pointer, [value](T old) { return static_cast<T>(expression); }); \
  }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicAnd, old & value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicExch, ((void)old, value))
#undef EMU_ATOMIC
template <class P, class T = emu::Target<P>>
T atomicCAS(P pointer, typename emu::Given<T>::Type expected, typename emu::Given<T>::Type value) {
  return emu::change(pointer, [=](T old) { return old == expected ? value : old; });
}

// ---- arithmetic -------------------------------------------------------------------------------------

// Overloads as CUDA has them. Of a number and a NaN they give the number (`b != b`).
#define EMU_MIN_MAX(R, A, B)                             \
  inline R max(A x, B y) {                               \
    const R a = static_cast<R>(x), b = static_cast<R>(y); \
    return a > b || b != b ? a : b;                      \
  }                                                      \
  inline R min(A x, B y) {                               \
    const R a = static_cast<R>(x), b = static_cast<R>(y); \
    return a < b || b != b ? a : b;                      \
  }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(unsigned, unsigned, int)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(float, float, float)
EMU_MIN_MAX(double, double, double)
EMU_MIN_MAX(double, float, double)
EMU_MIN_MAX(double, double, float)
#undef EMU_MIN_MAX

// Macros, since the C library declares functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return min(max(x, 0.0f), 1.0f); }

inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mul24(int a, int b) { return a * b; }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}

namespace emu {
template <class Byte>
int dot_bytes(unsigned a, unsigned b, int sum) {
  for (int shift = 0; shift < 32; shift += 8) {
    sum += static_cast<Byte>(a >> shift) * static_cast<Byte>(b >> shift);
  }
  return sum;
}
}  // namespace emu
inline int __dp4a(int a, int b, int c) {
  return emu::dot_bytes<signed char>(static_cast<unsigned>(a), static_cast<unsigned>(b), c);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return static_cast<unsigned>(emu::dot_bytes<unsigned char>(a, b, static_cast<int>(c)));
}
