// Layer 1. What the networks order where rows have weights: a key with its row's weight.
#pragma once

#include "cpu/formats.h"

namespace loft {
namespace LOFT_ISA {

#if defined(__clang__)
#define LOFT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LOFT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

// A key above its row's weight in each 64-bit lane, so that ties order by weight. Interleaving two
// registers of 32-bit lanes makes two of them; taking the odd or even lanes of both undoes it.
struct Twin {
  Vector<int64_t> first, second;
};

LOFT_INLINE void exchange(Twin& a, Twin& b) {
  exchange(a.first, b.first);
  exchange(a.second, b.second);
}

template <typename Plain>
struct Weighted {
  using Bits = typename Plain::Bits;
  using Entry = Twin;
  using V = Vector<float>;
  using I = Vector<int32_t>;
  static constexpr int kLanes = kVectorBytes / 4;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from, int32_t weight) {
    const I key = Plain::load_wide(from), weights = I{} + weight;
    return {bit_cast<Vector<int64_t>>(interleave<0>(weights, key)),
            bit_cast<Vector<int64_t>>(interleave<1>(weights, key))};
  }
  static LOFT_INLINE V value(const Entry& entry, int) {
    return Plain::wide_value(gather<1>(entry));
  }
  static LOFT_INLINE I weight(const Entry& entry) { return gather<0>(entry); }
  static LOFT_INLINE void put(void* to, V result, int) { Plain::put_wide(to, result); }

 private:
  // The low (0) or high (1) half of every 16 bytes of two registers, lane by lane.
  template <int kHalf>
  static LOFT_INLINE I interleave(I a, I b) {
    constexpr int n = kLanes;
    constexpr int h = 2 * kHalf;
    if constexpr (n == 4) return LOFT_SHUFFLE(a, b, h, n + h, h + 1, n + h + 1);
    if constexpr (n == 8) {
      return LOFT_SHUFFLE(a, b, h, n + h, h + 1, n + h + 1, h + 4, n + h + 4, h + 5, n + h + 5);
    }
    if constexpr (n == 16) {
      return LOFT_SHUFFLE(a, b, h, n + h, h + 1, n + h + 1, h + 4, n + h + 4, h + 5, n + h + 5,
                          h + 8, n + h + 8, h + 9, n + h + 9, h + 12, n + h + 12, h + 13,
                          n + h + 13);
    }
  }
  // The even (0) or odd (1) lanes of both registers, in the order before interleaving.
  template <int kOdd>
  static LOFT_INLINE I gather(const Entry& entry) {
    constexpr int n = kLanes;
    constexpr int o = kOdd;
    const I a = bit_cast<I>(entry.first), b = bit_cast<I>(entry.second);
    if constexpr (n == 4) return LOFT_SHUFFLE(a, b, o, 2 + o, n + o, n + 2 + o);
    if constexpr (n == 8) {
      return LOFT_SHUFFLE(a, b, o, 2 + o, n + o, n + 2 + o, 4 + o, 6 + o, n + 4 + o, n + 6 + o);
    }
    if constexpr (n == 16) {
      return LOFT_SHUFFLE(a, b, o, 2 + o, n + o, n + 2 + o, 4 + o, 6 + o, n + 4 + o, n + 6 + o,
                          8 + o, 10 + o, n + 8 + o, n + 10 + o, 12 + o, 14 + o, n + 12 + o,
                          n + 14 + o);
    }
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
  static LOFT_INLINE V value(const Entry& entry, int) { return Float64::value(entry.key, 0); }
  static LOFT_INLINE I weight(const Entry& entry) { return entry.weight; }
  static LOFT_INLINE void put(void* to, V result, int) { Float64::put(to, result, 0); }
};

}  // namespace LOFT_ISA
}  // namespace loft
