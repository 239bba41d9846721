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

inline float widen_fp16(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16, magnitude = (x & 0x7fffu) << 13;
  const float finite = bits<float>(magnitude) * 0x1p112f;  // exact; also where it is subnormal
  const uint32_t word = magnitude >= 0x0f800000u ? magnitude + 0x70000000u : bits<uint32_t>(finite);
  return bits<float>(word | sign);
}

inline float round_fp16(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u & 0x80000000u, magnitude = u ^ sign;
  const float size = bits<float>(magnitude);
  const float normal = bits<float>((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu);
  const float subnormal = (size + 0.5f) - 0.5f;  // a multiple of 2^-24
  float y = size < 0x1p-14f ? subnormal : normal;
  y = size >= 65520.0f ? INFINITY : y;
  return bits<float>(bits<uint32_t>(x == x ? y : NAN) | sign);
}

inline uint16_t narrow_fp16(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u & 0x80000000u, magnitude = u ^ sign;
  const float size = bits<float>(magnitude);
  const uint32_t finite = size < 0x1p-14f ? uint32_t(int32_t(size * 0x1p24f))
                                          : (magnitude >> 13) - (112u << 10);
  const uint32_t other = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return uint16_t((magnitude < 0x7f800000u ? finite : other) | (sign >> 16));
}

}  // namespace
"""
