// Layer 2. The median without weights: up to 64 rows by a network of their own, more by two halves.
#pragma once

#include "cpu/general.h"

namespace loft::LOFT_ISA {

// Most rows whose median has a network of its own. Measured (commit 97722b1): with AVX-512 33 rows
// take 3.5 ns by it and 5.6 ns by halves, 64 rows 9.3 and 13.5.
template <typename F>
constexpr int kMedianRows = kGroup<F> < 16 || kVectorBytes == 16 ? 32 : 64;

template <typename F, int kRows>
struct MedianInRegisters : InRegisters<F, kRows> {
  using InRegisters<F, kRows>::InRegisters;
  using Network = MedianNetwork<kRows>;

  LOFT_INLINE bool finish(const Work& work, const typename F::Entry* entries, int64_t at,
                          int64_t begin) const {
    for (int part = 0; part < F::kParts; ++part) {
      const auto lower = F::value(entries[(kRows - 1) / 2], part);
      const auto upper = kRows % 2 ? lower : F::value(entries[kRows / 2], part);
      put<F>(work, median_of(lower, upper, kRows % 2, work.params.kind), part, at, begin);
    }
    return true;
  }
};

// The same of 16-bit values of which nobody asks for the window: one that is a row's is never
// widened, and the midpoint of two no more than it must.
template <typename F, int kRows, bool kIsMidpoint>
struct MedianOf16Bits : InRegisters<F, kRows> {
  using Network = MedianNetwork<kRows>;
  bool is_upper;

  explicit MedianOf16Bits(const Work& work)
      : InRegisters<F, kRows>(work), is_upper(work.params.kind == MedianKind::kUpper) {}

  LOFT_INLINE bool finish(const Work& work, const typename F::Entry* entries, int64_t at,
                          int64_t) const {
    char* to = work.out + byte_of<F>(at);
    const auto &lower = entries[(kRows - 1) / 2], &upper = entries[kRows / 2];
    if constexpr (kIsMidpoint) return F::put_midpoint(to, lower, upper);
    F::put_key(to, is_upper ? upper : lower);
    return true;
  }
};

// Write the median of two ranked halves a and b: of the pairs of a's i-th smallest and b's i-th
// largest, the smaller ones are the lower half of all rows, so their largest is the lower median.
//   a = 1 4 6, b = 2 3 9   pairs (1 9) (4 3) (6 2)   smaller 1 3 2, larger 9 4 6   median 3 and 4
template <typename F>
LOFT_INLINE void put_median_of_halves(const Work& work, const typename F::Entry* first,
                                      const typename F::Entry* second, char* to) {
  const int rows = work.num_rows, half = (rows + 1) / 2;
  typename F::Entry lower = first[0], upper = second[half - 1];  // pair 0
  exchange(lower, upper);
  for (int i = 1; i < half; ++i) {
    typename F::Entry low = first[i], high = second[half - 1 - i];
    exchange(low, high);
    keep_max(low, lower);   // `lower` becomes the largest of the smaller ones
    keep_min(upper, high);  // `upper` the smallest of the larger ones
  }
  for (int part = 0; part < F::kParts; ++part) {
    const auto low = F::value(lower, part), high = F::value(upper, part);
    F::put(to, median_of(low, high, rows % 2, work.params.kind).result, part);
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
  return for_each_batch<F>(begin, end, kManyBatch<F>, [&](int64_t at, int vectors) {
    const int64_t byte = byte_of<F>(at);
    rank_rows<F>(source, half, byte, vectors, first, stride, {0, half});
    rank_rows<F>(rest, rows - half, byte, vectors, second, stride, {0, half});
    for (int vector = 0; vector < vectors; ++vector) {
      const int place = vector * stride;
      if (rows % 2) set_last(second[place + half - 1]);
      put_median_of_halves<F>(work, first + place, second + place,
                              work.out + byte + vector * kStep<F>);
    }
  });
}

// The kernel for a median; null where the general one does it.
template <typename F>
Run median_kernel(const Work& work) {
  if (work.num_rows > kMedianRows<F>) return work.low ? nullptr : run_median_of_halves<F>;
  const int row = work.num_rows - 1;  // place in the tables
  if constexpr (F::kParts == 2) {
    if (!work.low) {
      constexpr auto of_one = table_of<kMedianRows<F>>(
          [](auto less) -> Run { return for_each_vector<MedianOf16Bits<F, less + 1, false>>; });
      constexpr auto of_two = table_of<kMedianRows<F> / 2>([](auto less) -> Run {
        return for_each_vector<MedianOf16Bits<F, 2 * (less + 1), true>>;
      });
      const bool is_midpoint = work.params.kind == MedianKind::kMidpoint;
      return is_midpoint && row % 2 ? of_two[row / 2] : of_one[row];
    }
  }
  constexpr auto table = table_of<kMedianRows<F>>(
      [](auto less) -> Run { return for_each_vector<MedianInRegisters<F, less + 1>>; });
  return table[row];
}

}  // namespace loft::LOFT_ISA
