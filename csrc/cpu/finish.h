// Layer 2. From ranked entries to results: the coordinate rules on vectors.
#pragma once

#include "coordinate_rules.h"
#include "cpu/dispatch.h"
#include "cpu/sort.h"

namespace loft {
namespace LOFT_ISA {

// Results of one vector: the aggregate and the window of values that were kept. `doubt` is 0, or
// NaN in lanes with a sum that is not finite: such a vector is done again with AnyShape.
template <typename V>
struct Outcome {
  V result, low, high, doubt;
};

// Rows and f of a job: known when it runs, or when it is compiled. With the latter the entries stay
// in registers, which a rescue that reads them would not allow: it is left to the former.
struct AnyShape {
  int n, f;
  static constexpr int kInner = 0;
};
template <int kRows, int kF>
struct FixedShape {
  static constexpr int n = kRows, f = kF;
  static constexpr int kInner = kRows - 2 * kF;
};

// Sum of `count` ranks; kCount is the same where it is known, else 0.
template <int kCount, typename V, typename At>
LOFT_INLINE V sum_of(const At& at, int first, int count) {
  if constexpr (kCount > 0) {
    return fold_sum_fixed<kCount, V>(at, first);
  } else {
    return fold_sum<V>(at, first, count);
  }
}

// Recompute the lanes whose sum overflowed although every kept value is finite.
template <typename V, typename At, typename Weight>
__attribute__((noinline)) V rescue(V mean, V sum, V low, V high, const At& at, const Weight& weight,
                                   int first, int count) {
  for (unsigned lane = 0; lane < sizeof(V) / sizeof(Lane<V>); ++lane) {
    const bool is_bad = !(sum[lane] - sum[lane] == 0);
    if (!is_bad || !(low[lane] - low[lane] == 0) || !(high[lane] - high[lane] == 0)) continue;
    double total = 0;
    for (int i = first; i < first + count; ++i) total += weight(i, lane);
    const auto value = [&](int i) { return static_cast<double>(at(i)[lane]); };
    const auto share = [&](int i) { return weight(i, lane); };
    mean[lane] = static_cast<Lane<V>>(scaled_mean(value, share, first, count, total));
  }
  return mean;
}

// Mean of at(first) .. at(first + count - 1), which lie between low and high.
template <int kCount, typename V, typename At>
LOFT_INLINE V mean_of(const At& at, int first, int count, V low, V high, V& doubt) {
  const V sum = sum_of<kCount, V>(at, first, count);
  V mean = sum / static_cast<Lane<V>>(count);
  if constexpr (kCount > 0) {
    doubt += sum - sum;
  } else if (__builtin_expect(any_lane((sum - sum) != 0), 0)) {
    mean = rescue(mean, sum, low, high, at, [](int, unsigned) { return 1.0; }, first, count);
  }
  return clamp_mean(mean, low, high);
}

// The same by weight: weight(i) holds counts in integer lanes.
template <int kCount, typename V, typename At, typename Weight>
LOFT_INLINE V weighted_mean_of(const At& at, const Weight& weight, int first, int count, V low,
                               V high, V& doubt) {
  auto total = weight(first);
#pragma GCC unroll 16
  for (int i = first + 1; i < first + count; ++i) total += weight(i);
  const auto product = [&](int i) -> V { return at(i) * __builtin_convertvector(weight(i), V); };
  const V sum = sum_of<kCount, V>(product, first, count);
  V mean = sum / __builtin_convertvector(total, V);
  if constexpr (kCount > 0) {
    doubt += sum - sum;
  } else if (__builtin_expect(any_lane((sum - sum) != 0), 0)) {
    const auto share = [&](int i, unsigned lane) { return static_cast<double>(weight(i)[lane]); };
    mean = rescue(mean, sum, low, high, at, share, first, count);
  }
  return clamp_mean(mean, low, high);
}

// The ranked values of one part of one vector.
template <typename F>
struct Ranked {
  const typename F::Entry* entries;
  int part;
  LOFT_INLINE typename F::V operator()(int rank) const { return F::value(entries[rank], part); }
};

template <typename F>
struct MedianRule {
  template <typename Shape>
  static LOFT_INLINE auto apply(Shape shape, const Work& work, const typename F::Entry* entries,
                                int part) -> Outcome<typename F::V> {
    using V = typename F::V;
    const Ranked<F> at{entries, part};
    const int n = shape.n;
    V lower = at((n - 1) / 2), upper = at(n / 2);
    if constexpr (kIsWeighted<F>) {
      const auto total = typename F::I{} + static_cast<Lane<typename F::I>>(work.total_weight);
      typename F::I below{};  // twice the weight of the ranks before
      lower = upper = at(0);
      for (int rank = 0; rank < n; ++rank) {
        lower = below < total ? at(rank) : lower;
        upper = below <= total ? at(rank) : upper;
        below += 2 * F::weight(entries[rank]);
      }
      return {pick_median(lower, upper, work.params.kind), lower, upper, V{}};
    }
    if (n % 2) return {lower, lower, lower, V{}};
    return {pick_median(lower, upper, work.params.kind), lower, upper, V{}};
  }
};

template <typename F>
struct TrimmedMeanRule {
  template <typename Shape>
  static LOFT_INLINE auto apply(Shape shape, const Work&, const typename F::Entry* entries,
                                int part) -> Outcome<typename F::V> {
    using V = typename F::V;
    const Ranked<F> at{entries, part};
    const int f = shape.f, count = shape.n - 2 * f;
    const V low = at(f), high = at(f + count - 1);
    V mean, doubt{};
    if constexpr (kIsWeighted<F>) {
      const auto weight = [&](int i) { return F::weight(entries[i]); };
      mean = weighted_mean_of<Shape::kInner>(at, weight, f, count, low, high, doubt);
    } else {
      mean = mean_of<Shape::kInner>(at, f, count, low, high, doubt);
    }
    return {mean, low, high, doubt};
  }
};

// Mean of the n - f values nearest to a centre. The window of kept ranks slides up while that
// brings a nearer value; slot i % keep holds the value that leaves when it moves from i to i + 1.
template <typename F>
LOFT_INLINE auto mean_around(AnyShape shape, const typename F::Entry* entries, int part,
                             typename F::V centre) -> Outcome<typename F::V> {
  using V = typename F::V;
  const Ranked<F> at{entries, part};
  const int n = shape.n, f = shape.f, keep = n - f;
  V near[kMaxRows];
  V low = at(0), high = at(keep - 1);
#pragma GCC unroll 32
  for (int i = 0; i < keep; ++i) near[i] = at(i);
  const auto slide = [&](int i) {
    const V leaving = at(i), entering = at(i + keep);
    const auto moves = slides(centre, leaving, entering);
    low = moves ? at(i + 1) : low;
    high = moves ? entering : high;
    return moves;
  };
  V mean, doubt{};
  if constexpr (kIsWeighted<F>) {
    typename F::I weights[kMaxRows];
    for (int i = 0; i < keep; ++i) weights[i] = F::weight(entries[i]);
    for (int i = 0, slot = 0; i < f; ++i, slot = slot + 1 == keep ? 0 : slot + 1) {
      const auto moves = slide(i);
      near[slot] = moves ? at(i + keep) : near[slot];
      weights[slot] = moves ? F::weight(entries[i + keep]) : weights[slot];
    }
    mean = weighted_mean_of<0>([&](int i) { return near[i]; }, [&](int i) { return weights[i]; }, 0,
                               keep, low, high, doubt);
  } else {
#pragma GCC unroll 8
    for (int i = 0, slot = 0; i < f; ++i, slot = slot + 1 == keep ? 0 : slot + 1) {
      near[slot] = slide(i) ? at(i + keep) : near[slot];
    }
    mean = mean_of<0>([&](int i) { return near[i]; }, 0, keep, low, high, doubt);
  }
  return {centre == centre ? mean : centre, low, high, doubt};
}

template <typename F>
struct MeanAroundMedianRule {
  static LOFT_INLINE auto apply(AnyShape shape, const Work&, const typename F::Entry* entries,
                                int part) -> Outcome<typename F::V> {
    const Ranked<F> at{entries, part};
    const int n = shape.n;
    const auto lower = at((n - 1) / 2);
    const auto centre = n % 2 ? lower : midpoint(lower, at(n / 2));
    return mean_around<F>(shape, entries, part, centre);
  }
};

template <typename F>
struct PhocasRule {
  static LOFT_INLINE auto apply(AnyShape shape, const Work&, const typename F::Entry* entries,
                                int part) -> Outcome<typename F::V> {
    using V = typename F::V;
    const Ranked<F> at{entries, part};
    const int f = shape.f, count = shape.n - 2 * f;
    V doubt{};
    const V centre = mean_of<0>(at, f, count, at(f), at(f + count - 1), doubt);
    return mean_around<F>(shape, entries, part, centre);
  }
};

// Write a result, and where one asks for it the window, at coordinate `at`. kIsNormal: the result
// is no -0 and no NaN.
template <typename F, bool kIsNormal = false>
LOFT_INLINE void put(const Work& work, const Outcome<typename F::V>& outcome, int part, int64_t at,
                     int64_t begin) {
  using V = typename F::V;
  char* to = work.out + at * static_cast<int64_t>(sizeof(typename F::Bits));
  if constexpr (kIsNormal) {
    store(to, outcome.result);
  } else {
    F::put(to, outcome.result, part);
  }
  if (work.low) {
    constexpr int kPartLanes = sizeof(V) / sizeof(Lane<V>);
    const int64_t place = at - begin + part * kPartLanes;
    store(static_cast<Lane<V>*>(work.low) + place, outcome.low);
    store(static_cast<Lane<V>*>(work.high) + place, outcome.high);
  }
}

// Finish `vectors` neighbouring vectors from coordinate `at` on.
template <typename F, typename RuleOf>
void finish(const Work& work, const typename F::Entry* entries, int stride, int vectors, int64_t at,
            int64_t begin) {
  const AnyShape shape{work.num_rows, work.params.f};
  for (int vector = 0; vector < vectors; ++vector, at += F::kLanes, entries += stride) {
    for (int part = 0; part < F::kParts; ++part) {
      put<F>(work, RuleOf::apply(shape, work, entries, part), part, at, begin);
    }
  }
}

}  // namespace LOFT_ISA
}  // namespace loft
