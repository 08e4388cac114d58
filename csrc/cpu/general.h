// Layer 2. The kernel for any rule, number of rows and f: rank all rows into a buffer, then finish.
#pragma once

#include <algorithm>

#include "cpu/finish.h"

namespace loft {
namespace LOFT_ISA {

// Vectors between loading and finishing, of rows that are one group.
constexpr int kBatch = 4;

// The same of more rows, whose pages are more than the first address buffer holds: at least a line
// a visit.
template <typename F>
constexpr int kManyBatch = kVectorsALine<F> > 2 ? kVectorsALine<F> : 2;

// Aggregates whole vectors of coordinates [begin, end) and returns where it stopped.
using Run = int64_t (*)(const Work&, int64_t, int64_t);

template <typename F>
using Finish = void (*)(const Work&, const typename F::Entry*, int, int, int64_t, int64_t);

template <typename F>
Finish<F> finish_for(Rule rule) {
  switch (rule) {
    case Rule::kMedian: return finish<F, MedianRule<F>>;
    case Rule::kTrimmedMean: return finish<F, TrimmedMeanRule<F>>;
    case Rule::kMeanAroundMedian: return finish<F, MeanAroundMedianRule<F>>;
    case Rule::kPhocas: return finish<F, PhocasRule<F>>;
  }
  return nullptr;
}

// Rank the rows of whole vectors from `begin` on, then finish them; returns where it stopped.
template <typename F>
int64_t run_ranked(const Work& work, int64_t begin, int64_t end) {
  alignas(64) typename F::Entry entries[kManyBatch<F> * (kMaxRows + kGroup<F>)];
  const Source source{work.rows, work.weights};
  const int stride = padded<F>(work.num_rows);
  const int most = work.num_rows <= kGroup<F> ? std::max(kBatch, kVectorsALine<F>) : kManyBatch<F>;
  const Finish<F> finish_vectors = finish_for<F>(work.params.rule);
  const SortGroup<F> sort =
      sort_group_for<F>(work.num_rows <= kGroup<F> ? work.num_rows : kGroup<F>);
  const bool is_trimmed = work.params.rule == Rule::kTrimmedMean;
  const int outer = is_trimmed ? work.params.f : 0;
  const Wanted wanted{outer, work.num_rows - outer};
  int64_t at = begin;
  while (at + F::kLanes <= end) {
    const int64_t left = (end - at) / F::kLanes;
    const int vectors = left < most ? static_cast<int>(left) : most;
    const int64_t byte = at * static_cast<int64_t>(sizeof(typename F::Bits));
    if (work.num_rows <= kGroup<F>) {
      sort(source, byte, vectors, entries, stride);
    } else {
      rank_rows<F>(source, work.num_rows, byte, vectors, entries, stride, wanted);
    }
    finish_vectors(work, entries, stride, vectors, at, begin);
    at += vectors * F::kLanes;
  }
  return at;
}

// One vector once more, by the kernel that rescues sums which overflow; `begin` is where work.low
// and work.high start.
template <typename F>
__attribute__((noinline, cold)) void redo(const Work& work, int64_t at, int64_t begin) {
  using L = Lane<typename F::V>;
  Work vector = work;
  if (work.low) {
    vector.low = static_cast<L*>(work.low) + (at - begin);
    vector.high = static_cast<L*>(work.high) + (at - begin);
  }
  run_ranked<F>(vector, at, at + F::kLanes);
}

}  // namespace LOFT_ISA
}  // namespace loft
