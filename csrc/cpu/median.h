// Layer 2. The median without weights: few rows by a network of their own, more by two halves.
#pragma once

#include "cpu/general.h"

namespace loft {
namespace LOFT_ISA {

// Most rows whose median has a network of its own.
template <typename F>
constexpr int kMedianRows = kGroup<F> < 16 || kVectorBytes == 16 ? 32 : 64;

// The median of few rows by its own, shorter network.
template <typename F, int kRows>
int64_t run_median(const Work& work, int64_t begin, int64_t end) {
  using V = typename F::V;
  const Source source{work.rows, work.weights};
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    const RowLoad<F, kRows> load{source, at * static_cast<int64_t>(sizeof(typename F::Bits))};
    load.fetch(vector);
    MedianNetwork<kRows>::apply(entries, load);
    for (int part = 0; part < F::kParts; ++part) {
      const V lower = F::value(entries[(kRows - 1) / 2], part);
      V result = lower, upper = lower;
      if constexpr (kRows % 2 == 0) {
        upper = F::value(entries[kRows / 2], part);
        result = pick_median(lower, upper, work.params.kind);
      }
      put<F>(work, Outcome<V>{result, lower, upper, V{}}, part, at, begin);
    }
  }
  return at;
}

// The same of 16-bit values of which nobody asks for the window: one that is a row's is never
// widened, and the midpoint of two no more than it must.
template <typename F, int kRows, bool kIsMidpoint>
int64_t run_median_of_16_bits(const Work& work, int64_t begin, int64_t end) {
  const Source source{work.rows, nullptr};
  const int place = work.params.kind == MedianKind::kUpper ? kRows / 2 : (kRows - 1) / 2;
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    const RowLoad<F, kRows> load{source, at * static_cast<int64_t>(sizeof(typename F::Bits))};
    load.fetch(vector);
    MedianNetwork<kRows>::apply(entries, load);
    char* to = work.out + at * static_cast<int64_t>(sizeof(typename F::Bits));
    const auto &lower = entries[(kRows - 1) / 2], &upper = entries[kRows / 2];
    if constexpr (!kIsMidpoint) {
      F::put_key(to, place == kRows / 2 ? upper : lower);
    } else if (__builtin_expect(!F::put_midpoint(to, lower, upper), 0)) {
      redo<F>(work, at, begin);
    }
  }
  return at;
}

// Write the median of two ranked halves a and b: of the pairs of a's i-th smallest and b's i-th
// largest, the smaller ones are the lower half of all rows, so their largest is the lower median.
template <typename F>
LOFT_INLINE void put_median_of_halves(const Work& work, const typename F::Entry* first,
                                      const typename F::Entry* second, char* to) {
  const int rows = work.num_rows, half = (rows + 1) / 2;
  typename F::Entry lower = first[0], upper = second[half - 1];
  exchange(lower, upper);
  for (int i = 1; i < half; ++i) {
    typename F::Entry low = first[i], high = second[half - 1 - i];
    exchange(low, high);
    keep_max(low, lower);
    keep_min(upper, high);
  }
  for (int part = 0; part < F::kParts; ++part) {
    typename F::V result = F::value(lower, part);
    if (rows % 2 == 0) result = pick_median(result, F::value(upper, part), work.params.kind);
    F::put(to, result, part);
  }
}

// The median of more rows: two halves, each ranked in a buffer. An odd count is made even by one
// row of +inf, whose lower median is the same.
template <typename F>
int64_t run_median_of_halves(const Work& work, int64_t begin, int64_t end) {
  constexpr int kHalf = kManyBatch<F> * (kMaxRows / 2 + kGroup<F>);
  alignas(64) typename F::Entry first[kHalf], second[kHalf];
  const int rows = work.num_rows, half = (rows + 1) / 2, stride = padded<F>(half);
  const Source source{work.rows, nullptr}, rest{work.rows + half, nullptr};
  int64_t at = begin;
  while (at + F::kLanes <= end) {
    const int64_t left = (end - at) / F::kLanes;
    const int vectors = left < kManyBatch<F> ? static_cast<int>(left) : kManyBatch<F>;
    const int64_t byte = at * static_cast<int64_t>(sizeof(typename F::Bits));
    rank_rows<F>(source, half, byte, vectors, first, stride, {0, half});
    rank_rows<F>(rest, rows - half, byte, vectors, second, stride, {0, half});
    for (int vector = 0; vector < vectors; ++vector) {
      const int place = vector * stride;
      if (rows % 2) set_last(second[place + half - 1]);
      put_median_of_halves<F>(work, first + place, second + place,
                              work.out + byte + vector * kStep<F>);
    }
    at += vectors * F::kLanes;
  }
  return at;
}

template <typename F, int kRows>
Run median_with(const Work& work) {
  if constexpr (F::kParts == 2) {
    if (!work.low) {
      const bool is_midpoint = work.params.kind == MedianKind::kMidpoint;
      if constexpr (kRows % 2 == 0) {
        if (is_midpoint) return run_median_of_16_bits<F, kRows, true>;
      }
      return run_median_of_16_bits<F, kRows, false>;
    }
  }
  return run_median<F, kRows>;
}

template <typename F, int... kRows>
Run median_for(const Work& work, std::integer_sequence<int, kRows...>) {
  using Choose = Run (*)(const Work&);
  constexpr Choose table[] = {median_with<F, kRows + 1>...};
  return table[work.num_rows - 1](work);
}

// Null where the general kernel does it.
template <typename F>
Run median_for(const Work& work) {
  if (work.num_rows <= kMedianRows<F>) {
    return median_for<F>(work, std::make_integer_sequence<int, kMedianRows<F>>{});
  }
  return work.low ? nullptr : run_median_of_halves<F>;
}

}  // namespace LOFT_ISA
}  // namespace loft
