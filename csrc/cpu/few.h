// Layer 2. The trimmed mean by weight of few float32 rows.
//
// Keys stay 32 bits wide and the weights move beside them. Rows that tie must end in the order of
// their weights, so the rows are taken by weight, and only neighbours are exchanged, never equals:
// a sort that keeps the order of ties.
#pragma once

#include <algorithm>

#include "cpu/general.h"

namespace loft {
namespace LOFT_ISA {

struct Carried {
  Vector<int32_t> key, weight;
};

LOFT_INLINE void exchange_neighbours(Carried& a, Carried& b) {
  const auto swap = a.key > b.key;
  const Carried low{a.key < b.key ? a.key : b.key, swap ? b.weight : a.weight};
  const Carried high{a.key > b.key ? a.key : b.key, swap ? a.weight : b.weight};
  a = low;
  b = high;
}

template <int kRows, int kF>
int64_t run_few(const Work& work, int64_t begin, int64_t end) {
  using F = Weighted<Float32>;
  using V = F::V;
  std::pair<int32_t, const char*> rows[kRows];
  for (int row = 0; row < kRows; ++row) rows[row] = {work.weights[row], work.rows[row]};
  std::stable_sort(rows, rows + kRows,
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    Carried v[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const char* from = rows[row].second + at * 4;
      if (vector % kVectorsALine<F> == 0) prefetch<true>(from);
      v[row] = {Float32::load(from), Vector<int32_t>{} + rows[row].first};
    }
#pragma GCC unroll 8
    for (int last = kRows - 1; last > 0; --last) {
#pragma GCC unroll 8
      for (int i = 0; i < last; ++i) exchange_neighbours(v[i], v[i + 1]);
    }
    const auto value = [&](int i) { return Float32::value(v[i].key, 0); };
    const V low = value(kF), high = value(kRows - 1 - kF);
    V doubt{};
    const V mean = weighted_mean_of<kRows - 2 * kF>(
        value, [&](int i) { return v[i].weight; }, kF, kRows - 2 * kF, low, high, doubt);
    put<F>(work, Outcome<V>{mean, low, high, doubt}, 0, at, begin);
    if (__builtin_expect(any_lane(doubt != 0), 0)) redo<F>(work, at, begin);
  }
  return at;
}

}  // namespace LOFT_ISA
}  // namespace loft
