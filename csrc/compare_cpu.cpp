// Layer 2. How far each row was off, on the vectors of one instruction set.
//
// The sum of squares runs over sixteen lanes, whatever the machine's vectors: it is then the same
// at every level, and its order depends on the coordinates alone. A row's coordinates are first
// taken for finite, which their sums show; else they are gone through again, value by value.

#include <type_traits>

#include "entries.h"
#include "kernels_cpu.h"

namespace loft {
namespace LOFT_ISA {
namespace {

constexpr int kLanes = RowLanes::kLanes;
using Doubles = Vector<double>;
constexpr int kDoubles = kVectorBytes / 8;

template <DType kDType>
constexpr int64_t kBytes = kDType == DType::kFloat64   ? 8
                           : kDType == DType::kFloat32 ? 4
                                                       : 2;

// A register of neighbours in the arithmetic type.
template <DType kDType>
LOFT_INLINE auto read(const char* from) {
  if constexpr (kDType == DType::kFloat64) {
    return load<Doubles>(from);
  } else if constexpr (kDType == DType::kFloat32) {
    return load<Vector<float>>(from);
  } else {
    using F = Half<kDType == DType::kBFloat16>;
    return F::widen(load<typename F::Part>(from));
  }
}

template <DType kDType>
using ValueOf = decltype(read<kDType>(nullptr));
template <DType kDType>
using MaskOf = decltype(ValueOf<kDType>{} < ValueOf<kDType>{});
template <DType kDType>
constexpr int kValues = static_cast<int>(sizeof(ValueOf<kDType>) / sizeof(Lane<ValueOf<kDType>>));

// One of a register's parts as doubles; `from` is where the register was read. GCC 12 makes six
// instructions of a wide conversion.
template <DType kDType>
LOFT_INLINE Doubles part_of(ValueOf<kDType> values, int part, [[maybe_unused]] const char* from) {
  if constexpr (kDType == DType::kFloat64) {
    return values;
  } else {
    using Part = Vector<float, kVectorBytes / 2>;
    const Part half = kDType == DType::kFloat32 ? load<Part>(from + part * sizeof(Part))
                                                : half_of<Part>(values, part);
#if defined(__AVX512BW__)
    return _mm512_cvtps_pd(half);
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(half);
#else
    return __builtin_convertvector(half, Doubles);
#endif
  }
}

// a - b, by the unit that is free where the machine surely has it: the product is exact.
LOFT_INLINE Doubles difference(Doubles a, Doubles b) {
#if defined(__AVX512BW__)
  return _mm512_fmsub_pd(a, Doubles{} + 1.0, b);
#else
  return a - b;
#endif
}

// The results of one tile and the window that was kept there.
struct Tile {
  const double* results;
  const char* low;
  const char* high;
};

template <typename V, typename T, size_t kCount>
LOFT_INLINE void add_lanes(T* lanes, const V (&values)[kCount]) {
  using Stored = Vector<T, sizeof(V) / sizeof(Lane<V>) * sizeof(T)>;
  for (const V& value : values) {
    store(lanes, load<Stored>(lanes) + __builtin_convertvector(value, Stored));
    lanes += sizeof(V) / sizeof(Lane<V>);
  }
}

// Sums of one row, lane by lane.
template <DType kDType>
struct Sums {
  MaskOf<kDType> outside[kLanes / kValues<kDType>] = {};
  MaskOf<kDType> non_finite[kLanes / kValues<kDType>] = {};
  Doubles squared[kLanes / kDoubles] = {};

  bool is_finite() const {
    Doubles zero{};
    for (const Doubles& lanes : squared) zero += lanes - lanes;
    return !any_lane(zero != 0);
  }
};

// Adds 1 to the lanes of `count` where a finite value lies outside its window.
template <typename V, typename M>
LOFT_INLINE void count_outside(M& count, V value, V low, V high) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Lane<V>) == 4) {
    const __mmask16 above = _mm512_cmp_ps_mask(value, low, _CMP_GE_OQ);
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(above, value, high, _CMP_LE_OQ);
    const __m512i counts = bit_cast<__m512i>(count);
    count = bit_cast<M>(
        _mm512_mask_add_epi32(counts, _knot_mask16(inside), counts, _mm512_set1_epi32(1)));
    return;
  }
#endif
  count -= (value < low) | (value > high);  // a set lane of a mask is -1
}

// Adds kLanes coordinates from `i` on; `row` points at the row's coordinate 0.
template <DType kDType, bool kIsFinite>
LOFT_INLINE void add(const char* row, const Tile& tile, int64_t i, Sums<kDType>& sums) {
  using V = ValueOf<kDType>;
#pragma GCC unroll 8
  for (int at = 0; at < kLanes; at += kValues<kDType>, i += kValues<kDType>) {
    const char* from = row + i * kBytes<kDType>;
    const V value = read<kDType>(from);
    const V low = load<V>(tile.low + i * sizeof(Lane<V>));
    const V high = load<V>(tile.high + i * sizeof(Lane<V>));
    MaskOf<kDType>& outside = sums.outside[at / kValues<kDType>];
    if constexpr (kIsFinite) {
      count_outside(outside, value, low, high);
    } else {  // NaN orders above +inf
      const auto is_nan = value != value;
      outside -= (value < low) | (value > high);
      outside -= ((low != low) & ~is_nan) | (is_nan & (high == high));
      sums.non_finite[at / kValues<kDType>] -= (value - value) != 0;
    }
#pragma GCC unroll 2
    for (int part = 0; part < kValues<kDType> / kDoubles; ++part) {
      const auto results = load<Doubles>(tile.results + i + part * kDoubles);
      const Doubles distance = difference(part_of<kDType>(value, part, from), results);
      Doubles square = distance * distance;
      if constexpr (!kIsFinite) square = distance - distance == 0 ? square : Doubles{};
      sums.squared[at / kDoubles + part] += square;
    }
  }
}

// Adds coordinates [0, count), whole steps of kLanes.
template <DType kDType>
void add_to(RowLanes& lanes, const char* row, const Tile& tile, int64_t count) {
  Sums<kDType> sums;
  for (int64_t i = 0; i < count; i += kLanes) add<kDType, true>(row, tile, i, sums);
  if (__builtin_expect(!sums.is_finite(), 0)) {
    sums = {};
    for (int64_t i = 0; i < count; i += kLanes) add<kDType, false>(row, tile, i, sums);
    add_lanes(lanes.non_finite, sums.non_finite);
  }
  add_lanes(lanes.outside, sums.outside);
  add_lanes(lanes.squared, sums.squared);
}

// Results of kLanes coordinates as doubles.
template <DType kDType>
LOFT_INLINE void widen(const char* from, double* to) {
  for (int at = 0; at < kLanes; at += kValues<kDType>) {
    const auto values = read<kDType>(from + at * kBytes<kDType>);
    for (int part = 0; part < kValues<kDType> / kDoubles; ++part) {
      store(to + at + part * kDoubles, part_of<kDType>(values, part, from + at * kBytes<kDType>));
    }
  }
}

template <DType kDType>
void compare(const Compared& what, RowLanes* rows) {
  constexpr int64_t kRow = kBytes<kDType>, kValue = sizeof(Lane<ValueOf<kDType>>);
  alignas(64) double results[kCompared];
  // the last lanes, fewer than kLanes: copies padded with zeros, which are nowhere off
  constexpr int64_t kEnd = kLanes * sizeof(double);
  alignas(64) char row_end[kEnd], low_end[kEnd] = {}, high_end[kEnd] = {}, result_end[kEnd] = {};
  alignas(64) double results_end[kLanes];
  const int64_t whole = what.count / kLanes * kLanes, left = what.count - whole;
  for (int64_t i = 0; i < whole; i += kLanes) widen<kDType>(what.result + i * kRow, results + i);
  std::memcpy(low_end, what.low + whole * kValue, left * kValue);
  std::memcpy(high_end, what.high + whole * kValue, left * kValue);
  std::memcpy(result_end, what.result + whole * kRow, left * kRow);
  widen<kDType>(result_end, results_end);
  const Tile tile{results, what.low, what.high}, rest{results_end, low_end, high_end};
  for (int number = 0; number < what.num_rows; ++number) {
    const char* row = what.rows[number] + what.at * kRow;
    add_to<kDType>(rows[number], row, tile, whole);
    if (left == 0) continue;
    std::memset(row_end, 0, sizeof(row_end));
    std::memcpy(row_end, row + whole * kRow, left * kRow);
    add_to<kDType>(rows[number], row_end, rest, kLanes);
  }
}

}  // namespace

void compare_rows(DType dtype, const Compared& what, RowLanes* rows) {
  switch (dtype) {
    case DType::kFloat64: return compare<DType::kFloat64>(what, rows);
    case DType::kFloat32: return compare<DType::kFloat32>(what, rows);
    case DType::kFloat16: return compare<DType::kFloat16>(what, rows);
    case DType::kBFloat16: return compare<DType::kBFloat16>(what, rows);
  }
}

}  // namespace LOFT_ISA
}  // namespace loft
