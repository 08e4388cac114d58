// Layer 2. The tile kernels of one instruction set and one family of formats.
//
// Compiled once for every pair of LOFT_ISA (a namespace: baseline, avx2, avx512) and LOFT_PART (a
// key width), so that builds run in parallel and repeat only what changed.
//
// Up to 32 rows, with float32 and for every median 64: the rows of a vector are ordered in
// registers by a straight-line network and reduced. Above, and for what has no network of its own:
// groups of up to 32 are sorted into a buffer in the L1 cache and merged there. Traffic (rows + 1)
// * numel * sizeof(value); every row is read once, fetched ahead by software.

#include "cpu/around.h"
#include "cpu/few.h"
#include "cpu/general.h"
#include "cpu/median.h"
#include "cpu/trimmed.h"

namespace loft {
namespace LOFT_ISA {
namespace {

// Most rows whose trimmed mean has windows.
template <typename F>
constexpr int kWindowRows = std::is_same_v<F, Float32> && kVectorBytes > 16 ? 64 : 0;

// A rule whose rows and f are known when it is compiled: what the result does not need of the
// network falls away, and nothing passes through memory.
template <typename F, typename RuleOf, int kRows, int kF>
int64_t run_fixed(const Work& work, int64_t begin, int64_t end) {
  using V = typename F::V;
  const Source source{work.rows, work.weights};
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename F::Entry entries[kRows];
    const RowLoad<F, kRows> load{source, at * static_cast<int64_t>(sizeof(typename F::Bits))};
    load.fetch(vector);
    SortNetwork<kRows>::apply(entries, load);
    V doubt{};
    for (int part = 0; part < F::kParts; ++part) {
      const Outcome<V> outcome = RuleOf::apply(FixedShape<kRows, kF>{}, work, entries, part);
      put<F>(work, outcome, part, at, begin);
      doubt += outcome.doubt;
    }
    if (__builtin_expect(any_lane(doubt != 0), 0)) redo<F>(work, at, begin);
  }
  return at;
}

template <typename F, typename RuleOf, int kRows, int... kF>
Run fixed_for(int f, std::integer_sequence<int, kF...>) {
  constexpr Run table[] = {run_fixed<F, RuleOf, kRows, kF>...};
  return table[f];
}

// Most rows for which a rule is compiled with every f; up to twice as many with f = rows / 4.
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

template <typename F, typename RuleOf, int... kMore>
Run quarter_for(const Work& work, std::integer_sequence<int, kMore...>) {
  constexpr int kFirst = kFixedRows<F> + 1;
  constexpr Run table[] = {run_fixed<F, RuleOf, kFirst + kMore, (kFirst + kMore) / 4>...};
  return work.params.f == work.num_rows / 4 ? table[work.num_rows - kFirst] : nullptr;
}

template <typename F, typename RuleOf>
Run quarter_or_none(const Work& work) {
  if constexpr (kFixedRows<F> > 0 && kVectorBytes > 16) {
    if (work.num_rows <= kFixedRows<F> || work.num_rows > 2 * kFixedRows<F>) return nullptr;
    return quarter_for<F, RuleOf>(work, std::make_integer_sequence<int, kFixedRows<F>>{});
  }
  return nullptr;
}

// A rule around a centre, which needs every rank.
template <typename F, bool kIsPhocas>
Run around_for(const Work& work) {
  if constexpr (std::is_same_v<F, Float32>) {
    constexpr int kMost = kVectorBytes > 16 ? 32 : kValueRows;
    if (work.num_rows <= kMost) {
      return around_up_to<kIsPhocas>(work, std::make_integer_sequence<int, kMost>{});
    }
  }
  return nullptr;
}

template <int kRows, int... kF>
Run few_for(int f, std::integer_sequence<int, kF...>) {
  constexpr Run table[] = {run_few<kRows, kF>...};
  return table[f];
}

template <typename F>
Run trimmed_for(const Work& work) {
  if constexpr (std::is_same_v<F, Weighted<Float32>>) {
    const int f = work.params.f;
    if (work.num_rows == 3) return few_for<3>(f, std::make_integer_sequence<int, 2>{});
    if (work.num_rows == 4) return few_for<4>(f, std::make_integer_sequence<int, 2>{});
    if (work.num_rows == 5) return few_for<5>(f, std::make_integer_sequence<int, 3>{});
  }
  if (work.num_rows <= kFixedRows<F>) return fixed_for<F, TrimmedMeanRule<F>>(work);
  if constexpr (kWindowRows<F> > 0) {
    constexpr int kFirst = kFixedRows<F> + 1;
    if (work.num_rows <= kWindowRows<F>) {
      using More = std::make_integer_sequence<int, kWindowRows<F> - kFixedRows<F>>;
      return window_for<F, kFirst>(work, More{});
    }
  }
  return quarter_or_none<F, TrimmedMeanRule<F>>(work);
}

template <typename F>
Run special_for(const Work& work) {
  switch (work.params.rule) {
    case Rule::kMedian:
      if constexpr (!kIsWeighted<F>) {
        return median_for<F>(work);
      }
      return nullptr;
    case Rule::kTrimmedMean: return trimmed_for<F>(work);
    case Rule::kMeanAroundMedian: return around_for<F, false>(work);
    case Rule::kPhocas: return around_for<F, true>(work);
  }
  return nullptr;
}

template <typename F>
Run run_for(const Work& work) {
  const Run special = special_for<F>(work);
  return special ? special : run_ranked<F>;
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
