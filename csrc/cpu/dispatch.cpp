// Layer 2. Which kernel takes a job, at one instruction set.
//
//   rule              rows       rows' format                kernel
//   median            1 - 64 a   any without weights         median.h   a network of its own
//                     more       any without weights b       median.h   two halves, merged
//   trimmed mean      1 - 16     float32                     trimmed.h  in registers, every f
//                     17 - 64    float32 c                   trimmed.h  a window of ranks
//                     3 - 5      float32 by weight           trimmed.h  keys and weights apart
//                     1 - 8      float32 by weight           trimmed.h  in registers, every f
//                     9 - 16     float32 by weight, f=n/4 c  trimmed.h  in registers
//   mean around,      1 - 32     float32 d                   around.h   in registers, every f
//   Phocas            25 - 32    float32, AVX2               around.h   through the L1 cache
//   any               the rest                               general.h  ranked in the L1 cache
//
//   a  1 - 32 where vectors have 16 bytes, and of 64-bit keys that such a machine cannot compare
//   b  where nobody asks for the window of kept values
//   c  where vectors have more than 16 bytes
//   d  1 - 24 by AVX2, 1 - 16 at the baseline
//
// LOFT_LEAN marks the baseline of a local build for a machine that runs a better level, and the one
// of LOFT_LEVELS=lean: it has the general kernel only. The others compile for a minute.
//
// Every row is read once, prefetched by software: traffic (rows + 1) * numel * sizeof(value).
//
// Compiled once for every pair of LOFT_ISA (the level's namespace) and LOFT_PART, a part by its
// name: `table`, a format with all its kernels, or `float32_around`, which takes the longest. Parts
// build in parallel, and a change compiles again only what depends on it.

#include "cpu/around.h"
#include "cpu/general.h"
#include "cpu/median.h"
#include "cpu/trimmed.h"

namespace loft::LOFT_ISA {

#if defined(LOFT_LEAN)
constexpr bool kIsLean = true;
#else
constexpr bool kIsLean = false;
#endif

template <typename F>
Run choose(const Work& work) {
  Run special = nullptr;
  if constexpr (!kIsLean) {
    switch (work.params.rule) {
      case Rule::kMedian:
        if constexpr (!kIsWeighted<F>) special = median_kernel<F>(work);
        break;
      case Rule::kTrimmedMean: special = trimmed_mean_kernel<F>(work); break;
      case Rule::kMeanAroundMedian:
      case Rule::kPhocas: special = around_kernel<F>(work); break;
      default: break;  // a rule that has no kernel of its own, yet
    }
  }
  return special ? special : run_general<F>;
}

// The tail, fewer coordinates than a vector has lanes: the same kernel on a copy padded with zeros.
template <typename F>
void run_tail(const Work& work, Run run, int64_t at, int64_t begin, int64_t end) {
  constexpr int kRowBytes = kStep<F>;
  using L = Lane<typename F::V>;
  alignas(64) char copies[kMaxRows * kRowBytes];  // one vector a row, at most 64 KiB
  alignas(64) char result[kRowBytes];
  alignas(64) L low[F::kLanes], high[F::kLanes];
  const char* rows[kMaxRows];
  const size_t bytes = static_cast<size_t>(byte_of<F>(end - at));
  for (int row = 0; row < work.num_rows; ++row) {
    char* copy = copies + row * kRowBytes;
    std::memset(copy, 0, kRowBytes);
    std::memcpy(copy, work.rows[row] + byte_of<F>(at), bytes);
    rows[row] = copy;
  }
  Work tail = work;
  tail.rows = rows;  // from coordinate 0 on
  tail.out = result;
  if (work.low) tail.low = low, tail.high = high;
  run(tail, 0, F::kLanes);
  std::memcpy(work.out + byte_of<F>(at), result, bytes);
  if (work.low) {
    std::memcpy(static_cast<L*>(work.low) + (at - begin), low, (end - at) * sizeof(L));
    std::memcpy(static_cast<L*>(work.high) + (at - begin), high, (end - at) * sizeof(L));
  }
}

template <typename F>
void aggregate(const Work& work, int64_t begin, int64_t end) {
  const Run run = choose<F>(work);  // once a block of coordinates
  const int64_t at = run(work, begin, end);
  if (at < end) run_tail<F>(work, run, at, begin, end);
}

// The parts, by the names that CMake gives them.
namespace part {
using float64 = Float64;
using float32 = Float32;
using float16 = Float16;
using bfloat16 = BFloat16;
using weighted_float64 = Weighted<Float64>;
using weighted_float32 = Weighted<Float32>;
using weighted_float16 = Weighted<Float16>;
using weighted_bfloat16 = Weighted<BFloat16>;
}  // namespace part

#if defined(LOFT_PART_AROUND)

extern template void redo<Float32>(const Work&, int64_t, int64_t);
template Run around_kernel<Float32>(const Work&);

#elif defined(LOFT_PART)

extern template Run around_kernel<Float32>(const Work&);
template void aggregate<part::LOFT_PART>(const Work&, int64_t, int64_t);

#else  // the table of this level

#if !defined(LOFT_LEAN)  // which is one object, with all parts in it
extern template void aggregate<Float64>(const Work&, int64_t, int64_t);
extern template void aggregate<Float32>(const Work&, int64_t, int64_t);
extern template void aggregate<Float16>(const Work&, int64_t, int64_t);
extern template void aggregate<BFloat16>(const Work&, int64_t, int64_t);
extern template void aggregate<Weighted<Float64> >(const Work&, int64_t, int64_t);
extern template void aggregate<Weighted<Float32> >(const Work&, int64_t, int64_t);
extern template void aggregate<Weighted<Float16> >(const Work&, int64_t, int64_t);
extern template void aggregate<Weighted<BFloat16> >(const Work&, int64_t, int64_t);
#endif

void pass(const Work&, int64_t, int64_t);                                  // pass.cpp
void burst(const Work&, int64_t, int64_t);                                 // pass.cpp
void compare_rows(DType, const Compared&, RowLanes*);                      // compare.cpp
void distances(DType, const RowRanges&, double*);                          // distances.cpp
void mix(DType, const MixedRows&, const Work&, Kernel, int64_t, int64_t);  // mix.cpp
bool absorb(DType, const Absorbed&, int64_t, int64_t);                     // absorb.cpp

const KernelTable& kernels() {
  static const KernelTable table{
      {{aggregate<Float64>, aggregate<Float32>, aggregate<Float16>, aggregate<BFloat16>},
       {aggregate<Weighted<Float64> >, aggregate<Weighted<Float32> >, aggregate<Weighted<Float16> >,
        aggregate<Weighted<BFloat16> >}},
      pass,
      burst,
      compare_rows,
      distances,
      mix,
      absorb};
  return table;
}

#endif

}  // namespace loft::LOFT_ISA
