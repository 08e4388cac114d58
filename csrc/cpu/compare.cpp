// Layer 2. How far each row was off, on the vectors of one instruction set.
//
// The sum of squares runs over sixteen lanes, whatever the machine's vectors: it is then the same
// at every level, and its order depends on the coordinates alone. A row's coordinates are first
// taken for finite, which their sums show; else they are gone through again, value by value.

#include "cpu/dispatch.h"
#include "cpu/formats.h"

namespace loft::LOFT_ISA {
namespace {

constexpr int kLanes = RowLanes::kLanes;
// No wider than 32 bytes: floats that a wide register takes would be moved and then converted.
constexpr int kDoubleBytes = kVectorBytes < 32 ? kVectorBytes : 32;
using Doubles = Vector<double, kDoubleBytes>;
constexpr int kDoubles = kDoubleBytes / 8;  // lanes

template <DType kDType>
constexpr int64_t kBytes = sizeof(typename Stored<kDType>::Bits);

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

template <DType kDType>
constexpr int kParts = kValues<kDType> / kDoubles;  // registers of doubles for one of values

// Rows that are compared in one loop: they share what is loaded to compare them with. Float64 and
// the narrowest vectors have no registers left for a second row's sums.
template <DType kDType>
constexpr int kTogether = kDType == DType::kFloat64 ? 1 : kVectorBytes / 16;

// One of a register's parts as doubles; `from` is where the register was read.
template <DType kDType>
LOFT_INLINE Doubles part_of(ValueOf<kDType> values, int part, [[maybe_unused]] const char* from) {
  if constexpr (kDType == DType::kFloat64) {
    return values;
  } else {
    using Part = Vector<float, kDoubleBytes / 2>;
    Part some;
    if constexpr (kDType == DType::kFloat32) {
      some = load<Part>(from + part * sizeof(Part));
    } else if constexpr (kParts<kDType> == 2) {
      some = half_of<Part>(values, part);
    } else {
      some = half_of<Part>(half_of<Vector<float, kDoubleBytes>>(values, part / 2), part % 2);
    }
#if defined(__AVX2__)
    return _mm256_cvtps_pd(some);
#else
    return __builtin_convertvector(some, Doubles);
#endif
  }
}

// a - b. With AVX2 units that add are short: those that multiply subtract too, exact as a * 1 is.
LOFT_INLINE Doubles difference(Doubles a, Doubles b) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
  return _mm256_fmsub_pd(a, Doubles{} + 1.0, b);
#else
  return a - b;
#endif
}

// Holds a value in its register: GCC would load it again for every row or comparison.
template <typename V>
LOFT_INLINE void hold([[maybe_unused]] V& value) {
#if defined(__AVX2__)
  asm("" : "+v"(value));
#endif
}

// How many lanes are set in masks: lane by lane, as a set lane is -1. With AVX2 one number for all
// lanes of floats, which leaves the registers to the squares of two rows.
template <DType kDType>
struct CountedLanes {
  MaskOf<kDType> lanes = {};

  LOFT_INLINE void operator+=(MaskOf<kDType> mask) { lanes -= mask; }
  LOFT_INLINE int32_t sum() const {
    int32_t sum = 0;
    for (int lane = 0; lane < kValues<kDType>; ++lane) sum += static_cast<int32_t>(lanes[lane]);
    return sum;
  }
};

#if defined(__AVX2__) && !defined(__AVX512BW__)
struct CountedFloats {
  int32_t counted = 0;

  LOFT_INLINE void operator+=(MaskOf<DType::kFloat32> mask) {
    counted += __builtin_popcount(_mm256_movemask_ps(bit_cast<__m256>(mask)));
  }
  LOFT_INLINE int32_t sum() const { return counted; }
};
template <DType kDType>
using Count = std::conditional_t<kDType == DType::kFloat64, CountedLanes<kDType>, CountedFloats>;
#else
template <DType kDType>
using Count = CountedLanes<kDType>;
#endif

// Whether values inside their window are counted, which takes an instruction less.
template <typename V>
constexpr bool kCountsInside = kVectorBytes == 64 && sizeof(V) == 64;

// Counts finite values: outside their window, or inside. A window that ends in NaN has no value
// above it; where it begins with NaN this is not asked. kIsOne: it begins and ends with one value.
template <DType kDType, bool kIsOne, typename V>
LOFT_INLINE void count_window(Count<kDType>& count, V value, V low, [[maybe_unused]] V high) {
#if defined(__AVX512BW__)
  if constexpr (kCountsInside<V>) {
    __mmask16 inside = _mm512_cmp_ps_mask(value, low, kIsOne ? _CMP_EQ_OQ : _CMP_NLT_UQ);
    if constexpr (!kIsOne) inside = _mm512_mask_cmp_ps_mask(inside, value, high, _CMP_NGT_UQ);
    const __m512i counts = bit_cast<__m512i>(count.lanes);
    const __m512i more = _mm512_mask_add_epi32(counts, inside, counts, _mm512_set1_epi32(1));
    count.lanes = bit_cast<MaskOf<kDType>>(more);
    return;
  }
#endif
  if constexpr (kIsOne) {
    count += value != low;
  } else {
    count += (value < low) | (value > high);
  }
}

// The results of one tile, the window that was kept there, and how far ahead rows are fetched.
struct Tile {
  const double* results;
  const char* low;
  const char* high;
  int64_t ahead;
};

// What a loop takes for granted.
enum class Given {
  kNothing,
  kFinite,     // values are finite
  kOneIsKept,  // and each coordinate's window is one value
};

template <DType kDType>
struct Sums {
  Count<kDType> outside, non_finite;
  Doubles squared[kLanes / kDoubles] = {};  // lane k adds coordinates k, k + 16, ...

  bool is_finite() const {
    Doubles zero{};
    for (const Doubles& lanes : squared) zero += lanes - lanes;
    return !any_lane(zero != 0);
  }
};

// Adds kLanes coordinates from `i` on, of kRows rows; `rows` point at their coordinate 0.
template <DType kDType, Given kGiven, int kRows>
LOFT_INLINE void add(const char* const* rows, const Tile& tile, int64_t i, Sums<kDType>* sums) {
  using V = ValueOf<kDType>;
  constexpr bool kIsOne = kGiven == Given::kOneIsKept;
#pragma GCC unroll 8
  for (int at = 0; at < kLanes; at += kValues<kDType>, i += kValues<kDType>) {
    V low = load<V>(tile.low + i * sizeof(Lane<V>));
    V high = kIsOne ? low : load<V>(tile.high + i * sizeof(Lane<V>));
    Doubles results[kParts<kDType>];
#pragma GCC unroll 4
    for (int part = 0; part < kParts<kDType>; ++part) {
      results[part] = load<Doubles>(tile.results + i + part * kDoubles);
      if constexpr (kRows > 2) hold(results[part]);  // for two there are no registers left
    }
    if constexpr (kRows > 1) hold(low);  // shared by the rows
    if constexpr (kRows > 1 && !kIsOne) hold(high);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const char* from = rows[row] + i * kBytes<kDType>;
      if (at * kBytes<kDType> % kLineBytes == 0) prefetch<true>(from, tile.ahead);
      V value = read<kDType>(from);
      hold(value);
      if constexpr (kGiven != Given::kNothing) {
        count_window<kDType, kIsOne>(sums[row].outside, value, low, high);
      } else {  // NaN orders above +inf
        const auto is_nan = value != value;
        sums[row].outside += (value < low) | (value > high);
        sums[row].outside += ((low != low) & ~is_nan) | (is_nan & (high == high));
        sums[row].non_finite += (value - value) != 0;
      }
#pragma GCC unroll 4
      for (int part = 0; part < kParts<kDType>; ++part) {
        const Doubles distance = difference(part_of<kDType>(value, part, from), results[part]);
        Doubles square = distance * distance;
        if constexpr (kGiven == Given::kNothing)
          square = distance - distance == 0 ? square : Doubles{};
        sums[row].squared[at / kDoubles + part] += square;
      }
    }
  }
}

// Adds `count` coordinates, whole steps of kLanes, of kRows rows from where `rows` point.
template <DType kDType, Given kGiven, int kRows>
void add_to(RowLanes* lanes, const char* const* rows, const Tile& tile, int64_t count) {
  Sums<kDType> sums[kRows];
  const char* from[kRows];
  for (int row = 0; row < kRows; ++row) from[row] = rows[row];
  for (int64_t i = 0; i < count; i += kLanes) add<kDType, kGiven, kRows>(from, tile, i, sums);
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    if (__builtin_expect(!sums[row].is_finite(), 0)) {
      sums[row] = {};  // again, value by value
      for (int64_t i = 0; i < count; i += kLanes) {
        add<kDType, Given::kNothing, 1>(from + row, tile, i, sums + row);
      }
      lanes[row].non_finite += sums[row].non_finite.sum();
    } else if constexpr (kCountsInside<ValueOf<kDType>>) {
      auto& counted = sums[row].outside.lanes;
      counted = static_cast<int>(count / kLanes) - counted;
    }
    lanes[row].outside += sums[row].outside.sum();
    double* squared = lanes[row].squared;
    for (const Doubles& sum : sums[row].squared) {
      store(squared, load<Doubles>(squared) + sum);
      squared += kDoubles;
    }
  }
}

template <DType kDType>
LOFT_INLINE void widen(const char* from, double* to) {
  for (int at = 0; at < kLanes; at += kValues<kDType>) {
    const auto values = read<kDType>(from + at * kBytes<kDType>);
    for (int part = 0; part < kParts<kDType>; ++part) {
      store(to + at + part * kDoubles, part_of<kDType>(values, part, from + at * kBytes<kDType>));
    }
  }
}

// The last lanes, fewer than kLanes: copies padded with zeros, which are nowhere off.
template <DType kDType>
__attribute__((noinline)) void compare_end(const Compared& what, int64_t at, RowLanes* rows) {
  constexpr int64_t kRow = kBytes<kDType>, kValue = sizeof(Lane<ValueOf<kDType>>);
  constexpr int64_t kEnd = kLanes * sizeof(double);
  alignas(64) char row[kEnd] = {}, low[kEnd] = {}, high[kEnd] = {}, result[kEnd] = {};
  alignas(64) double results[kLanes];
  const int64_t left = what.count - at;  // fewer than kLanes
  std::memcpy(low, what.low + at * kValue, left * kValue);
  std::memcpy(high, what.high + at * kValue, left * kValue);
  std::memcpy(result, what.result + at * kRow, left * kRow);
  widen<kDType>(result, results);
  for (int number = 0; number < what.num_rows; ++number) {
    std::memcpy(row, what.rows[number] + (what.at + at) * kRow, left * kRow);
    const char* from = row;
    add_to<kDType, Given::kFinite, 1>(rows + number, &from, {results, low, high, 0}, kLanes);
  }
}

// Compares rows from `number` on, kRows at a time, then what is left by fewer.
template <DType kDType, Given kGiven, int kRows>
void add_all(const Compared& what, const Tile& tile, int64_t count, int number, RowLanes* rows) {
  const char* from[kRows];
  for (; number + kRows <= what.num_rows; number += kRows) {
    for (int i = 0; i < kRows; ++i) from[i] = what.rows[number + i] + what.at * kBytes<kDType>;
    add_to<kDType, kGiven, kRows>(rows + number, from, tile, count);
  }
  if constexpr (kRows > 1) add_all<kDType, kGiven, kRows - 1>(what, tile, count, number, rows);
}

template <DType kDType>
void compare(const Compared& what, RowLanes* rows) {
  constexpr int64_t kRow = kBytes<kDType>;
  alignas(64) double results[kCompared];  // 3 KiB, in the L1 cache
  const int64_t whole = what.count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) widen<kDType>(what.result + i * kRow, results + i);
  constexpr int kMost = kTogether<kDType>;
  const Tile tile{results, what.low, what.high, what.ahead};
  if (what.low == what.high) {  // one buffer: windows of one value
    add_all<kDType, Given::kOneIsKept, kMost>(what, tile, whole, 0, rows);
  } else {
    add_all<kDType, Given::kFinite, kMost>(what, tile, whole, 0, rows);
  }
  if (whole < what.count) compare_end<kDType>(what, whole, rows);
}

}  // namespace

void compare_rows(DType dtype, const Compared& what, RowLanes* rows) {
  constexpr auto table =
      table_of<4>([](auto code) { return &compare<static_cast<DType>(code())>; });
  table[static_cast<int>(dtype)](what, rows);
}

}  // namespace loft::LOFT_ISA
