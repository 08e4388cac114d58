// Layer 1. Which row was off, on CUDA: where the window of a coordinate that is looked at lies, and
// what one value of a row adds. Host and device code, so that a machine without a GPU tests it.
#pragma once

#include "cuda/coordinate.h"

namespace loft {
namespace device {

// Of every so many blocks the first one is looked at.
LOFT_HOST_DEVICE constexpr int64_t blocks_looked_at(int64_t numel, int every) {
  return ((numel + kBlock - 1) / kBlock + every - 1) / every;
}

// The kept windows of the coordinates that are looked at, one such block after the other; `low` is
// null where nobody asks.
template <DType kDType>
struct Windows {
  using V = typename Stored<kDType>::Value;
  V* low;
  V* high;
  int every;

  // Where coordinate i has its window, and those up to the next multiple of kBlock behind it;
  // negative where it is not looked at.
  LOFT_HOST_DEVICE int64_t place(int64_t i) const {
    if (!low) return -1;
    const uint32_t block = static_cast<uint32_t>(i / kBlock);
    const uint32_t in_turn = static_cast<uint32_t>(every);
    if (block % in_turn) return -1;
    return static_cast<int64_t>(block / in_turn) * kBlock + i % kBlock;
  }
  LOFT_HOST_DEVICE void put(int64_t place, const Outcome<kDType>& outcome) const {
    if (place < 0) return;
    low[place] = outcome.low;
    high[place] = outcome.high;
  }
};

// What some values of one row did, see Diagnostics in aggregate.h; starts as RowSums{}.
struct RowSums {
  double outside, non_finite, squared;  // counts below 2^53

  template <typename V>
  LOFT_HOST_DEVICE void add(V value, V result, V low, V high) {
    const bool is_nan = value != value;  // orders above +inf
    const bool is_below = value < low || (low != low && !is_nan);
    const bool is_above = value > high || (is_nan && high == high);
    const double distance = static_cast<double>(value) - static_cast<double>(result);
    outside += is_below || is_above;
    non_finite += !(value - value == 0);
    if (distance - distance == 0) squared += distance * distance;
  }
  LOFT_HOST_DEVICE void add(const RowSums& other) {
    outside += other.outside;
    non_finite += other.non_finite;
    squared += other.squared;
  }
};

}  // namespace device
}  // namespace loft
