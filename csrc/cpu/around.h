// Layer 2. The mean around a centre of few float32 rows, on the floats themselves instead of keys.
//
// These rules need every rank as a value, so keys would be turned back one and all. A NaN counts as
// +inf here, which is as far outside: where one is kept, or a sum overflows, the vector is done
// again on keys. +0 and -0 may change places, or one take the other's: nothing shows it, because
// the sign of a zero sum is normalised.
#pragma once

#include "cpu/general.h"

namespace loft {
namespace LOFT_ISA {

using Floats = Vector<float>;

// The smaller and the larger value, b where neither is: as the instructions have it. The hundreds
// of networks below compile several times faster with them than with comparisons of vectors.
LOFT_INLINE Floats min_of(Floats a, Floats b) {
#if defined(__AVX512BW__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
LOFT_INLINE Floats max_of(Floats a, Floats b) {
#if defined(__AVX512BW__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// NaN becomes +inf.
LOFT_INLINE Floats limit(Floats value) {
  const Floats most = Floats{} + std::numeric_limits<float>::infinity();
#if defined(__AVX512BW__)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(value, most, _CMP_LT_OQ), most, value);
#else
  return min_of(value, most);
#endif
}

// Where a < b, `yes`, else `no`, for several pairs of them.
struct Less {
#if defined(__AVX512BW__)
  __mmask16 mask;
  LOFT_INLINE Less(Floats a, Floats b) : mask(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)) {}
  LOFT_INLINE Floats pick(Floats yes, Floats no) const {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
#elif defined(__AVX2__)
  __m256 mask;
  LOFT_INLINE Less(Floats a, Floats b) : mask(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) {}
  LOFT_INLINE Floats pick(Floats yes, Floats no) const { return _mm256_blendv_ps(no, yes, mask); }
#else
  decltype(Floats{} < Floats{}) mask;
  LOFT_INLINE Less(Floats a, Floats b) : mask(a < b) {}
  LOFT_INLINE Floats pick(Floats yes, Floats no) const { return mask ? yes : no; }
#endif
};

// Whether a lane of either is infinite or NaN.
LOFT_INLINE bool any_not_finite(Floats a, Floats b) {
#if defined(__AVX512BW__)
  return _mm512_cmp_ps_mask(a * 0.0f, b * 0.0f, _CMP_NEQ_UQ) != 0;
#else
  return any_lane(a * 0.0f != b * 0.0f);
#endif
}

struct Value {
  Floats v;
};

// With 64 byte vectors the machines have one unit for float minimum and maximum, and two for
// integers: what is not the minimum of both is then found by bits.
LOFT_INLINE void exchange(Value& a, Value& b) {
  const Floats low = min_of(a.v, b.v);
#if defined(__AVX512BW__)
  const auto bits = [](Floats value) { return bit_cast<__m512i>(value); };
  b.v = bit_cast<Floats>(_mm512_ternarylogic_epi32(bits(a.v), bits(b.v), bits(low), 0x96));
#else
  b.v = max_of(a.v, b.v);
#endif
  a.v = low;
}

// Most rows whose floats are sorted: more do not fit the registers, and keys, whose minimum and
// maximum take half as long, are faster.
constexpr int kValueRows = kVectorBytes == 64 ? 32 : kVectorBytes == 32 ? 24 : 16;

template <int kRows>
struct ValueLoad : RowLoad<Float32, kRows> {
  LOFT_INLINE Value operator()(int row) const {
    const char* from = this->source.rows[row] + this->at;
    if (kVectorsALine<Float32> == 1) prefetch<kRows <= kNearRows>(from);
    return {limit(load<Floats>(from))};
  }
};

// Mean of ranks first .. first + kCount - 1 and its sum. That of one or two values never leaves
// their range, whatever is rounded.
template <int kCount>
LOFT_INLINE Floats mean_of_values(const Value* ranked, int first, Floats low, Floats high,
                                  Floats& sum) {
  sum = fold_sum_fixed<kCount, Floats>([&](int i) { return ranked[i].v; }, first);
  const Floats mean = sum / static_cast<float>(kCount);
  if constexpr (kCount <= 2) return mean;
  return min_of(high, max_of(low, mean));
}

// See mean_around: slot i takes the value that enters where the one of rank i leaves. Where -inf
// should leave and both distances overflow it stays, so that the sum is not finite.
template <int kRows, int kF, bool kIsPhocas>
LOFT_INLINE Outcome<Floats> values_around(Value* ranked, bool& is_finite) {
  constexpr int kKeep = kRows - kF, kInner = kRows - 2 * kF, kLower = (kRows - 1) / 2;
  Floats sum, centre, centre_sum{};
  if constexpr (kIsPhocas) {
    const Floats low = ranked[kF].v, high = ranked[kKeep - 1].v;
    centre = mean_of_values<kInner>(ranked, kF, low, high, centre_sum);
  } else {
    centre = ranked[kLower].v;
    if constexpr (kRows % 2 == 0) centre = midpoint(centre, ranked[kLower + 1].v);
  }
  Floats low = ranked[0].v, high = ranked[kKeep - 1].v;
#pragma GCC unroll 32
  for (int i = 0; i < kF; ++i) {
    const Floats leaving = ranked[i].v, entering = ranked[i + kKeep].v;
    const Less moves(entering - centre, centre - leaving);
    low = moves.pick(ranked[i + 1].v, low);
    high = moves.pick(entering, high);
    ranked[i].v = moves.pick(entering, leaving);
  }
  const Floats mean = mean_of_values<kKeep>(ranked, 0, low, high, sum);
  is_finite = !any_not_finite(sum, centre_sum);
  return {mean + 0.0f, low, high, Floats{}};
}

template <int kRows, int kF, bool kIsPhocas>
int64_t run_around(const Work& work, int64_t begin, int64_t end) {
  const Source source{work.rows, nullptr};
  int64_t at = begin;
  for (int vector = 0; at + Float32::kLanes <= end; ++vector, at += Float32::kLanes) {
    Value ranked[kRows];
    const ValueLoad<kRows> load{{source, at * 4}};
    load.fetch(vector);
    SortNetwork<kRows>::apply(ranked, load);
    bool is_finite;
    const auto outcome = values_around<kRows, kF, kIsPhocas>(ranked, is_finite);
    put<Float32, true>(work, outcome, 0, at, begin);
    if (__builtin_expect(!is_finite, 0)) redo<Float32>(work, at, begin);
  }
  return at;
}

// Rank `vectors` neighbouring vectors of kRows rows, each into kRows values of `to`. What passes
// through memory anyway is ordered by keys. NaN comes out as it is, after +inf: no comparison with
// it holds, so it never enters a window, and where it is in one from the start the sum shows it.
template <int kRows>
__attribute__((noinline)) void rank_values(Source source, int64_t at, int vectors, Value* to) {
  for (int vector = 0; vector < vectors; ++vector, at += kStep<Float32>, to += kRows) {
    Float32::Entry ranked[kRows];
    const RowLoad<Float32, kRows> load{source, at};
    load.fetch(vector);
    SortNetwork<kRows>::apply(ranked, load);
#pragma GCC unroll 32
    for (int row = 0; row < kRows; ++row) to[row].v = Float32::value(ranked[row], 0);
  }
}

// The same of more rows, for any f: what does not depend on f is compiled once a row count, and a
// few vectors at a time pass through the first cache.
template <int kRows, int kF, bool kIsPhocas>
int64_t run_around_ranked(const Work& work, int64_t begin, int64_t end) {
  alignas(64) Value ranked[kBatch * kRows];
  int64_t at = begin;
  while (at + Float32::kLanes <= end) {
    const int64_t left = (end - at) / Float32::kLanes;
    const int vectors = left < kBatch ? static_cast<int>(left) : kBatch;
    rank_values<kRows>({work.rows, nullptr}, at * 4, vectors, ranked);
    for (int vector = 0; vector < vectors; ++vector, at += Float32::kLanes) {
      bool is_finite;
      const auto outcome = values_around<kRows, kF, kIsPhocas>(ranked + vector * kRows, is_finite);
      put<Float32, true>(work, outcome, 0, at, begin);
      if (__builtin_expect(!is_finite, 0)) redo<Float32>(work, at, begin);
    }
  }
  return at;
}

template <int kRows, int kF, bool kIsPhocas>
constexpr Run around() {
  if constexpr (kRows <= kValueRows) {
    return run_around<kRows, kF, kIsPhocas>;
  } else {
    return run_around_ranked<kRows, kF, kIsPhocas>;
  }
}

template <int kRows, bool kIsPhocas, int... kF>
Run around_of(int f, std::integer_sequence<int, kF...>) {
  constexpr Run table[] = {around<kRows, kF, kIsPhocas>()...};
  return table[f];
}
template <int kRows, bool kIsPhocas>
Run around_with(int f) {
  return around_of<kRows, kIsPhocas>(f, std::make_integer_sequence<int, (kRows + 1) / 2>{});
}

// Any f of up to `sizeof...(kLess)` rows.
template <bool kIsPhocas, int... kLess>
Run around_up_to(const Work& work, std::integer_sequence<int, kLess...>) {
  using Choose = Run (*)(int);
  constexpr Choose table[] = {around_with<kLess + 1, kIsPhocas>...};
  return table[work.num_rows - 1](work.params.f);
}

}  // namespace LOFT_ISA
}  // namespace loft
