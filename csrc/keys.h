// Layer 0. Stored bits <-> values and ordered integer keys, one value at a time; host and device.
//
// A key orders as the value does: -inf < ... < -0 < +0 < ... < +inf < NaN, every NaN being the one
// canonical NaN. cpu/formats.h has the same on vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules.h"

namespace loft {

// Bits: what memory holds. Value: what sums are computed in.
template <typename B, typename V, B kInfinityBits, B kNaNBits>
struct StoredAs {
  using Bits = B;
  using Value = V;
  static constexpr Bits kInfinity = kInfinityBits, kNaN = kNaNBits;  // positive, the canonical NaN
};
template <DType kDType>
struct Stored;
template <>
struct Stored<DType::kFloat64> : StoredAs<int64_t, double, 0x7ff0000000000000, 0x7ff8000000000000> {
};
template <>
struct Stored<DType::kFloat32> : StoredAs<int32_t, float, 0x7f800000, 0x7fc00000> {};
template <>
struct Stored<DType::kFloat16> : StoredAs<int16_t, float, 0x7c00, 0x7e00> {};
template <>
struct Stored<DType::kBFloat16> : StoredAs<int16_t, float, 0x7f80, 0x7fc0> {};

template <typename To, typename From>
LOFT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Flips all bits but the sign where the sign is set: the bits of a negative value fall as the value
// rises, and must rise with it. Its own inverse. Of int8_t, say:
//   +2  00000010 -> 00000010      -1  10000001 -> 11111110
//   +1  00000001 -> 00000001      -2  10000010 -> 11111101   read as integers: -3 < -2 < 1 < 2
// Of one value, or of a vector with such lanes.
template <typename I, typename Lane = I>
LOFT_INLINE I flip_bits(I bits) {
  constexpr int kShift = 8 * sizeof(Lane) - 1;
  constexpr Lane kMagnitude = static_cast<Lane>(~(uint64_t{1} << kShift));
  return static_cast<I>(bits ^ ((bits >> kShift) & kMagnitude));
}

template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Bits key_of(typename Stored<kDType>::Bits bits) {
  using Bits = typename Stored<kDType>::Bits;
  constexpr Bits kMagnitude = static_cast<Bits>(~(uint64_t{1} << (8 * sizeof(Bits) - 1)));
  return (bits & kMagnitude) > Stored<kDType>::kInfinity ? Stored<kDType>::kNaN : flip_bits(bits);
}

// The next three take one value (I int32_t, V float) or a vector of them.

// From float16, exact. `bits`: the stored 16 bits with their sign extended to 32.
template <typename V, typename I>
LOFT_INLINE V widen_float16(I bits) {
  const I magnitude = bits & 0x7fff;
  // The exponent's bias is 127 instead of 15. The product is right for subnormals, too.
  const I scaled = bit_cast<I>(bit_cast<V>(magnitude << 13) * 0x1p112f);
  const I special = magnitude > I{} + 0x7bff ? I{} + 0x7f800000 : I{};  // infinite or NaN
  const I sign = (bits - magnitude) * 65536;                            // -2^15 or 0, to the top
  return bit_cast<V>(scaled | special | sign);
}

// To float16, to nearest, ties to even; a NaN keeps its sign.
template <typename I, typename V>
LOFT_INLINE I narrow_float16(V value) {
  const I bits = bit_cast<I>(value);
  const I magnitude = bits & 0x7fffffff;
  const I sign = (bits >> 16) & 0x8000;
  // Adding 0.5 lets the float unit round a subnormal result at the right place.
  const V small = bit_cast<V>(magnitude) + 0.5f;
  const I subnormal = bit_cast<I>(small) - 0x3f000000;
  const I normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  I result = magnitude < I{} + 0x38800000 ? subnormal : normal;
  result = magnitude > I{} + 0x477fefff ? I{} + 0x7c00 : result;  // rounds beyond 65504
  result = magnitude > I{} + 0x7f800000 ? I{} + 0x7e00 : result;
  return result | sign;
}

// To bfloat16, the same; every NaN becomes the canonical one. One value's I is uint32_t: the sum of
// a NaN's bits would overflow an int32_t.
template <typename I, typename V>
LOFT_INLINE I narrow_bfloat16(V value) {
  const I bits = bit_cast<I>(value);
  const I rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > I{} + 0x7f800000 ? I{} + 0x7fc0 : rounded;
}

template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Value value_of(typename Stored<kDType>::Bits bits) {
  if constexpr (kDType == DType::kFloat16) {
#if defined(__CUDA_ARCH__)
    float value;  // in one instruction
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return widen_float16<float>(int32_t{bits});
#endif
  } else if constexpr (kDType == DType::kBFloat16) {
    return bit_cast<float>(int32_t{bits} * 65536);  // a bfloat16 is the upper half of a float32
  } else {
    return bit_cast<typename Stored<kDType>::Value>(bits);
  }
}

// Rounds to nearest even where the stored type is narrower; -0 becomes +0.
template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Bits bits_of(typename Stored<kDType>::Value value) {
  value = value + static_cast<typename Stored<kDType>::Value>(0);
  if constexpr (kDType == DType::kFloat16) {
#if defined(__CUDA_ARCH__)
    int16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return static_cast<int16_t>(narrow_float16<int32_t>(value));
#endif
  } else if constexpr (kDType == DType::kBFloat16) {
    return static_cast<int16_t>(narrow_bfloat16<uint32_t>(value));
  } else {
    return bit_cast<typename Stored<kDType>::Bits>(value);
  }
}

// The bits that a result is stored with: -0 becomes +0 and every NaN the canonical one.
template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Bits result_bits(typename Stored<kDType>::Value result) {
  return result == result ? bits_of<kDType>(result) : Stored<kDType>::kNaN;
}

}  // namespace loft
