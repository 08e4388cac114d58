// Layer 2. The trimmed mean of 17 to 64 rows: only the ranks of a window come out of the network.
//
// A window from rank kFrom to its mirror image serves every f >= kFrom: which of its ranks are kept
// is known when the job runs, as masks over the ranks' distance from the middle. A leaf of the sum
// that is masked counts as zero, which leaves the bits as they are (coordinate_rules.h).
#pragma once

#include "cpu/finish.h"

namespace loft {
namespace LOFT_ISA {

#include "windows.h"

// Bits of pair k, the ranks at distance k from the middle: all set in `kept` where they are kept,
// in `edge` where they are the outermost that are.
template <typename F>
struct WindowMasks {
  static constexpr int kPairs = 33;
  using Sum = Lane<decltype(typename F::V{} == typename F::V{})>;
  Sum kept[kPairs];
  typename F::Bits edge[kPairs];

  WindowMasks(int rows, int f) {
    const int pairs = (rows + 1) / 2 - f;
    for (int k = 0; k < kPairs; ++k) {
      kept[k] = k < pairs ? -1 : 0;
      edge[k] = k == pairs - 1 ? -1 : 0;
    }
  }
};

// The mean of the kept ranks; `low` and `high` are the outermost of them.
template <typename F, int kRows, int kFrom>
LOFT_INLINE auto window_mean(const WindowMasks<F>& masks, const typename F::Entry* entries,
                             int part, int f) -> Outcome<typename F::V> {
  using V = typename F::V;
  using Entry = typename F::Entry;
  constexpr int kPairs = (kRows + 1) / 2 - kFrom;
  constexpr int kLower = (kRows - 1) / 2, kUpper = kRows / 2;  // the same for an odd count
  Entry low{}, high{};
#pragma GCC unroll 64
  for (int k = 0; k < kPairs; ++k) {
    low |= entries[kLower - k] & masks.edge[k];
    high |= entries[kUpper + k] & masks.edge[k];
  }
  const auto leaf = [&](int k) -> V {
    const V lower = F::value(entries[kLower - k], part);
    const V sum = kLower == kUpper && k == 0 ? lower : lower + F::value(entries[kUpper + k], part);
    const auto bits = bit_cast<decltype(V{} == V{})>(sum) & masks.kept[k];
    return bit_cast<V>(bits);
  };
  const V sum = Tree<kPairs>::sum(leaf, 0);
  const V first = F::value(low, part), last = F::value(high, part);
  const V mean = clamp_mean(sum / static_cast<Lane<V>>(kRows - 2 * f), first, last);
  return {mean, first, last, sum - sum};
}

template <typename F, int kRows, int kFrom>
int64_t run_window(const Work& work, int64_t begin, int64_t end) {
  const Source source{work.rows, work.weights};
  const WindowMasks<F> masks(kRows, work.params.f);
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    const RowLoad<F, kRows> load{source, at * static_cast<int64_t>(sizeof(typename F::Bits))};
    load.fetch(vector);
    WindowNetwork<kRows, kFrom>::apply(entries, load);
    typename F::V doubt{};
    for (int part = 0; part < F::kParts; ++part) {
      const auto outcome = window_mean<F, kRows, kFrom>(masks, entries, part, work.params.f);
      put<F>(work, outcome, part, at, begin);
      doubt += outcome.doubt;
    }
    if (__builtin_expect(any_lane(doubt != 0), 0)) redo<F>(work, at, begin);
  }
  return at;
}

// The narrowest window that holds all kept ranks.
template <typename F, int kRows>
Run window_of(int f) {
  if (f >= kRows / 4) return run_window<F, kRows, kRows / 4>;
  if (f >= kRows / 8) return run_window<F, kRows, kRows / 8>;
  return run_window<F, kRows, 0>;
}

template <typename F, int kFirst, int... kMore>
Run window_for(const Work& work, std::integer_sequence<int, kMore...>) {
  using Choose = Run (*)(int);
  constexpr Choose table[] = {window_of<F, kFirst + kMore>...};
  return table[work.num_rows - kFirst](work.params.f);
}

}  // namespace LOFT_ISA
}  // namespace loft
