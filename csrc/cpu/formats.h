// Layer 1. What the networks order: vectors of ordered-integer keys, made from values on load.
//
// A key is the value's bits, flipped where the sign is set (flip_bits in keys.h), then moved so
// that -inf is the smallest integer and the NaNs of both signs are the largest. Signed comparison
// of keys orders -inf < ... < -0 < +0 < ... < +inf < NaN; in 16-bit keys on AVX2 -0 is +0. Results
// make every NaN the canonical one. As an example bfloat16, of which 0x7f patterns a sign are NaN:
//   value   bits    flipped  moved down by 0x7f
//   -inf    0xff80  0x807f   0x8000  the smallest int16
//   -1.0    0xbf80  0xc07f   0xc000
//   +inf    0x7f80  0x7f80   0x7f01
//   NaN     0x7fc0  0x7fc0   0x7f41
//   -NaN    0xffc0  0x803f   0x7fc0  wraps around to the top
//
// A format has: Bits (one stored value), Entry, kLanes (coordinates an entry), V (vector of the
// arithmetic type), kParts (V's an entry), load, value, put.
#pragma once

#include <limits>

#include "cpu/vectors.h"

namespace loft::LOFT_ISA {

// Added to a flipped value, wrapping around: -inf becomes the smallest integer and what lay below
// it, the negative NaNs, goes round to the top, above the positive ones.
template <typename I, typename Scalar>
LOFT_INLINE I shift_keys(I keys, Scalar by) {
  using U = Vector<std::make_unsigned_t<Lane<I>>, sizeof(I)>;
  return bit_cast<I>(bit_cast<U>(keys) + static_cast<std::make_unsigned_t<Lane<I>>>(by));
}

// `room`: how many patterns of one sign are NaN.
template <typename I, typename Scalar>
LOFT_INLINE I to_key(I bits, Scalar room) {
  return shift_keys(flip_bits<I, Lane<I>>(bits), -room);
}
template <typename I, typename Scalar>
LOFT_INLINE I from_key(I key, Scalar room) {
  return flip_bits<I, Lane<I>>(shift_keys(key, room));
}

// -0 becomes +0, every NaN the canonical one.
template <typename V>
LOFT_INLINE V normal(V result) {
  using I = Vector<std::conditional_t<sizeof(Lane<V>) == 8, int64_t, int32_t>, sizeof(V)>;
  constexpr Lane<I> kNaN =
      static_cast<Lane<I>>(sizeof(Lane<V>) == 8 ? 0x7ff8000000000000 : 0x7fc00000);
  const V sum = result + static_cast<Lane<V>>(0);
  return sum == sum ? sum : bit_cast<V>(I{} + kNaN);
}

// Formats whose keys are as wide as the arithmetic type.
template <typename Stored, typename Value>
struct Whole {
  using Bits = Stored;
  using Entry = Vector<Bits>;
  using V = Vector<Value>;
  using I = Entry;
  static constexpr int kLanes = kVectorBytes / sizeof(Bits);
  static constexpr int kParts = 1;
  static constexpr Bits kRoom = static_cast<Bits>(sizeof(Bits) == 8 ? 0xfffffffffffff : 0x7fffff);
  static LOFT_INLINE Entry load(const void* from) {
    return to_key(LOFT_ISA::load<Entry>(from), kRoom);
  }
  static LOFT_INLINE V value(const Entry& entry, int) {
    return bit_cast<V>(from_key(entry, kRoom));
  }
  static LOFT_INLINE void put(void* to, V result, int) { store(to, normal(result)); }
  // For weights (weighted.h): keys as 32-bit integers, and back.
  static LOFT_INLINE Entry load_wide(const void* from) { return load(from); }
  static LOFT_INLINE V wide_value(Entry key) { return value(key, 0); }
  static LOFT_INLINE void put_wide(void* to, V result) { put(to, result, 0); }
};
using Float32 = Whole<int32_t, float>;
using Float64 = Whole<int64_t, double>;

// The halves of a register.
template <typename Part, typename Whole>
LOFT_INLINE Part half_of(Whole whole, int part) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Whole) == 64) {
    const __m512i bits = bit_cast<__m512i>(whole);
    return bit_cast<Part>(part ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(Whole) == 32) {
    const __m256i bits = bit_cast<__m256i>(whole);
    return bit_cast<Part>(part ? _mm256_extracti128_si256(bits, 1) : _mm256_castsi256_si128(bits));
  }
#endif
  Part half;
  std::memcpy(&half, reinterpret_cast<const char*>(&whole) + part * sizeof(Part), sizeof(Part));
  return half;
}

// A register of two halves.
template <typename Whole, typename Part>
LOFT_INLINE Whole join(Part low, Part high) {
#if defined(__AVX512BW__)
  const __m512i first = _mm512_castsi256_si512(bit_cast<__m256i>(low));
  return bit_cast<Whole>(_mm512_inserti64x4(first, bit_cast<__m256i>(high), 1));
#elif defined(__AVX2__)
  const __m256i first = _mm256_castsi128_si256(bit_cast<__m128i>(low));
  return bit_cast<Whole>(_mm256_inserti128_si256(first, bit_cast<__m128i>(high), 1));
#else
  Whole whole;
  std::memcpy(&whole, &low, sizeof(Part));
  std::memcpy(reinterpret_cast<char*>(&whole) + sizeof(Part), &high, sizeof(Part));
  return whole;
#endif
}

// Formats whose keys have 16 bits: an entry widens to two vectors of float32.
template <bool kIsBFloat>
struct Half {
  using Bits = int16_t;
  using Entry = Vector<int16_t>;
  using V = Vector<float>;
  using I = Vector<int32_t>;
  using Part = Vector<int16_t, kVectorBytes / 2>;
  static constexpr int kLanes = kVectorBytes / 2;
  static constexpr int kParts = 2;
  static constexpr Bits kRoom = kIsBFloat ? 0x7f : 0x3ff;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // One instruction negates by the sign of another value, so a flipped value is here the magnitude
  // with its sign: -0 is +0, which no result tells apart.
  static constexpr bool kHasMinusZero = false;
  static constexpr Bits kMove = kRoom + 1;
  static LOFT_INLINE Entry load(const void* from) {
    const Entry bits = LOFT_ISA::load<Entry>(from);  // as stored
    const __m256i magnitude = bit_cast<__m256i>(bits & std::numeric_limits<Bits>::max());
    const __m256i flipped = _mm256_sign_epi16(magnitude, bit_cast<__m256i>(bits));
    return shift_keys(bit_cast<Entry>(flipped), -kMove);
  }
  static LOFT_INLINE Entry bits_of(Entry key) {
    const Entry flipped = shift_keys(key, kMove);
    const Entry magnitude = bit_cast<Entry>(_mm256_abs_epi16(bit_cast<__m256i>(flipped)));
    return magnitude | (flipped & std::numeric_limits<Bits>::min());  // the sign back on top
  }
#else
  static constexpr bool kHasMinusZero = true;
  static constexpr Bits kMove = kRoom;
  static LOFT_INLINE Entry load(const void* from) {
    return to_key(LOFT_ISA::load<Entry>(from), kRoom);
  }
  static LOFT_INLINE Entry bits_of(Entry key) { return from_key(key, kRoom); }
#endif
  static LOFT_INLINE V value(const Entry& entry, int part) {
    return widen(half_of<Part>(bits_of(entry), part));
  }
  static LOFT_INLINE V widen(Part stored) {
#if defined(__AVX512BW__)
    if constexpr (!kIsBFloat) return bit_cast<V>(_mm512_cvtph_ps(bit_cast<__m256i>(stored)));
#elif defined(__F16C__)
    if constexpr (!kIsBFloat) return bit_cast<V>(_mm256_cvtph_ps(bit_cast<__m128i>(stored)));
#endif
    const I bits = __builtin_convertvector(stored, I);
    if constexpr (kIsBFloat) return bit_cast<V>(bits << 16);
    return widen_float16<V>(bits);
  }
  static LOFT_INLINE void put(void* to, V result, int part) {
    put_wide(static_cast<char*>(to) + part * sizeof(Part), result);
  }
  // For weights: keys that order -0 below +0 at every level, because weights order ties.
  static LOFT_INLINE I load_wide(const void* from) {
    return __builtin_convertvector(to_key(LOFT_ISA::load<Part>(from), kRoom), I);
  }
  static LOFT_INLINE V wide_value(I key) {
    return widen(from_key(__builtin_convertvector(key, Part), kRoom));
  }
  static LOFT_INLINE void put_wide(void* to, V result) { store(to, narrow(result)); }
  // What value and put would make of one key: no value is rounded.
  static LOFT_INLINE void put_key(void* to, Entry key) {
    constexpr Bits kNaN = kIsBFloat ? 0x7fc0 : 0x7e00;
    constexpr Bits kInfinity = (kIsBFloat ? 0x7f80 : 0x7c00) - kMove;  // its key
    Entry bits = bits_of(key);
    if constexpr (kHasMinusZero) {
      bits = bits == Entry{} + std::numeric_limits<Bits>::min() ? Entry{} : bits;
    }
    store(to, key > Entry{} + kInfinity ? Entry{} + kNaN : bits);
  }
  // Puts the midpoint of two keys; false where a lane is to be done again: it is not finite, which
  // a sum that overflowed also is. Else halving is exact, so equal values give themselves.
  static LOFT_INLINE bool put_midpoint(void* to, Entry lower, Entry upper) {
    const Entry low = bits_of(lower), high = bits_of(upper);
    if constexpr (kIsBFloat) {
      const Entry middle = middle_in_place(bit_cast<I>(low), bit_cast<I>(high));
      constexpr Bits kInfinity = 0x7f80;
      store(to, middle);
      return !any_lane((middle & kInfinity) == kInfinity);  // infinite or NaN
    } else {
      const auto half = [&](int part) -> Part {
        const V sum = widen(half_of<Part>(low, part)) + widen(half_of<Part>(high, part));
        return narrow_ordered(halved(sum));  // float32 has room for every sum
      };
      const Entry middle = join<Entry>(half(0), half(1));
      store(to, (middle & 0x7fff) > Entry{} + 0x7c00 ? Entry{} + 0x7e00 : middle);
      return true;
    }
  }
  // Never -0, before it is rounded.
  static LOFT_INLINE V halved(V sum) { return kHasMinusZero ? sum * 0.5f + 0.0f : sum * 0.5f; }
  // Odd and even bfloat16 lanes widen and narrow in place.
  static LOFT_INLINE Entry middle_in_place(I low, I high) {
    using U = Vector<uint32_t>;
    constexpr int32_t kOdd = static_cast<int32_t>(0xffff0000);
    const auto rounded = [](I a, I b) -> I {
      const I bits = bit_cast<I>(halved(bit_cast<V>(a) + bit_cast<V>(b)));
      return bits + bit_cast<I>(bit_cast<U>(bits << 15) >> 31) + 0x7fff;  // to even
    };
    const I even = bit_cast<I>(bit_cast<U>(rounded(low << 16, high << 16)) >> 16);
    const I odd = rounded(low & kOdd, high & kOdd);
#if defined(__AVX2__) && !defined(__AVX512BW__)
    return bit_cast<Entry>(
        _mm256_blend_epi16(bit_cast<__m256i>(even), bit_cast<__m256i>(odd), 0xaa));
#else
    return bit_cast<Entry>(even | (odd & kOdd));
#endif
  }
  static LOFT_INLINE Part narrow(V result) {
    if constexpr (kIsBFloat) {
      return __builtin_convertvector((narrow_bfloat16<I, V>(result + 0.0f)), Part);
    }
    return narrow_ordered(normal(result));
  }
  // To float16; any NaN may become any NaN.
  static LOFT_INLINE Part narrow_ordered(V value) {
#if defined(__AVX512BW__)
    return bit_cast<Part>(_mm512_cvtps_ph(bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return bit_cast<Part>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#else
    return __builtin_convertvector((narrow_float16<I>(value)), Part);
#endif
  }
};
using Float16 = Half<false>;
using BFloat16 = Half<true>;

}  // namespace loft::LOFT_ISA
