// Layer 2. How far each row was off, on the vectors of one instruction set.
//
// The sum of squares runs over eight lanes, whatever the machine's vectors: it is then the same at
// every level, and its order depends on the coordinates alone. A stretch of coordinates is first
// taken for finite, which its sums show; else it is gone through again, value by value.

#include <type_traits>

#include "entries.h"
#include "kernels_cpu.h"

namespace loft {
namespace LOFT_ISA {
namespace {

constexpr int kLanes = 8;
constexpr int kWide = kVectorBytes == 64 ? 8 : 4;  // doubles a register
constexpr int kParts = kLanes / kWide;
constexpr int64_t kStretch = 16 * kLanes;
using Doubles = Vector<double, 8 * kWide>;
using Floats = Vector<float, 4 * kWide>;
using Stored16 = Vector<int16_t, 2 * kWide>;
using Wide32 = Vector<int32_t, 4 * kWide>;

// Values of kWide neighbours in the arithmetic type.
template <DType kDType>
LOFT_INLINE auto read(const char* from) {
  if constexpr (kDType == DType::kFloat64) {
    return load<Doubles>(from);
  } else if constexpr (kDType == DType::kFloat32) {
    return load<Floats>(from);
  } else {
    const auto bits = __builtin_convertvector(load<Stored16>(from), Wide32);
    if constexpr (kDType == DType::kFloat16) return widen_float16<Wide32, Floats>(bits);
    return bit_cast<Floats>(bits << 16);
  }
}

template <DType kDType>
using ValueOf = decltype(read<kDType>(nullptr));
template <DType kDType>
using MaskOf = decltype(ValueOf<kDType>{} < ValueOf<kDType>{});

// The results of one tile and the window that was kept there.
struct Tile {
  const double* results;
  const char* low;
  const char* high;
};

// Sums of one row, lane by lane; a set lane of a mask is -1.
template <DType kDType>
struct Sums {
  MaskOf<kDType> outside[kParts] = {}, non_finite[kParts] = {};
  Doubles squared[kParts] = {};

  bool is_finite() const {
    Doubles zero{};
    for (int part = 0; part < kParts; ++part) zero += squared[part] - squared[part];
    return !any_lane(zero != 0);
  }
};

// Adds kLanes coordinates from `i` on; `row` points at the row's coordinate 0.
template <DType kDType, bool kIsFinite>
LOFT_INLINE void add(const char* row, const Tile& tile, int64_t i, Sums<kDType>& sums) {
  using V = ValueOf<kDType>;
  using M = MaskOf<kDType>;
  constexpr int64_t kBytes = kDType == DType::kFloat64 ? 8 : kDType == DType::kFloat32 ? 4 : 2;
  for (int part = 0; part < kParts; ++part, i += kWide) {
    const V value = read<kDType>(row + i * kBytes);
    const V low = load<V>(tile.low + i * sizeof(Lane<V>));
    const V high = load<V>(tile.high + i * sizeof(Lane<V>));
    M outside = (value < low) | (value > high);
    const Doubles distance =
        __builtin_convertvector(value, Doubles) - load<Doubles>(tile.results + i);
    Doubles square = distance * distance;
    if constexpr (!kIsFinite) {
      const M is_nan = value != value;
      outside |= ((low != low) & ~is_nan) | (is_nan & (high == high));  // NaN orders above +inf
      sums.non_finite[part] -= (value - value) != 0;
      square = distance - distance == 0 ? square : Doubles{};  // infinite or NaN: left out
    }
    sums.outside[part] -= outside;
    sums.squared[part] += square;
  }
}

template <DType kDType>
void add_stretch(const char* row, const Tile& tile, int64_t begin, int64_t end,
                 Sums<kDType>& sums) {
  Sums<kDType> fast = sums;
  for (int64_t i = begin; i < end; i += kLanes) add<kDType, true>(row, tile, i, fast);
  if (__builtin_expect(fast.is_finite(), 1)) {
    sums = fast;
  } else {
    for (int64_t i = begin; i < end; i += kLanes) add<kDType, false>(row, tile, i, sums);
  }
}

template <DType kDType>
void compare(const Compared& what, RowTally* tallies) {
  using V = ValueOf<kDType>;
  constexpr int64_t kBytes = kDType == DType::kFloat64 ? 8 : kDType == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kValueBytes = sizeof(Lane<V>);
  alignas(64) double results[kCompared];
  // the last lanes, fewer than kLanes: copies padded with zeros, which are nowhere off
  alignas(64) char row_end[64], low_end[64] = {}, high_end[64] = {}, result_end[64] = {};
  alignas(64) double results_end[kLanes];
  const int64_t whole = what.count / kLanes * kLanes, left = what.count - whole;
  const auto widen = [](const char* from, double* to) {
    for (int part = 0; part < kParts; ++part) {
      const V values = read<kDType>(from + part * kWide * kBytes);
      store(to + part * kWide, __builtin_convertvector(values, Doubles));
    }
  };
  for (int64_t i = 0; i < whole; i += kLanes) widen(what.result + i * kBytes, results + i);
  std::memcpy(low_end, what.low + whole * kValueBytes, left * kValueBytes);
  std::memcpy(high_end, what.high + whole * kValueBytes, left * kValueBytes);
  std::memcpy(result_end, what.result + whole * kBytes, left * kBytes);
  widen(result_end, results_end);
  const Tile tile{results, what.low, what.high}, rest{results_end, low_end, high_end};
  for (int number = 0; number < what.num_rows; ++number) {
    const char* row = what.rows[number] + what.at * kBytes;
    Sums<kDType> sums;
    for (int64_t i = 0; i < whole; i += kStretch) {
      add_stretch(row, tile, i, i + kStretch < whole ? i + kStretch : whole, sums);
    }
    if (left > 0) {
      std::memset(row_end, 0, sizeof(row_end));
      std::memcpy(row_end, row + whole * kBytes, left * kBytes);
      add_stretch(row_end, rest, 0, kLanes, sums);
    }
    RowTally& tally = tallies[number];
    tally.coordinates += what.count;
    for (int lane = 0; lane < kLanes; ++lane) {
      tally.num_outside += sums.outside[lane / kWide][lane % kWide];
      tally.num_non_finite += sums.non_finite[lane / kWide][lane % kWide];
      tally.squared_distance += sums.squared[lane / kWide][lane % kWide];
    }
  }
}

}  // namespace

void compare_rows(DType dtype, const Compared& what, RowTally* tallies) {
  switch (dtype) {
    case DType::kFloat64: return compare<DType::kFloat64>(what, tallies);
    case DType::kFloat32: return compare<DType::kFloat32>(what, tallies);
    case DType::kFloat16: return compare<DType::kFloat16>(what, tallies);
    case DType::kBFloat16: return compare<DType::kBFloat16>(what, tallies);
  }
}

}  // namespace LOFT_ISA
}  // namespace loft
