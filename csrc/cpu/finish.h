// Layer 2. From ranked entries to results: the median, the mean of ranks, the mean around a centre,
// each once for every kernel, and how a vector of results is written.
#pragma once

#include "coordinate_rules.h"
#include "cpu/sort.h"

namespace loft::LOFT_ISA {

// Results of one vector: the aggregate and the window of values that were kept. `doubt` is 0, or
// NaN in lanes with a sum that is not finite. A kernel in registers leaves such a vector to `redo`:
// a rescue that reads the entries would force all of them into memory (commit 97722b1).
template <typename V>
struct Outcome {
  V result, low, high, doubt;
};

// The ranked values of one part of one vector.
template <typename F>
struct Ranked {
  const typename F::Entry* entries;
  int part;
  LOFT_INLINE typename F::V operator()(int rank) const { return F::value(entries[rank], part); }
};

// From the middle two ranks, which are one for an odd number of rows.
template <typename V>
LOFT_INLINE Outcome<V> median_of(V lower, V upper, bool is_one, MedianKind kind) {
  if (is_one) return {lower, lower, lower, V{}};
  return {pick_median(lower, upper, kind), lower, upper, V{}};
}

// From the sum of the kept ranks, the outermost of which are low and high.
template <typename V, typename Total>
LOFT_INLINE Outcome<V> mean_of_sum(V sum, Total total, V low, V high) {
  return {clamp_mean(sum / total, low, high), low, high, sum - sum};
}

// In place of weights, where every rank counts once.
struct ByCount {};

// The means, those of lanes recomputed whose sum overflowed although every kept value is finite.
template <typename V, typename At, typename Weight>
__attribute__((noinline)) V rescue(const Outcome<V>& mean, const At& at, const Weight& weight,
                                   int first, int count) {
  V result = mean.result;
  for (int lane = 0; lane < static_cast<int>(sizeof(V) / sizeof(Lane<V>)); ++lane) {
    const auto low = mean.low[lane], high = mean.high[lane];
    if (mean.doubt[lane] == 0 || !(low - low == 0) || !(high - high == 0)) continue;
    const auto value = [&](int i) { return static_cast<double>(at(i)[lane]); };
    const auto share = [&](int i) -> double {
      if constexpr (std::is_same_v<Weight, ByCount>) {
        return 1.0;
      } else {
        return static_cast<double>(weight(i)[lane]);
      }
    };
    double total = 0;
    for (int i = first; i < first + count; ++i) total += share(i);
    result[lane] = static_cast<Lane<V>>(scaled_mean(value, share, first, count, total));
  }
  return result;
}

// Mean of ranks first .. first + count - 1, which lie between low and high. kCount is `count` where
// that is known when it is compiled, else 0. `weight(i)`: counts in integer lanes, or ByCount.
template <int kCount, typename V, typename At, typename Weight>
LOFT_INLINE Outcome<V> mean_of(const At& at, const Weight& weight, int first, int count, V low,
                               V high) {
  const auto sum_of = [&](const auto& leaf) -> V {
    if constexpr (kCount > 0) {
      return fold_sum_fixed<kCount, V>(leaf, first);
    } else {
      return fold_sum<V>(leaf, first, count);
    }
  };
  Outcome<V> mean;  // doubt: the sum less itself
  if constexpr (std::is_same_v<Weight, ByCount>) {
    mean = mean_of_sum(sum_of(at), static_cast<Lane<V>>(count), low, high);
  } else {
    auto total = weight(first);  // in integer lanes, so exact: at most 2^30
#pragma GCC unroll 16
    for (int i = first + 1; i < first + count; ++i) total += weight(i);
    const auto product = [&](int i) -> V { return at(i) * __builtin_convertvector(weight(i), V); };
    mean = mean_of_sum(sum_of(product), __builtin_convertvector(total, V), low, high);
  }
  if constexpr (kCount == 0) {
    if (__builtin_expect(any_lane(mean.doubt != 0), 0)) {
      mean.result = clamp_mean(rescue(mean, at, weight, first, count), low, high);
    }
  }
  return mean;
}

// The mean of ranks f .. rows - 1 - f; kCount as above.
template <typename F, int kCount>
LOFT_INLINE auto trimmed_mean_of(const typename F::Entry* entries, int part, int f, int count)
    -> Outcome<typename F::V> {
  const Ranked<F> at{entries, part};
  const typename F::V low = at(f), high = at(f + count - 1);
  if constexpr (kIsWeighted<F>) {
    const auto weight = [&](int i) { return F::weight(entries[i]); };
    return mean_of<kCount>(at, weight, f, count, low, high);
  } else {
    return mean_of<kCount>(at, ByCount{}, f, count, low, high);
  }
}

// The median by weight: the lowest ranks with at least, and with more than, half of it up to them.
template <typename F>
LOFT_INLINE auto weighted_median_of(const Work& work, const typename F::Entry* entries, int part)
    -> Outcome<typename F::V> {
  const Ranked<F> at{entries, part};
  const auto total = typename F::I{} + static_cast<Lane<typename F::I>>(work.total_weight);
  typename F::I below{};  // twice the weight of the ranks before
  auto lower = at(0), upper = lower;
  for (int rank = 0; rank < work.num_rows; ++rank) {
    lower = below < total ? at(rank) : lower;
    upper = below <= total ? at(rank) : upper;
    below += 2 * F::weight(entries[rank]);
  }
  return median_of(lower, upper, false, work.params.kind);
}

// Mean of the rows - f values nearest to a centre. The window of kept ranks slides up while that
// brings a nearer value; slot i % keep takes the value that enters when the window leaves rank i.
// Of 5 rows, f = 2, keep = 3:
//   window at ranks 0 1 2   slots 0 1 2
//          at ranks 1 2 3   slots 3 1 2   rank 3 is nearer than rank 0
//          at ranks 2 3 4   slots 3 4 2   and rank 4 than rank 1
template <typename F>
LOFT_INLINE auto mean_around(const Work& work, const typename F::Entry* entries, int part,
                             typename F::V centre) -> Outcome<typename F::V> {
  using V = typename F::V;
  const Ranked<F> at{entries, part};
  const int f = work.params.f, keep = work.num_rows - f;
  V near[kMaxRows];  // the kept values, in no order
  typename F::I weights[kIsWeighted<F> ? kMaxRows : 1];
#pragma GCC unroll 32
  for (int i = 0; i < keep; ++i) {
    near[i] = at(i);
    if constexpr (kIsWeighted<F>) weights[i] = F::weight(entries[i]);
  }
  V low = at(0), high = at(keep - 1);  // edges of the window, for diagnostics
#pragma GCC unroll 8
  for (int i = 0, slot = 0; i < f; ++i, slot = slot + 1 == keep ? 0 : slot + 1) {
    const V leaving = at(i), entering = at(i + keep);
    const auto moves = slides(centre, leaving, entering);  // lane by lane
    low = moves ? at(i + 1) : low;
    high = moves ? entering : high;
    near[slot] = moves ? entering : near[slot];
    if constexpr (kIsWeighted<F>) {
      weights[slot] = moves ? F::weight(entries[i + keep]) : weights[slot];
    }
  }
  const auto value = [&](int i) { return near[i]; };
  Outcome<V> mean;
  if constexpr (kIsWeighted<F>) {
    mean = mean_of<0>(value, [&](int i) { return weights[i]; }, 0, keep, low, high);
  } else {
    mean = mean_of<0>(value, ByCount{}, 0, keep, low, high);
  }
  mean.result = centre == centre ? mean.result : centre;
  return mean;
}

template <typename F, Rule kRule>
LOFT_INLINE auto rule_of(const Work& work, const typename F::Entry* entries, int part)
    -> Outcome<typename F::V> {
  const Ranked<F> at{entries, part};
  const int rows = work.num_rows, f = work.params.f;
  const auto lower = at((rows - 1) / 2);
  if constexpr (kRule == Rule::kMedian && kIsWeighted<F>) {
    return weighted_median_of<F>(work, entries, part);
  } else if constexpr (kRule == Rule::kMedian) {
    return median_of(lower, at(rows / 2), rows % 2, work.params.kind);
  } else if constexpr (kRule == Rule::kTrimmedMean) {
    return trimmed_mean_of<F, 0>(entries, part, f, rows - 2 * f);
  } else if constexpr (kRule == Rule::kMeanAroundMedian) {
    return mean_around<F>(work, entries, part, rows % 2 ? lower : midpoint(lower, at(rows / 2)));
  } else {
    const auto mean = mean_of<0>(at, ByCount{}, f, rows - 2 * f, at(f), at(rows - 1 - f));
    return mean_around<F>(work, entries, part, mean.result);
  }
}

// Write a part's result at coordinate `at`, and the window if asked for. kIsNormal: no -0, no NaN.
template <typename F, bool kIsNormal = false>
LOFT_INLINE void put(const Work& work, const Outcome<typename F::V>& outcome, int part, int64_t at,
                     int64_t begin) {
  using V = typename F::V;
  char* to = work.out + byte_of<F>(at);  // any alignment
  if constexpr (kIsNormal) {
    store(to, outcome.result);
  } else {
    F::put(to, outcome.result, part);
  }
  if (work.low) {
    constexpr int kPartLanes = sizeof(V) / sizeof(Lane<V>);
    const int64_t place = at - begin + part * kPartLanes;  // windows start at `begin`
    store(static_cast<Lane<V>*>(work.low) + place, outcome.low);
    store(static_cast<Lane<V>*>(work.high) + place, outcome.high);
  }
}

// Write all parts' outcomes; false where a sum is not finite.
template <typename F, typename OutcomeOf>
LOFT_INLINE bool put_parts(const Work& work, int64_t at, int64_t begin,
                           const OutcomeOf& outcome_of) {
  typename F::V doubt{};  // 0 + NaN stays NaN
  for (int part = 0; part < F::kParts; ++part) {
    const auto outcome = outcome_of(part);
    put<F>(work, outcome, part, at, begin);
    doubt += outcome.doubt;
  }
  return !any_lane(doubt != 0);
}

}  // namespace loft::LOFT_ISA
