"""C++ functions that our own kernels call: 16-bit words, and rounding to 16 bits in fp32."""

HELPERS = """\
#include <cstdint>
#include <cstring>

// Of <cmath>, which a compiler takes a third of its time to read.
#ifndef NAN
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#endif

namespace {

inline float absolute(float x) { return __builtin_fabsf(x); }
inline double absolute(double x) { return __builtin_fabs(x); }
inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <typename To, typename From> inline To bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Without the bits of a NaN that a rounding could carry into an infinity or a zero.
template <typename T> inline T plain_nan(T x) { return x == x ? x : T(NAN); }

inline float widen_bf16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

// Round to nearest even, of what is infinite or a NaN with zeros for its last 16 bits, or finite.
inline float round_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  return bits<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// The same of any NaN too. By masks: a choice would be a branch that no vectors are made of.
inline float round_any_bf16(float x) {
  const uint32_t nan = -uint32_t(x != x);
  return round_bf16(bits<float>((bits<uint32_t>(x) & ~nan) | (nan & 0x7fc00000u)));
}

// Of what is a number of bf16.
inline uint16_t narrow_bf16(float x) { return uint16_t(bits<uint32_t>(x) >> 16); }

// One word or the other, without a branch.
inline uint32_t chosen(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -uint32_t(first);
  return (a & mask) | (b & ~mask);
}

inline float widen_fp16(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16, magnitude = (x & 0x7fffu) << 13;
  const float finite = bits<float>(magnitude) * 0x1p112f;  // exact; also where it is subnormal
  const uint32_t other = magnitude + 0x70000000u;
  return bits<float>(chosen(magnitude >= 0x0f800000u, other, bits<uint32_t>(finite)) | sign);
}

inline float round_fp16(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u & 0x80000000u, magnitude = u ^ sign;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
  const float subnormal = (bits<float>(magnitude) + 0.5f) - 0.5f;  // a multiple of 2^-24
  uint32_t y = chosen(magnitude < 0x38800000u, bits<uint32_t>(subnormal), normal);  // 2^-14
  y = chosen(magnitude >= 0x477ff000u, 0x7f800000u, y);                             // 65520
  return bits<float>(chosen(magnitude > 0x7f800000u, 0x7fc00000u, y) | sign);
}

inline uint16_t narrow_fp16(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u & 0x80000000u, magnitude = u ^ sign;
  // Of what is no subnormal number the product is not used; it is one that an int32 holds.
  const float size = bits<float>(chosen(magnitude < 0x38800000u, magnitude, 0u));
  uint32_t y = chosen(magnitude < 0x38800000u, uint32_t(int32_t(size * 0x1p24f)),
                      (magnitude >> 13) - (112u << 10));
  y = chosen(magnitude >= 0x7f800000u, 0x7c00u, y);
  return uint16_t(chosen(magnitude > 0x7f800000u, 0x7e00u, y) | (sign >> 16));
}

}  // namespace
"""
