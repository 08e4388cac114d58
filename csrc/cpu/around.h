// Layer 2. The mean around a centre of few float32 rows, on the floats themselves instead of keys.
//
// These rules need every rank as a value, so keys would be turned back one and all. A NaN counts as
// +inf here, which is as far outside: where one is kept, or a sum overflows, the vector is done
// again on keys. +0 and -0 may change places, or one take the other's: nothing shows it, because
// the sign of a zero sum is normalised.
#pragma once

#include "cpu/general.h"

namespace loft::LOFT_ISA {

using Floats = Vector<float>;

// NaN becomes +inf.
LOFT_INLINE Floats limit(Floats value) {
  const Floats most = Floats{} + std::numeric_limits<float>::infinity();
#if defined(__AVX512BW__)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(value, most, _CMP_LT_OQ), most, value);
#else
  return smaller(value, most);
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
// integers: the maximum is then found by bits, as what a ^ b leaves without the minimum.
LOFT_INLINE void exchange(Value& a, Value& b) {
  const Floats low = smaller(a.v, b.v);
#if defined(__AVX512BW__)
  const auto bits = [](Floats value) { return bit_cast<__m512i>(value); };
  b.v = bit_cast<Floats>(_mm512_ternarylogic_epi32(bits(a.v), bits(b.v), bits(low), 0x96));
#else
  b.v = larger(a.v, b.v);
#endif
  a.v = low;
}

// Most rows whose floats are sorted in registers, and most that have a kernel of their own at all.
// Measured (commits 2ab0a77, c2dec97): more than the first do not fit the registers, and keys,
// whose minimum and maximum take half as long, are faster.
constexpr int kValueRows = kVectorBytes == 64 ? 32 : kVectorBytes == 32 ? 24 : 16;
constexpr int kAroundRows = kVectorBytes > 16 ? 32 : kValueRows;
template <int kRows>
struct ValueLoad : RowLoad<Float32, kRows> {
  LOFT_INLINE Value operator()(int row) const {
    const char* from = this->source.rows[row] + this->at;
    if (kVectorsALine<Float32> == 1) prefetch<kRows <= kNearRows>(from);
    return {limit(load<Floats>(from))};
  }
};

// Mean of kCount ranks from `first` on and its sum. That of one or two never leaves their range.
template <int kCount>
LOFT_INLINE Floats mean_of_values(const Value* ranked, int first, Floats low, Floats high,
                                  Floats& sum) {
  sum = fold_sum_fixed<kCount, Floats>([&](int i) { return ranked[i].v; }, first);
  const Floats mean = sum / static_cast<float>(kCount);
  if constexpr (kCount <= 2) return mean;
  return smaller(high, larger(low, mean));
}

// See mean_around in finish.h: slot i takes the value that enters where the one of rank i leaves.
// Where -inf should leave and both distances overflow it stays, so that the sum is not finite.
// False where it is not. Both rules share the code: which one it is, is asked once a vector.
template <int kRows, int kF>
LOFT_INLINE bool put_around(const Work& work, Value* ranked, int64_t at, int64_t begin) {
  constexpr int kKeep = kRows - kF, kInner = kRows - 2 * kF, kLower = (kRows - 1) / 2;
  Floats sum, centre, centre_sum{};
  if (work.params.rule == Rule::kPhocas) {
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
    const Less moves(entering - centre, centre - leaving);  // false for NaN
    low = moves.pick(ranked[i + 1].v, low);                 // rank i has left
    high = moves.pick(entering, high);
    ranked[i].v = moves.pick(entering, leaving);
  }
  const Floats mean = mean_of_values<kKeep>(ranked, 0, low, high, sum);
  put<Float32, true>(work, {mean + 0.0f, low, high, Floats{}}, 0, at, begin);
  return !any_not_finite(sum, centre_sum);
}

template <int kRows, int kF>
struct MeanAround : InRegisters<Float32, kRows> {
  using InRegisters<Float32, kRows>::InRegisters;
  using Entries = Value[kRows];
  using Load = ValueLoad<kRows>;
  using Network = SortNetwork<kRows>;

  LOFT_INLINE bool finish(const Work& work, Value* ranked, int64_t at, int64_t begin) const {
    return put_around<kRows, kF>(work, ranked, at, begin);
  }
};

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
// few vectors at a time pass through the L1 cache.
template <int kRows, int kF>
int64_t run_around_ranked(const Work& work, int64_t begin, int64_t end) {
  alignas(64) Value ranked[kBatch * kRows];  // [vectors, rows], in the L1 cache
  return for_each_batch<Float32>(begin, end, kBatch, [&](int64_t at, int vectors) {
    rank_values<kRows>({work.rows, nullptr}, byte_of<Float32>(at), vectors, ranked);
    for (int vector = 0; vector < vectors; ++vector, at += Float32::kLanes) {
      const bool is_finite = put_around<kRows, kF>(work, ranked + vector * kRows, at, begin);
      if (__builtin_expect(!is_finite, 0)) redo<Float32>(work, at, begin);
    }
  });
}

template <int kRows>
Run around(int f) {
  constexpr auto table = table_of<(kRows + 1) / 2>([](auto trim) -> Run {
    if constexpr (kRows <= kValueRows) {
      return for_each_vector<MeanAround<kRows, trim>>;
    } else {
      return run_around_ranked<kRows, trim>;
    }
  });
  return table[f];
}

// The kernel for a mean around a centre; null where the general one does it.
template <typename F>
Run around_kernel(const Work& work) {
  if constexpr (std::is_same_v<F, Float32>) {
    using Choose = Run (*)(int f);
    constexpr auto table =
        table_of<kAroundRows>([](auto less) -> Choose { return around<less + 1>; });
    if (work.num_rows <= kAroundRows) return table[work.num_rows - 1](work.params.f);
  }
  return nullptr;
}

}  // namespace loft::LOFT_ISA
