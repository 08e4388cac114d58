// Layer 1. What the networks order where rows have weights: a key with its row's weight. Rows that
// tie end in the order of their weights, so that the order of the rows changes no bit.
#pragma once

#include "cpu/formats.h"

namespace loft::LOFT_ISA {

// Lanes of a and b by number, b's after a's: lane k of the result is lane Order::of(k).
template <typename Order, typename I, int... kLane>
LOFT_INLINE I shuffle(I a, I b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Order::of(kLane)...);
#else
  return __builtin_shuffle(a, b, I{Order::of(kLane)...});
#endif
}

constexpr int kInts = kVectorBytes / 4;  // 32-bit lanes
using IntLanes = std::make_integer_sequence<int, kInts>;

// The low (0) or high (1) half of every 16 bytes of a and b, lane by lane, which is what the unpack
// instructions do. Of 8 lanes: a0 b0 a1 b1 a4 b4 a5 b5, and a2 b2 a3 b3 a6 b6 a7 b7.
template <int kHalf>
struct Interleaved {
  static constexpr int of(int k) { return k / 4 * 4 + 2 * kHalf + k % 4 / 2 + k % 2 * kInts; }
};
// What undoes it for two results: a's lanes are the even ones (0) of both, b's the odd ones (1).
template <int kOdd>
struct Gathered {
  static constexpr int of(int k) { return k / 4 * 4 + k % 2 * 2 + kOdd + k % 4 / 2 * kInts; }
};

// A key above its row's weight in each 64-bit lane, so that ties order by weight. Interleaving two
// registers of 32-bit lanes makes two of them; gathering the odd or even lanes of both undoes it.
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
  static constexpr int kLanes = kInts;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from, int32_t weight) {
    const I key = Plain::load_wide(from), weights = I{} + weight;
    return {bit_cast<Vector<int64_t>>(shuffle<Interleaved<0>>(weights, key, IntLanes{})),
            bit_cast<Vector<int64_t>>(shuffle<Interleaved<1>>(weights, key, IntLanes{}))};
  }
  static LOFT_INLINE V value(const Entry& entry, int) {
    return Plain::wide_value(gather<1>(entry));
  }
  static LOFT_INLINE I weight(const Entry& entry) { return gather<0>(entry); }
  static LOFT_INLINE void put(void* to, V result, int) { Plain::put_wide(to, result); }

 private:
  template <int kOdd>
  static LOFT_INLINE I gather(const Entry& entry) {
    return shuffle<Gathered<kOdd>>(bit_cast<I>(entry.first), bit_cast<I>(entry.second), IntLanes{});
  }
};

// A key beside its row's weight, in a register each; `exchange` orders by both.
template <typename Plain>
struct Beside {
  typename Plain::Entry key, weight;
};

template <typename Plain>
LOFT_INLINE void exchange(Beside<Plain>& a, Beside<Plain>& b) {
  const auto swap = (a.key > b.key) | ((a.key == b.key) & (a.weight > b.weight));
  const Beside<Plain> low{swap ? b.key : a.key, swap ? b.weight : a.weight};
  const Beside<Plain> high{swap ? a.key : b.key, swap ? a.weight : b.weight};
  a = low;
  b = high;
}

// The same for rows that come by weight, in a sort that keeps the order of ties: by keys alone.
LOFT_INLINE void exchange_neighbours(Beside<Float32>& a, Beside<Float32>& b) {
  const auto swap = a.key > b.key;
  const Beside<Float32> low{smaller(a.key, b.key), swap ? b.weight : a.weight};
  const Beside<Float32> high{larger(a.key, b.key), swap ? a.weight : b.weight};
  a = low;
  b = high;
}

// Float64, whose key leaves a 64-bit lane no room, and float32 of few rows (trimmed.h).
template <typename Plain>
struct WeightedBeside {
  using Bits = typename Plain::Bits;
  using Entry = Beside<Plain>;
  using V = typename Plain::V;
  using I = typename Plain::Entry;
  static constexpr int kLanes = Plain::kLanes;
  static constexpr int kParts = 1;
  static LOFT_INLINE Entry load(const void* from, int32_t weight) {
    return {Plain::load(from), I{} + weight};
  }
  static LOFT_INLINE V value(const Entry& entry, int) { return Plain::value(entry.key, 0); }
  static LOFT_INLINE I weight(const Entry& entry) { return entry.weight; }
  static LOFT_INLINE void put(void* to, V result, int) { Plain::put(to, result, 0); }
};

template <>
struct Weighted<Float64> : WeightedBeside<Float64> {};

template <typename F>
constexpr bool kIsWeighted = false;
template <typename Plain>
constexpr bool kIsWeighted<Weighted<Plain>> = true;
template <typename Plain>
constexpr bool kIsWeighted<WeightedBeside<Plain>> = true;

}  // namespace loft::LOFT_ISA
