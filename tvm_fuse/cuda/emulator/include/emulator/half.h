// IEEE binary16 by hand, since C++ of 2017 has none: arithmetic in float, rounded to nearest even after
// each operation, which for + - * / and sqrt gives the correctly rounded result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace emu {

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t half_bits_portable(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);  // NaN
  if (magnitude >= 0x47800000) return sign | 0x7c00;                             // 2^16 and more
  if (magnitude < 0x38800000) {  // below 2^-14: a float near 1/2 has the spacing of subnormal halfs
    const float rounded = bit_cast<float>(magnitude) + 0.5f;
    return sign | (bit_cast<uint32_t>(rounded) - bit_cast<uint32_t>(0.5f));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | ((rounded - (112u << 23)) >> 13);  // 112 = 127 - 15, the exponents' biases
}

inline float half_value_portable(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} << 16 & 0x80000000, magnitude = uint32_t{bits} << 13 & 0x0fffffff;
  if (magnitude >= 0x7c00u << 13) {  // infinity or a NaN, which becomes a quiet one
    const uint32_t quiet = magnitude > 0x7c00u << 13 ? 0x400000 : 0;
    return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x7fffff) | quiet);
  }
  if (magnitude >= 0x0400u << 13) return bit_cast<float>(sign | (magnitude + (112u << 23)));
  const float value = bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(113u << 23);
  return bit_cast<float>(sign | bit_cast<uint32_t>(value));
}

#ifdef __F16C__
inline uint16_t half_bits(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float half_value(uint16_t bits) { return _cvtsh_ss(bits); }
#else
inline uint16_t half_bits(float value) { return half_bits_portable(value); }
inline float half_value(uint16_t bits) { return half_value_portable(bits); }
#endif

// To odd: a float that a second rounding, to half, cannot tell from the double.
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || std::isnan(value)) return nearest;
  uint32_t bits = bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  return bit_cast<float>(bits | 1);
}

}  // namespace emu

struct alignas(2) __half {
  uint16_t bits;

  __half() = default;
  __half(float value) : bits(emu::half_bits(value)) {}
  __half(double value) : bits(emu::half_bits(emu::round_to_odd(value))) {}
  __half(int value) : __half(static_cast<double>(value)) {}
  __half(unsigned value) : __half(static_cast<double>(value)) {}
  __half(short value) : __half(static_cast<float>(value)) {}
  __half(unsigned short value) : __half(static_cast<float>(value)) {}
  __half(signed char value) : __half(static_cast<float>(value)) {}
  __half(unsigned char value) : __half(static_cast<float>(value)) {}
  __half(long value) : __half(static_cast<double>(value)) {}  // beyond 2^53 it is infinite anyway
  __half(unsigned long value) : __half(static_cast<double>(value)) {}
  __half(long long value) : __half(static_cast<double>(value)) {}
  __half(unsigned long long value) : __half(static_cast<double>(value)) {}

  operator float() const { return emu::half_value(bits); }

  __half& operator+=(__half other) { return *this = __half(float(*this) + float(other)); }
  __half& operator-=(__half other) { return *this = __half(float(*this) - float(other)); }
  __half& operator*=(__half other) { return *this = __half(float(*this) * float(other)); }
  __half& operator/=(__half other) { return *this = __half(float(*this) / float(other)); }
};
using half = __half;

inline __half operator+(__half a, __half b) { return a += b; }
inline __half operator-(__half a, __half b) { return a -= b; }
inline __half operator*(__half a, __half b) { return a *= b; }
inline __half operator/(__half a, __half b) { return a /= b; }
inline __half operator+(__half a) { return a; }
inline __half operator-(__half a) {
  a.bits ^= 0x8000;
  return a;
}
inline bool operator==(__half a, __half b) { return float(a) == float(b); }
inline bool operator!=(__half a, __half b) { return float(a) != float(b); }
inline bool operator<(__half a, __half b) { return float(a) < float(b); }
inline bool operator>(__half a, __half b) { return float(a) > float(b); }
inline bool operator<=(__half a, __half b) { return float(a) <= float(b); }
inline bool operator>=(__half a, __half b) { return float(a) >= float(b); }

inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline __half __double2half(double value) { return value; }
inline __half __int2half_rn(int value) { return value; }
inline __half __uint2half_rn(unsigned value) { return value; }
inline __half __short2half_rn(short value) { return value; }
inline __half __ushort2half_rn(unsigned short value) { return value; }
inline __half __ll2half_rn(long long value) { return value; }
inline float __half2float(__half value) { return value; }
inline int __half2int_rz(__half value) { return static_cast<int>(float(value)); }
inline int __half2int_rn(__half value) { return static_cast<int>(std::nearbyint(float(value))); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return emu::bit_cast<__half>(bits); }

inline __half __hadd(__half a, __half b) { return a + b; }
inline __half __hsub(__half a, __half b) { return a - b; }
inline __half __hmul(__half a, __half b) { return a * b; }
inline __half __hdiv(__half a, __half b) { return a / b; }
inline __half __hneg(__half a) { return -a; }
inline __half __hfma(__half a, __half b, __half c) {
  return __half(static_cast<double>(float(a)) * float(b) + float(c));
}
inline bool __heq(__half a, __half b) { return a == b; }
inline bool __hne(__half a, __half b) { return a != b; }
inline bool __hlt(__half a, __half b) { return a < b; }
inline bool __hle(__half a, __half b) { return a <= b; }
inline bool __hgt(__half a, __half b) { return a > b; }
inline bool __hge(__half a, __half b) { return a >= b; }
inline bool __hisnan(__half a) { return std::isnan(float(a)); }
inline int __hisinf(__half a) { return std::isinf(float(a)) ? (float(a) < 0 ? -1 : 1) : 0; }
inline __half __habs(__half a) {
  a.bits &= 0x7fff;
  return a;
}
inline __half __hmax(__half a, __half b) { return std::fmax(float(a), float(b)); }
inline __half __hmin(__half a, __half b) { return std::fmin(float(a), float(b)); }

#define EMU_HALF_FUNCTION(name, expression)      \
  inline __half name(__half half_value) {        \
    const float x = half_value;                  \
    return static_cast<float>(expression);       \
  }
EMU_HALF_FUNCTION(hexp, std::exp(x))
EMU_HALF_FUNCTION(hexp2, std::exp2(x))
EMU_HALF_FUNCTION(hexp10, std::pow(10.0, static_cast<double>(x)))
EMU_HALF_FUNCTION(hlog, std::log(x))
EMU_HALF_FUNCTION(hlog2, std::log2(x))
EMU_HALF_FUNCTION(hlog10, std::log10(x))
EMU_HALF_FUNCTION(hsin, std::sin(x))
EMU_HALF_FUNCTION(hcos, std::cos(x))
EMU_HALF_FUNCTION(hsqrt, std::sqrt(x))
EMU_HALF_FUNCTION(hrsqrt, 1 / std::sqrt(x))
EMU_HALF_FUNCTION(hrcp, 1 / x)
EMU_HALF_FUNCTION(hfloor, std::floor(x))
EMU_HALF_FUNCTION(hceil, std::ceil(x))
EMU_HALF_FUNCTION(htrunc, std::trunc(x))
EMU_HALF_FUNCTION(hrint, std::nearbyint(x))
#undef EMU_HALF_FUNCTION

struct alignas(4) __half2 {
  __half x, y;
};
using half2 = __half2;

inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
inline __half2 operator+(__half2 a, __half2 b) { return {a.x + b.x, a.y + b.y}; }
inline __half2 operator-(__half2 a, __half2 b) { return {a.x - b.x, a.y - b.y}; }
inline __half2 operator*(__half2 a, __half2 b) { return {a.x * b.x, a.y * b.y}; }
inline __half2 operator/(__half2 a, __half2 b) { return {a.x / b.x, a.y / b.y}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return a + b; }
inline __half2 __hsub2(__half2 a, __half2 b) { return a - b; }
inline __half2 __hmul2(__half2 a, __half2 b) { return a * b; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hmax2(__half2 a, __half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline __half2 __hmin2(__half2 a, __half2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
