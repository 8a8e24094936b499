// CUDA's short vectors. Those of 2 and 4 components are aligned to their size (16 bytes at the most).
#pragma once

#include "emulator/scheduler.h"  // uint3

#define EMU_VECTOR_1_2_4(T, N)                                                  \
  struct N##1 {                                                                 \
    T x;                                                                        \
  };                                                                            \
  struct alignas(2 * sizeof(T)) N##2 {                                          \
    T x, y;                                                                     \
  };                                                                            \
  struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) N##4 {                     \
    T x, y, z, w;                                                               \
  };                                                                            \
  inline N##1 make_##N##1(T x) { return {x}; }                                  \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                          \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }

#define EMU_VECTOR_3(T, N)                                                      \
  struct N##3 {                                                                 \
    T x, y, z;                                                                  \
  };                                                                            \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }

#define EMU_VECTORS(T, N) EMU_VECTOR_1_2_4(T, N) EMU_VECTOR_3(T, N)

EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTOR_1_2_4(unsigned, uint)
EMU_VECTORS(long, long)
EMU_VECTORS(unsigned long, ulong)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)

inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
