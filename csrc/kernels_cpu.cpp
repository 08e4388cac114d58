// Layer 2. The tile kernels of one instruction set and one family of formats.
//
// Compiled once for every pair of LOFT_ISA (a namespace: baseline, avx2, avx512) and LOFT_PART (a
// key width), so that builds run in parallel and repeat only what changed.
//
// Up to 32 rows: all rows of a vector are loaded, ordered in registers by a straight-line network
// and reduced. Above: groups of 32 are sorted into a buffer in the L1 cache and merged there.
// Traffic (rows + 1) * numel * sizeof(value); every row is read once, fetched ahead by software.

#include "finish_cpu.h"

namespace loft {
namespace LOFT_ISA {
namespace {

constexpr int kBatch = 4;        // vectors between loading and finishing
constexpr int kMedianRows = 32;  // most rows whose median has a network of its own

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
  alignas(64) typename F::Entry entries[kMaxRows + kGroup<F>];
  const Source source{work.rows, work.weights};
  const int stride = padded<F>(work.num_rows);
  const int most = work.num_rows <= kGroup<F> ? kBatch : 1;
  const Finish<F> finish_vectors = finish_for<F>(work.params.rule);
  const SortGroup<F> sort =
      sort_group_for<F>(work.num_rows <= kGroup<F> ? work.num_rows : kGroup<F>);
  int64_t at = begin;
  while (at + F::kLanes <= end) {
    const int64_t left = (end - at) / F::kLanes;
    const int vectors = left < most ? static_cast<int>(left) : most;
    const int64_t byte = at * static_cast<int64_t>(sizeof(typename F::Bits));
    if (work.num_rows <= kGroup<F>) {
      sort(source, byte, vectors, entries, stride);
    } else {
      rank_rows<F>(source, work.num_rows, byte, vectors, entries, stride);
    }
    finish_vectors(work, entries, stride, vectors, at, begin);
    at += vectors * F::kLanes;
  }
  return at;
}

// The median of up to 32 rows by its own, shorter network.
template <typename F, int kRows>
int64_t run_median(const Work& work, int64_t begin, int64_t end) {
  const Source source{work.rows, work.weights};
  constexpr int64_t kBytes = sizeof(typename F::Bits);
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    load_rows<F, kRows>(source, at * kBytes, vector, entries);
    MedianNetwork<kRows>::apply(entries);
    const typename F::Entry middle[2] = {entries[(kRows - 1) / 2], entries[kRows / 2]};
    for (int part = 0; part < F::kParts; ++part) {
      typename F::V result = F::value(middle[0], part);
      if (kRows % 2 == 0) {
        result = pick_median(result, F::value(middle[1], part), work.params.kind);
      }
      F::put(work.out + at * kBytes, result, part);
    }
  }
  return at;
}

// The median of more rows: two ranked halves a and b, each in a buffer; of the pairs of a's i-th
// smallest and b's i-th largest, the smaller ones are the lower half of all rows, so their largest
// is the lower median. An odd count is made even by one row of +inf, whose lower median is the
// same.
template <typename F>
int64_t run_median_of_halves(const Work& work, int64_t begin, int64_t end) {
  using Entry = typename F::Entry;
  alignas(64) Entry first[kMaxRows / 2 + kGroup<F>], second[kMaxRows / 2 + kGroup<F>];
  const int rows = work.num_rows, half = (rows + 1) / 2;
  const Source source{work.rows, nullptr}, rest{work.rows + half, nullptr};
  constexpr int64_t kBytes = sizeof(typename F::Bits);
  int64_t at = begin;
  for (; at + F::kLanes <= end; at += F::kLanes) {
    rank_rows<F>(source, half, at * kBytes, 1, first, 0);
    rank_rows<F>(rest, rows - half, at * kBytes, 1, second, 0);
    if (rows % 2) set_last(second[half - 1]);
    Entry lower = first[0] < second[half - 1] ? first[0] : second[half - 1];
    Entry upper = first[0] > second[half - 1] ? first[0] : second[half - 1];
    for (int i = 1; i < half; ++i) {
      Entry low = first[i], high = second[half - 1 - i];
      exchange(low, high);
      keep_max(low, lower);
      keep_min(upper, high);
    }
    for (int part = 0; part < F::kParts; ++part) {
      typename F::V result = F::value(lower, part);
      if (rows % 2 == 0) result = pick_median(result, F::value(upper, part), work.params.kind);
      F::put(work.out + at * kBytes, result, part);
    }
  }
  return at;
}

// A rule whose rows and f are known when it is compiled: what the result does not need of the
// network falls away, and nothing passes through memory.
template <typename F, typename RuleOf, int kRows, int kF>
int64_t run_fixed(const Work& work, int64_t begin, int64_t end) {
  using V = typename F::V;
  const Source source{work.rows, work.weights};
  constexpr int64_t kBytes = sizeof(typename F::Bits);
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    load_rows<F, kRows>(source, at * kBytes, vector, entries);
    SortNetwork<kRows>::apply(entries);
    for (int part = 0; part < F::kParts; ++part) {
      const Outcome<V> outcome = RuleOf::apply(FixedShape<kRows, kF>{}, work, entries, part);
      F::put(work.out + at * kBytes, outcome.result, part);
    }
  }
  return at;
}

using Run = int64_t (*)(const Work&, int64_t, int64_t);

template <typename F, typename RuleOf, int kRows, int... kF>
Run fixed_for(int f, std::integer_sequence<int, kF...>) {
  constexpr Run table[] = {run_fixed<F, RuleOf, kRows, kF>...};
  return table[f];
}

// Most rows for which a rule is compiled with every f.
template <typename F>
constexpr int kFixedRows = std::is_same_v<F, Float32>             ? 16
                           : std::is_same_v<F, Weighted<Float32>> ? 8
                                                                  : 0;

template <typename F, typename RuleOf, int kRows = kFixedRows<F>>
Run fixed_for(const Work& work) {
  if constexpr (kRows < 1) {
    return nullptr;
  } else {
    if (work.num_rows != kRows) return fixed_for<F, RuleOf, kRows - 1>(work);
    return fixed_for<F, RuleOf, kRows>(work.params.f,
                                       std::make_integer_sequence<int, (kRows + 1) / 2>{});
  }
}

template <typename F>
Run fixed_for_rule(const Work& work) {
  if (work.num_rows > kFixedRows<F> || work.low) return nullptr;
  switch (work.params.rule) {
    case Rule::kTrimmedMean: return fixed_for<F, TrimmedMeanRule<F>>(work);
    case Rule::kMeanAroundMedian:
      if constexpr (!kIsWeighted<F>) return fixed_for<F, MeanAroundMedianRule<F>>(work);
      break;
    case Rule::kPhocas:
      if constexpr (!kIsWeighted<F>) return fixed_for<F, PhocasRule<F>>(work);
      break;
    default: break;
  }
  return nullptr;
}

template <typename F, int... kRows>
Run median_for(int rows, std::integer_sequence<int, kRows...>) {
  constexpr Run table[] = {run_median<F, kRows + 1>...};
  return table[rows - 1];
}

template <typename F>
Run run_for(const Work& work) {
  if constexpr (!kIsWeighted<F>) {
    if (work.params.rule == Rule::kMedian && !work.low) {
      if (work.num_rows > kMedianRows) return run_median_of_halves<F>;
      return median_for<F>(work.num_rows, std::make_integer_sequence<int, kMedianRows>{});
    }
  }
  const Run fixed = fixed_for_rule<F>(work);
  return fixed ? fixed : run_ranked<F>;
}

// The last coordinates, fewer than a vector: a padded copy of them, then the same kernel.
template <typename F>
void run_tail(const Work& work, Run run, int64_t at, int64_t begin, int64_t end) {
  using Bits = typename F::Bits;
  constexpr int kRowBytes = F::kLanes * sizeof(Bits);
  using L = Lane<typename F::V>;
  alignas(64) char copies[kMaxRows * kRowBytes];
  alignas(64) char result[kRowBytes];
  alignas(64) L low[F::kLanes], high[F::kLanes];
  const char* rows[kMaxRows];
  const size_t bytes = static_cast<size_t>(end - at) * sizeof(Bits);
  for (int row = 0; row < work.num_rows; ++row) {
    char* copy = copies + row * kRowBytes;
    std::memset(copy, 0, kRowBytes);
    std::memcpy(copy, work.rows[row] + at * static_cast<int64_t>(sizeof(Bits)), bytes);
    rows[row] = copy;
  }
  Work tail = work;
  tail.rows = rows;
  tail.out = result;
  if (work.low) tail.low = low, tail.high = high;
  run(tail, 0, F::kLanes);
  std::memcpy(work.out + at * static_cast<int64_t>(sizeof(Bits)), result, bytes);
  if (work.low) {
    std::memcpy(static_cast<L*>(work.low) + (at - begin), low, (end - at) * sizeof(L));
    std::memcpy(static_cast<L*>(work.high) + (at - begin), high, (end - at) * sizeof(L));
  }
}

template <typename F>
void run(const Work& work, int64_t begin, int64_t end) {
  const Run whole = run_for<F>(work);
  const int64_t at = whole(work, begin, end);
  if (at < end) run_tail<F>(work, whole, at, begin, end);
}

}  // namespace

#define LOFT_KERNEL(name, format) \
  void name(const Work& work, int64_t begin, int64_t end) { run<format>(work, begin, end); }
#if LOFT_PART == 16
LOFT_KERNEL(float16, Float16)
LOFT_KERNEL(bfloat16, BFloat16)
#elif LOFT_PART == 32
LOFT_KERNEL(float32, Float32)
#elif LOFT_PART == 64
LOFT_KERNEL(float64, Float64)
#elif LOFT_PART == 65
LOFT_KERNEL(weighted_float32, Weighted<Float32>)
LOFT_KERNEL(weighted_float64, Weighted<Float64>)
#elif LOFT_PART == 66
LOFT_KERNEL(weighted_float16, Weighted<Float16>)
LOFT_KERNEL(weighted_bfloat16, Weighted<BFloat16>)
#endif
#undef LOFT_KERNEL

}  // namespace LOFT_ISA
}  // namespace loft
