// Layer 2. The trimmed mean of rows that stay in registers: every f of few rows, windows of ranks
// of more, and few float32 rows with weights. The mean is the trimmed mean with f = 0.
#pragma once

#include <algorithm>

#include "cpu/general.h"

namespace loft::LOFT_ISA {

#include "windows.h"

template <typename F, int kRows, int kF>
struct TrimmedMean : InRegisters<F, kRows> {
  using InRegisters<F, kRows>::InRegisters;
  using Network = SortNetwork<kRows>;

  LOFT_INLINE bool finish(const Work& work, const typename F::Entry* entries, int64_t at,
                          int64_t begin) const {
    return put_parts<F>(work, at, begin, [&](int part) LOFT_INLINE_LAMBDA {
      return trimmed_mean_of<F, kRows - 2 * kF>(entries, part, kF, kRows - 2 * kF);
    });
  }
};

// A window from rank kFrom to its mirror image serves every f >= kFrom: which of its ranks are kept
// is known when the job runs, as masks over the ranks' distance from the middle. A pair that is
// masked adds zero to the sum, which leaves the bits as they are (coordinate_rules.h). Of 20 rows
// and f = 7, kFrom = 5:
//   pair k            0      1      2      3      4
//   ranks            9 10   8 11   7 12   6 13   5 14
//   kept, edge       1 0    1 0    1 1    0 0    0 0
template <typename F, int kRows, int kFrom>
struct WindowMean : InRegisters<F, kRows> {
  using Network = WindowNetwork<kRows, kFrom>;
  using V = typename F::V;
  static constexpr int kPairs = (kRows + 1) / 2 - kFrom;
  // All bits of pair k, in `kept` where it is kept, in `edge` where it is the outermost that is.
  Lane<decltype(V{} == V{})> kept[kPairs];
  typename F::Bits edge[kPairs];

  explicit WindowMean(const Work& work) : InRegisters<F, kRows>(work) {
    const int pairs = (kRows + 1) / 2 - work.params.f;  // kept; the middle counts as one
    for (int k = 0; k < kPairs; ++k) {
      kept[k] = k < pairs ? -1 : 0;
      edge[k] = k == pairs - 1 ? -1 : 0;
    }
  }

  LOFT_INLINE bool finish(const Work& work, const typename F::Entry* entries, int64_t at,
                          int64_t begin) const {
    constexpr int kLower = (kRows - 1) / 2, kUpper = kRows / 2;  // the same for an odd count
    typename F::Entry low{}, high{};
#pragma GCC unroll 64
    for (int k = 0; k < kPairs; ++k) {
      low |= entries[kLower - k] & edge[k];
      high |= entries[kUpper + k] & edge[k];
    }
    return put_parts<F>(work, at, begin, [&](int part) LOFT_INLINE_LAMBDA {
      const auto leaf = [&](int k) -> V {
        const V lower = F::value(entries[kLower - k], part);
        const bool is_one = kLower == kUpper && k == 0;
        const V sum = is_one ? lower : lower + F::value(entries[kUpper + k], part);
        return bit_cast<V>(bit_cast<decltype(V{} == V{})>(sum) & kept[k]);
      };
      return mean_of_sum(Tree<kPairs>::sum(leaf, 0),
                         static_cast<Lane<V>>(kRows - 2 * work.params.f), F::value(low, part),
                         F::value(high, part));
    });
  }
};

// Few float32 rows by weight: keys stay 32 bits wide with the weights beside them. Rows that tie
// must end in the order of their weights, so they are taken by weight, and only neighbours are
// exchanged, never equals: a sort that keeps the order of ties.
template <int kRows>
struct StableSort {
  template <typename Load>
  static LOFT_INLINE void apply(Beside<Float32>* v, const Load& load) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) v[row] = load(row);
#pragma GCC unroll 8
    for (int last = kRows - 1; last > 0; --last) {
#pragma GCC unroll 8
      for (int i = 0; i < last; ++i) exchange_neighbours(v[i], v[i + 1]);
    }
  }
};

template <int kRows, int kF>
struct FewByWeight : TrimmedMean<WeightedBeside<Float32>, kRows, kF> {
  using Network = StableSort<kRows>;
  const char* rows[kRows];
  int32_t weights[kRows];

  explicit FewByWeight(const Work& work) : TrimmedMean<WeightedBeside<Float32>, kRows, kF>(work) {
    std::pair<int32_t, const char*> order[kRows];
    for (int row = 0; row < kRows; ++row) order[row] = {work.weights[row], work.rows[row]};
    std::stable_sort(order, order + kRows,
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (int row = 0; row < kRows; ++row) {
      weights[row] = order[row].first;
      rows[row] = order[row].second;
    }
    this->source = {rows, weights};  // by weight from now on
  }
};

// Most rows whose trimmed mean is compiled with every f. Bound from the time to compile: the number
// of networks grows with the square. With weights twice as many have f = rows / 4, the usual one.
template <typename F>
constexpr int kEveryF = std::is_same_v<F, Float32>             ? 16
                        : std::is_same_v<F, Weighted<Float32>> ? 8
                                                               : 0;
template <typename F>
constexpr int kWindowRows = std::is_same_v<F, Float32> && kVectorBytes > 16 ? 64 : 0;

template <typename F, int kRows>
Run every_f(int f) {
  constexpr auto table = table_of<(kRows + 1) / 2>([](auto trim) -> Run {
    constexpr bool kIsFew = std::is_same_v<F, WeightedBeside<Float32>>;
    using Kernel =
        std::conditional_t<kIsFew, FewByWeight<kRows, trim>, TrimmedMean<F, kRows, trim>>;
    return for_each_vector<Kernel>;
  });
  return table[f];
}

// The narrowest window that holds all kept ranks.
template <typename F, int kRows>
Run window(int f) {
  if (f >= kRows / 4) return for_each_vector<WindowMean<F, kRows, kRows / 4>>;
  if (f >= kRows / 8) return for_each_vector<WindowMean<F, kRows, kRows / 8>>;
  return for_each_vector<WindowMean<F, kRows, 0>>;
}

// The kernel for a trimmed mean; null where the general one does it.
template <typename F>
Run trimmed_mean_kernel(const Work& work) {
  using Choose = Run (*)(int f);
  const int rows = work.num_rows, f = work.params.f;
  if constexpr (std::is_same_v<F, Weighted<Float32>>) {
    if (rows == 3) return every_f<WeightedBeside<Float32>, 3>(f);
    if (rows == 4) return every_f<WeightedBeside<Float32>, 4>(f);
    if (rows == 5) return every_f<WeightedBeside<Float32>, 5>(f);
  }
  if constexpr (kEveryF<F> > 0) {
    constexpr auto few =
        table_of<kEveryF<F>>([](auto less) -> Choose { return every_f<F, less + 1>; });
    if (rows <= kEveryF<F>) return few[rows - 1](f);
  }
  if constexpr (kWindowRows<F> > 0) {
    constexpr auto more = table_of<kWindowRows<F> - kEveryF<F>>(
        [](auto less) -> Choose { return window<F, kEveryF<F> + 1 + less>; });
    if (rows <= kWindowRows<F>) return more[rows - kEveryF<F> - 1](f);
  }
  if constexpr (std::is_same_v<F, Weighted<Float32>> && kVectorBytes > 16) {
    constexpr auto quarters = table_of<kEveryF<F>>([](auto less) -> Run {
      constexpr int kRows = kEveryF<F> + 1 + less;
      return for_each_vector<TrimmedMean<F, kRows, kRows / 4>>;
    });
    if (rows <= 2 * kEveryF<F> && f == rows / 4) return quarters[rows - kEveryF<F> - 1];
  }
  return nullptr;
}

}  // namespace loft::LOFT_ISA
