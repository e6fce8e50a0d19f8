// What the kernels' sources ask of arithmetic, on a CPU. Included behind `DEVICE`.
#pragma once

#include <cmath>
#include <cstring>

DEVICE float as_float(u32 v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
DEVICE u32 as_word(float v) {
  u32 u;
  std::memcpy(&u, &v, 4);
  return u;
}
DEVICE float reciprocal_root(float v) { return static_cast<float>(1.0 / std::sqrt(double(v))); }
DEVICE float root(float v) { return std::sqrt(v); }

DEVICE u32 float16_bits(float v) {  // to nearest, ties to even
  const u32 u = as_word(v), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fffu;
  if (size >= 0x477ff000u) return sign | 0x7c00u;
  if (size < 0x38800000u) {  // subnormal: let the FPU round to a multiple of 2^-24
    const float scaled = std::nearbyint(std::fabs(v) * 16777216.0f);
    return sign | static_cast<u32>(scaled);
  }
  return sign | ((size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
}
DEVICE float low_float16(u32 v) {
  const u32 sign = (v & 0x8000u) << 16, exponent = v >> 10 & 31u, fraction = v & 0x3ffu;
  if (exponent == 0) {
    const float small = fraction * (1.0f / 16777216.0f);
    return as_float(as_word(small) | sign);
  }
  if (exponent == 31) return as_float(sign | 0x7f800000u | fraction << 13);
  return as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
DEVICE float high_float16(u32 v) { return low_float16(v >> 16); }
DEVICE u32 pack_float16(float low, float high) {
  return float16_bits(low) | float16_bits(high) << 16;
}
DEVICE u32 bfloat16_bits(float v) {
  const u32 u = as_word(v);
  return v != v ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
DEVICE u32 pack_bfloat16(float low, float high) {
  return bfloat16_bits(low) | bfloat16_bits(high) << 16;
}
