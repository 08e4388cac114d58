// Layer 2. What a comparison of rows with their window reads and counts, on the vectors of one
// instruction set.
#pragma once

#include <type_traits>

#include "cpu/dispatch.h"
#include "cpu/formats.h"

namespace loft {
namespace LOFT_ISA {

constexpr int kLanes = RowLanes::kLanes;
// No wider than 32 bytes: floats that a wide register takes would be moved and then converted.
constexpr int kDoubleBytes = kVectorBytes < 32 ? kVectorBytes : 32;
using Doubles = Vector<double, kDoubleBytes>;
constexpr int kDoubles = kDoubleBytes / 8;

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

template <DType kDType>
constexpr int kParts = kValues<kDType> / kDoubles;

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

// a - b. With AVX2 the units that add, compare and convert are short: those that multiply subtract,
// too, as their product is exact.
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
struct Count {
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
template <>
struct Count<DType::kFloat32> : CountedFloats {};
template <>
struct Count<DType::kFloat16> : CountedFloats {};
template <>
struct Count<DType::kBFloat16> : CountedFloats {};
#endif

// Whether values inside their window are counted, which takes an instruction less.
template <typename V>
constexpr bool kCountsInside = kVectorBytes == 64 && sizeof(V) == 64;

// Counts finite values: outside their window, or inside. A window that ends in NaN has no value
// above it; where it begins with NaN the result is NaN, and this is not asked. kIsOne: it begins
// and ends with one value.
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

}  // namespace LOFT_ISA
}  // namespace loft
