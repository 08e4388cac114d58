// Layer 2. The kernel for any rule, number of rows and f: rank all rows into a buffer, then finish.
#pragma once

#include <algorithm>

#include "cpu/finish.h"

namespace loft::LOFT_ISA {

// Vectors between loading and finishing, of one group. Bound from the L1 cache: 4 x 32 rows, 8 KiB.
constexpr int kBatch = 4;

// The same of more rows, which lie on more pages than the L1 dTLB has entries: a visit to a row
// costs a translation, so it takes at least a line. Measured (commits 251c9e9, 753032e).
template <typename F>
constexpr int kManyBatch = kVectorsALine<F> > 2 ? kVectorsALine<F> : 2;

// Finish `vectors` neighbouring vectors from coordinate `at` on.
template <typename F, Rule kRule>
void finish(const Work& work, const typename F::Entry* entries, int stride, int vectors, int64_t at,
            int64_t begin) {
  for (int vector = 0; vector < vectors; ++vector, at += F::kLanes, entries += stride) {
    for (int part = 0; part < F::kParts; ++part) {
      put<F>(work, rule_of<F, kRule>(work, entries, part), part, at, begin);
    }
  }
}

// Rank the rows of whole vectors from `begin` on, then finish them; returns where it stopped.
template <typename F>
int64_t run_general(const Work& work, int64_t begin, int64_t end) {
  alignas(64) typename F::Entry entries[kManyBatch<F> * (kMaxRows + kGroup<F>)];
  using Finish = void (*)(const Work&, const typename F::Entry*, int, int, int64_t, int64_t);
  constexpr auto finishes =
      table_of<kNumRules>([](auto rule) -> Finish { return finish<F, static_cast<Rule>(rule())>; });
  const Finish finish_vectors = finishes[static_cast<int>(work.params.rule)];
  const Source source{work.rows, work.weights};
  const int rows = work.num_rows, stride = padded<F>(rows);
  const bool is_group = rows <= kGroup<F>;  // one network, no merge
  const SortGroup<F> sort = sort_group_for<F>(is_group ? rows : kGroup<F>);
  const int outer = work.params.rule == Rule::kTrimmedMean ? work.params.f : 0;  // not wanted
  const int most = is_group ? std::max(kBatch, kVectorsALine<F>) : kManyBatch<F>;
  return for_each_batch<F>(begin, end, most, [&](int64_t at, int vectors) {
    if (is_group) {
      sort(source, byte_of<F>(at), vectors, entries, stride);
    } else {
      const Wanted wanted{outer, rows - outer};
      rank_rows<F>(source, rows, byte_of<F>(at), vectors, entries, stride, wanted);
    }
    finish_vectors(work, entries, stride, vectors, at, begin);
  });
}

template <typename F>
void redo(const Work& work, int64_t at, int64_t begin) {
  if constexpr (std::is_same_v<F, WeightedBeside<Float32>>) {
    redo<Weighted<Float32>>(work, at, begin);  // which has a general kernel
  } else {
    using L = Lane<typename F::V>;
    Work vector = work;
    if (work.low) {
      vector.low = static_cast<L*>(work.low) + (at - begin);
      vector.high = static_cast<L*>(work.high) + (at - begin);
    }
    run_general<F>(vector, at, at + F::kLanes);  // its sums rescue themselves
  }
}

}  // namespace loft::LOFT_ISA
