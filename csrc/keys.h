// Layer 0. Stored bits <-> values and ordered integer keys, one value at a time; host and device.
//
// A key orders as the value does: -inf < ... < -0 < +0 < ... < +inf < NaN, every NaN being the one
// canonical NaN. cpu/formats.h has the same arithmetic on vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules.h"

namespace loft {

template <DType kDType>
struct Stored;
template <>
struct Stored<DType::kFloat64> {
  using Bits = int64_t;
  using Value = double;
  static constexpr Bits kInfinity = 0x7ff0000000000000, kNaN = 0x7ff8000000000000;
};
template <>
struct Stored<DType::kFloat32> {
  using Bits = int32_t;
  using Value = float;
  static constexpr Bits kInfinity = 0x7f800000, kNaN = 0x7fc00000;
};
template <>
struct Stored<DType::kFloat16> {
  using Bits = int16_t;
  using Value = float;
  static constexpr Bits kInfinity = 0x7c00, kNaN = 0x7e00;
};
template <>
struct Stored<DType::kBFloat16> {
  using Bits = int16_t;
  using Value = float;
  static constexpr Bits kInfinity = 0x7f80, kNaN = 0x7fc0;
};

template <typename To, typename From>
LOFT_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename Bits>
LOFT_INLINE Bits flip_bits(Bits bits) {  // its own inverse
  constexpr int kShift = 8 * sizeof(Bits) - 1;
  constexpr Bits kMagnitude = static_cast<Bits>(~(uint64_t{1} << kShift));
  return static_cast<Bits>(bits ^ ((bits >> kShift) & kMagnitude));
}

template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Bits key_of(typename Stored<kDType>::Bits bits) {
  using Bits = typename Stored<kDType>::Bits;
  constexpr Bits kMagnitude = static_cast<Bits>(~(uint64_t{1} << (8 * sizeof(Bits) - 1)));
  return (bits & kMagnitude) > Stored<kDType>::kInfinity ? Stored<kDType>::kNaN : flip_bits(bits);
}

// Exact.
LOFT_INLINE float float16_value(int16_t stored) {
  const int32_t bits = stored, magnitude = bits & 0x7fff;
  float value = same_bits<float>(magnitude << 13) * 0x1p112f;  // right for subnormals too
  if (magnitude > 0x7bff) value = same_bits<float>(same_bits<int32_t>(value) | 0x7f800000);
  return same_bits<float>(same_bits<int32_t>(value) | static_cast<int32_t>((bits & 0x8000u) << 16));
}

// To nearest, ties to even.
LOFT_INLINE int16_t float16_bits(float value) {
  const int32_t bits = same_bits<int32_t>(value), magnitude = bits & 0x7fffffff;
  const int32_t sign = (bits >> 16) & 0x8000;
  int32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00;
  } else if (magnitude > 0x477fefff) {
    result = 0x7c00;  // rounds beyond 65504
  } else if (magnitude < 0x38800000) {
    result = same_bits<int32_t>(same_bits<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    result = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return static_cast<int16_t>(result | sign);
}

LOFT_INLINE float bfloat16_value(int16_t stored) {
  return same_bits<float>(
      static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(stored)) << 16));
}

LOFT_INLINE int16_t bfloat16_bits(float value) {
  const uint32_t bits = same_bits<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<int16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Value value_of(typename Stored<kDType>::Bits bits) {
  if constexpr (kDType == DType::kFloat16) {
    return float16_value(bits);
  } else if constexpr (kDType == DType::kBFloat16) {
    return bfloat16_value(bits);
  } else {
    return same_bits<typename Stored<kDType>::Value>(bits);
  }
}

// Rounds to nearest even where the stored type is narrower; -0 becomes +0.
template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Bits bits_of(typename Stored<kDType>::Value value) {
  value = value + static_cast<typename Stored<kDType>::Value>(0);
  if constexpr (kDType == DType::kFloat16) {
    return float16_bits(value);
  } else if constexpr (kDType == DType::kBFloat16) {
    return bfloat16_bits(value);
  } else {
    return same_bits<typename Stored<kDType>::Bits>(value);
  }
}

}  // namespace loft
