// Layer 2. How far each row was off, on the vectors of one instruction set.
//
// Always eight lanes at a time, whatever the machine's vectors: the sum of squares is then the same
// at every level, and its order depends on the coordinates alone.

#include <type_traits>

#include "entries.h"
#include "kernels_cpu.h"

namespace loft {
namespace LOFT_ISA {
namespace {

constexpr int kLanes = 8;
using Doubles = Vector<double, 64>;
using Counts = Vector<int64_t, 64>;

template <DType kDType>
struct Eight;
template <>
struct Eight<DType::kFloat64> {
  using Value = Doubles;
  static LOFT_INLINE Value read(const void* from) { return load<Value>(from); }
};
template <>
struct Eight<DType::kFloat32> {
  using Value = Vector<float, 32>;
  static LOFT_INLINE Value read(const void* from) { return load<Value>(from); }
};
template <>
struct Eight<DType::kFloat16> {
  using Value = Vector<float, 32>;
  using I = Vector<int32_t, 32>;
  static LOFT_INLINE Value read(const void* from) {
    return widen_float16<I, Value>(__builtin_convertvector(load<Vector<int16_t, 16>>(from), I));
  }
};
template <>
struct Eight<DType::kBFloat16> {
  using Value = Vector<float, 32>;
  using I = Vector<int32_t, 32>;
  static LOFT_INLINE Value read(const void* from) {
    const I bits = __builtin_convertvector(load<Vector<int16_t, 16>>(from), I);
    return bit_cast<Value>(bits << 16);
  }
};

// Adds what eight coordinates say; lanes whose `counts` is 0 are padding.
template <typename V, typename M>
LOFT_INLINE void add(V value, V result, V low, V high, M counts, M& outside, M& non_finite,
                     Doubles& squared) {
  const M is_nan = value != value;
  const M is_below = (value < low) | ((low != low) & ~is_nan);
  const M is_above = (value > high) | (is_nan & (high == high));  // NaN orders above +inf
  const V zero = value - value;
  outside -= (is_below | is_above) & counts;  // a set lane is -1
  non_finite -= (zero != 0) & counts;
  const Doubles distance =
      __builtin_convertvector(value, Doubles) - __builtin_convertvector(result, Doubles);
  const Doubles square = distance * distance;
  squared += distance - distance == 0 ? square : Doubles{};  // infinite or NaN: left out
}

template <DType kDType>
void compare(const void* row, const void* result, const void* low, const void* high, int64_t count,
             RowTally& tally) {
  using E = Eight<kDType>;
  using V = typename E::Value;
  using M = std::conditional_t<kDType == DType::kFloat64, Counts, Vector<int32_t, 32>>;
  constexpr int64_t kBytes = kDType == DType::kFloat64 ? 8 : kDType == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kValueBytes = sizeof(V) / kLanes;
  const char* rows = static_cast<const char*>(row);
  const char* results = static_cast<const char*>(result);
  const char* lows = static_cast<const char*>(low);
  const char* highs = static_cast<const char*>(high);
  M outside{}, non_finite{};
  Doubles squared{};
  const M all = ~M{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    add(E::read(rows + i * kBytes), E::read(results + i * kBytes), load<V>(lows + i * kValueBytes),
        load<V>(highs + i * kValueBytes), all, outside, non_finite, squared);
  }
  if (i < count) {  // the last lanes from padded copies
    alignas(64) char copies[4][64] = {};
    const size_t left = static_cast<size_t>(count - i);
    std::memcpy(copies[0], rows + i * kBytes, left * kBytes);
    std::memcpy(copies[1], results + i * kBytes, left * kBytes);
    std::memcpy(copies[2], lows + i * kValueBytes, left * kValueBytes);
    std::memcpy(copies[3], highs + i * kValueBytes, left * kValueBytes);
    M counts{};
    for (size_t lane = 0; lane < left; ++lane) counts[lane] = -1;
    add(E::read(copies[0]), E::read(copies[1]), load<V>(copies[2]), load<V>(copies[3]), counts,
        outside, non_finite, squared);
  }
  tally.coordinates += count;
  for (int lane = 0; lane < kLanes; ++lane) {
    tally.num_outside += outside[lane];
    tally.num_non_finite += non_finite[lane];
    tally.squared_distance += squared[lane];
  }
}

}  // namespace

void compare_row(DType dtype, const void* row, const void* result, const void* low,
                 const void* high, int64_t count, RowTally& tally) {
  switch (dtype) {
    case DType::kFloat64: return compare<DType::kFloat64>(row, result, low, high, count, tally);
    case DType::kFloat32: return compare<DType::kFloat32>(row, result, low, high, count, tally);
    case DType::kFloat16: return compare<DType::kFloat16>(row, result, low, high, count, tally);
    case DType::kBFloat16: return compare<DType::kBFloat16>(row, result, low, high, count, tally);
  }
}

}  // namespace LOFT_ISA
}  // namespace loft
