// Layer 1. What the networks order: vectors of ordered-integer keys, made from values on load.
//
// A key is the value's bits with all but the sign flipped where the sign is set; signed comparison
// of keys then orders -inf < ... < -0 < +0 < ... < +inf < NaN, after every NaN has become the one
// canonical positive NaN. With weights the key sits in the upper half of a 64-bit entry above the
// row's weight, so that ties order by weight.
//
// A format has: Bits (one stored value), Entry, kLanes (coordinates an entry), V (vector of the
// arithmetic type), kParts (V's an entry), load, value, put.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace loft {
namespace LOFT_ISA {

template <typename I>
LOFT_INLINE I flip(I bits) {  // its own inverse
  using Scalar = std::remove_reference_t<decltype(bits[0])>;
  constexpr int kShift = 8 * sizeof(Scalar) - 1;
  constexpr Scalar kMagnitude = static_cast<Scalar>(~(Scalar{1} << kShift));
  return bits ^ ((bits >> kShift) & kMagnitude);
}

// NaN, of either sign and any payload, becomes the canonical NaN.
template <typename I, typename Scalar>
LOFT_INLINE I to_key(I bits, Scalar infinity, Scalar nan) {
  constexpr int kShift = 8 * sizeof(Scalar) - 1;
  constexpr Scalar kMagnitude = static_cast<Scalar>(~(Scalar{1} << kShift));
  const I magnitude = bits & kMagnitude;
  return magnitude > (I{} + infinity) ? I{} + nan : flip(bits);
}

struct Float32 {
  using Bits = int32_t;
  using Entry = Vector<int32_t>;
  using V = Vector<float>;
  static constexpr int kLanes = kVectorBytes / 4;
  static constexpr int kParts = 1;
  template <typename I>
  static LOFT_INLINE I key(I bits) {
    return to_key<I, Bits>(bits, 0x7f800000, 0x7fc00000);
  }
  template <typename W, typename I>
  static LOFT_INLINE W from_key(I wide_key) {
    return bit_cast<W>(flip(wide_key));
  }
  template <typename I, typename W>
  static LOFT_INLINE void put_as(void* to, W result) {
    store(to, result);
  }
  static LOFT_INLINE Entry load(const void* from) { return key(LOFT_ISA::load<Entry>(from)); }
  static LOFT_INLINE V value(const Entry& entry, int) { return bit_cast<V>(flip(entry)); }
  static LOFT_INLINE void put(void* to, V result, int) { store(to, result + 0.0f); }
};

struct Float64 {
  using Bits = int64_t;
  using Entry = Vector<int64_t>;
  using V = Vector<double>;
  static constexpr int kLanes = kVectorBytes / 8;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from) {
    return to_key<Entry, Bits>(LOFT_ISA::load<Entry>(from), 0x7ff0000000000000, 0x7ff8000000000000);
  }
  static LOFT_INLINE V value(const Entry& entry, int) { return bit_cast<V>(flip(entry)); }
  static LOFT_INLINE void put(void* to, V result, int) { store(to, result + 0.0); }
};

// float16 <-> float32 on 32-bit lanes; exact up, to nearest even down.
template <typename I, typename V>
LOFT_INLINE V widen_float16(I bits) {
  const I magnitude = bits & 0x7fff;
  V value = bit_cast<V>(magnitude << 13) * 0x1p112f;  // right for subnormals too
  const I special = bit_cast<I>(value) | 0x7f800000;
  value = magnitude > I{} + 0x7bff ? bit_cast<V>(special) : value;
  return bit_cast<V>(bit_cast<I>(value) | ((bits & 0x8000) << 16));
}

template <typename I, typename V>
LOFT_INLINE I narrow_float16(V value) {
  const I bits = bit_cast<I>(value);
  const I magnitude = bits & 0x7fffffff;
  const I sign = (bits >> 16) & 0x8000;
  // subnormal results: adding 0.5 lets the float unit round at the right place
  const V small = bit_cast<V>(magnitude) + 0.5f;
  const I subnormal = bit_cast<I>(small) - 0x3f000000;
  const I normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  I result = magnitude < I{} + 0x38800000 ? subnormal : normal;
  result = magnitude > I{} + 0x477fefff ? I{} + 0x7c00 : result;  // rounds beyond 65504
  result = magnitude > I{} + 0x7f800000 ? I{} + 0x7e00 : result;
  return result | sign;
}

template <typename I, typename V>
LOFT_INLINE I narrow_bfloat16(V value) {
  const I bits = bit_cast<I>(value);
  const I rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > I{} + 0x7f800000 ? I{} + 0x7fc0 : rounded;
}

template <bool kIsBFloat>
struct Half {
  using Bits = int16_t;
  using Entry = Vector<int16_t>;
  using V = Vector<float>;
  using I = Vector<int32_t>;
  using Part = Vector<int16_t, kVectorBytes / 2>;
  static constexpr int kLanes = kVectorBytes / 2;
  static constexpr int kParts = 2;
  template <typename K>
  static LOFT_INLINE K key(K bits) {
    return to_key<K, Bits>(bits, kIsBFloat ? 0x7f80 : 0x7c00, kIsBFloat ? 0x7fc0 : 0x7e00);
  }
  template <typename W, typename J>
  static LOFT_INLINE W from_key(J wide_key) {  // sign-extended to 32 bits
    const J bits = wide_key ^ ((wide_key >> 31) & 0x7fff);
    if constexpr (kIsBFloat) return bit_cast<W>(bits << 16);
    return widen_float16<J, W>(bits);
  }
  template <typename J, typename W>
  static LOFT_INLINE void put_as(void* to, W result) {
    J bits;
    if constexpr (kIsBFloat) {
      bits = narrow_bfloat16<J, W>(result);
    } else {
      bits = narrow_float16<J, W>(result);
    }
    store(to, __builtin_convertvector(bits, Vector<int16_t, sizeof(J) / 2>));
  }
  static LOFT_INLINE Entry load(const void* from) { return key(LOFT_ISA::load<Entry>(from)); }
  static LOFT_INLINE V value(const Entry& entry, int part) {
    const char* half = reinterpret_cast<const char*>(&entry) + part * sizeof(Part);
    return from_key<V, I>(__builtin_convertvector(LOFT_ISA::load<Part>(half), I));
  }
  static LOFT_INLINE void put(void* to, V result, int part) {
    put_as<I>(static_cast<char*>(to) + part * sizeof(Part), result + 0.0f);
  }
};
using Float16 = Half<false>;
using BFloat16 = Half<true>;

// A 32-bit or 16-bit format with weights: key above weight in 64 bits.
template <typename Plain>
struct Weighted {
  using Bits = typename Plain::Bits;
  using Entry = Vector<int64_t>;
  using V = Vector<float, kVectorBytes / 2>;
  using I = Vector<int32_t, kVectorBytes / 2>;
  using Stored = Vector<Bits, kVectorBytes / 8 * sizeof(Bits)>;
  static constexpr int kLanes = kVectorBytes / 8;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from, int32_t weight) {
    const Stored key = Plain::key(LOFT_ISA::load<Stored>(from));
    return (__builtin_convertvector(key, Entry) << 32) | static_cast<int64_t>(weight);
  }
  static LOFT_INLINE V value(const Entry& entry, int) {
    return Plain::template from_key<V, I>(__builtin_convertvector(entry >> 32, I));
  }
  static LOFT_INLINE I weight(const Entry& entry) {
    return __builtin_convertvector(entry & 0xffffffff, I);
  }
  static LOFT_INLINE void put(void* to, V result, int) {
    Plain::template put_as<I>(to, result + 0.0f);
  }
};

// float64 with weights: two 64-bit lanes a coordinate.
struct Pair {
  Vector<int64_t> key, weight;
};

LOFT_INLINE void exchange(Pair& a, Pair& b) {
  const auto swap = (a.key > b.key) | ((a.key == b.key) & (a.weight > b.weight));
  const Pair low{swap ? b.key : a.key, swap ? b.weight : a.weight};
  const Pair high{swap ? a.key : b.key, swap ? a.weight : b.weight};
  a = low;
  b = high;
}

template <>
struct Weighted<Float64> {
  using Bits = int64_t;
  using Entry = Pair;
  using V = Vector<double>;
  using I = Vector<int64_t>;
  static constexpr int kLanes = kVectorBytes / 8;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from, int32_t weight) {
    return {Float64::load(from), I{} + weight};
  }
  static LOFT_INLINE V value(const Entry& entry, int) { return bit_cast<V>(flip(entry.key)); }
  static LOFT_INLINE I weight(const Entry& entry) { return entry.weight; }
  static LOFT_INLINE void put(void* to, V result, int) { store(to, result + 0.0); }
};

}  // namespace LOFT_ISA
}  // namespace loft
