// Layer 3. One job on a CUDA device: checks, the device guard, which kernel, which grid. No host
// sync. Compiled once a dtype (LOFT_PART, by its name) for its kernels, and once for the rest.
//
//   rule                rows       dtype, weights            kernel
//   median, trimmed     1 - 16     any, none                 register_kernel, exact
//   mean (and mean)     17 - 64    not float64, none         register_kernel, 24, 32, 48, 64 wires
//   any                 1 - 16     none; not float64: any    any_rule_kernel, padded to 4, 8, 16
//                       17 - 32    not float64, any          any_rule_kernel, padded to 32
//                       33 - 64    not float64, none         any_rule_kernel, padded to 64
//                       65 - 128   not float64, none         two_lane_kernel
//   any                 the rest                             shared_kernel
//
// Diagnostics queue compare_kernel behind it.

#include "cuda/queue.h"

namespace loft::device {
namespace {

template <DType kDType>
Windows<kDType> windows_of(const Launch& by) {
  using V = typename Stored<kDType>::Value;
  const CudaDiagnostics& to = by.diagnostics;
  return {static_cast<V*>(to.low), static_cast<V*>(to.high), to.every};
}

template <DType kDType>
Task<kDType> task_of(const Job& job, const Launch& by) {
  return {static_cast<uint32_t>(job.numel),
          by.first,
          job.num_rows(),
          job.total_weight(),
          job.params,
          windows_of<kDType>(by)};
}

[[maybe_unused]] bool is_aligned(const Job& job, size_t bytes) {
  uintptr_t all = reinterpret_cast<uintptr_t>(job.out);
  for (const void* row : job.rows) all |= reinterpret_cast<uintptr_t>(row);
  return all % bytes == 0;  // no address has a lower bit set
}

// Coordinates a thread: loads of 16 bytes where the registers have room for as many values, fewer
// for many rows.
template <DType kDType, int kWires>
constexpr int kWidth =
    std::max(1, std::min(16 / static_cast<int>(sizeof(Bits<kDType>)), 64 / (2 * split_of(kWires))));

template <DType kDType, int kWires, bool kIsOdd, int kWide = kWidth<kDType, kWires>>
void launch_wires(const Job& job, const Launch& by) {
  if constexpr (kWide > 1) {
    if (!is_aligned(job, kWide * sizeof(Bits<kDType>))) {
      return launch_wires<kDType, kWires, kIsOdd, 1>(job, by);
    }
  }
  const auto kernel = job.params.rule == Rule::kMedian
                          ? register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kMedian>
                          : register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kTrimmedMean>;
  queue("register_kernel", kernel, job, by, grid_for(job.numel, kWide * kBlockThreads, by),
        kBlockThreads, 0, wires_of<kWires>(job.rows, padding_below<kWires>(job.num_rows())),
        out_of<kDType>(job), task_of<kDType>(job, by));
}

template <DType kDType, int kWires>
void launch_padded(const Job& job, const Launch& by) {
  job.rows.size() % 2 ? launch_wires<kDType, kWires, true>(job, by)
                      : launch_wires<kDType, kWires, false>(job, by);
}

template <DType kDType, int kWires = 16>
void launch_exact(const Job& job, const Launch& by) {
  if constexpr (kWires >= 1) {
    if (job.rows.size() == kWires) return launch_wires<kDType, kWires, kWires % 2>(job, by);
    launch_exact<kDType, kWires - 1>(job, by);
  }
}

template <DType kDType>
void launch_two_lanes(const Job& job, const Launch& by) {
  const auto kernel = job.params.rule == Rule::kMedian ? two_lane_kernel<kDType, Rule::kMedian>
                      : job.params.rule == Rule::kTrimmedMean
                          ? two_lane_kernel<kDType, Rule::kTrimmedMean>
                          : two_lane_kernel<kDType, Rule::kPhocas>;
  queue("two_lane_kernel", kernel, job, by, grid_for(job.numel, kBlockThreads / 2, by),
        kBlockThreads, 0, wires_of<128>(job.rows, padding_below<128>(job.num_rows())),
        out_of<kDType>(job), task_of<kDType>(job, by));
}

template <DType kDType, int kWires, bool kIsWeighted>
void launch_any_rule(const Job& job, const Launch& by) {
  queue("any_rule_kernel", any_rule_kernel<kDType, kWires, kIsWeighted>, job, by,
        grid_for(job.numel, kBlockThreads, by), kBlockThreads, 0, wires_of<kWires>(job.rows, 0),
        table_of<kWires>(job.weights), out_of<kDType>(job), task_of<kDType>(job, by));
}

template <DType kDType, bool kIsWeighted>
void launch_shared(const Job& job, const Launch& by) {
  const int rows = job.num_rows();
  const int cell = static_cast<int>(sizeof(Key<kDType>)) + (kIsWeighted ? 4 : 0);  // bytes
  const int columns = columns_for(rows * cell);
  queue("shared_kernel", shared_kernel<kDType, kIsWeighted>, job, by,
        grid_for(job.numel, columns, by), kBlockThreads, static_cast<size_t>(rows) * columns * cell,
        table_of<kMaxRows>(job.rows), table_of<kMaxRows>(job.weights), out_of<kDType>(job),
        task_of<kDType>(job, by), columns);
}

template <DType kDType, bool kIsWeighted>
void launch_any_shape(const Job& job, const Launch& by) {
  const size_t rows = job.rows.size();
  if constexpr (!kIsWeighted || kDType != DType::kFloat64) {  // a key and its weight have 64 bits
    if (rows <= 4) return launch_any_rule<kDType, 4, kIsWeighted>(job, by);
    if (rows <= 8) return launch_any_rule<kDType, 8, kIsWeighted>(job, by);
    if (rows <= 16) return launch_any_rule<kDType, 16, kIsWeighted>(job, by);
    if constexpr (kDType != DType::kFloat64) {
      if (rows <= 32) return launch_any_rule<kDType, 32, kIsWeighted>(job, by);
      if constexpr (!kIsWeighted) {
        if (rows <= 64) return launch_any_rule<kDType, 64, kIsWeighted>(job, by);
        if (rows <= 128) return launch_two_lanes<kDType>(job, by);
      }
    }
  }
  launch_shared<kDType, kIsWeighted>(job, by);
}

template <DType kDType>
void launch_rule(const Job& job, const Launch& by) {
  const size_t rows = job.rows.size();
  if (!job.weights.empty()) return launch_any_shape<kDType, true>(job, by);
  if (job.params.rule == Rule::kMedian || job.params.rule == Rule::kTrimmedMean) {
    if (rows <= 16) return launch_exact<kDType>(job, by);
    if constexpr (kDType != DType::kFloat64) {
      if (rows <= 24) return launch_padded<kDType, 24>(job, by);
      if (rows <= 32) return launch_padded<kDType, 32>(job, by);
      if (rows <= 48) return launch_padded<kDType, 48>(job, by);
      if (rows <= 64) return launch_padded<kDType, 64>(job, by);
      if (rows <= 128) return launch_two_lanes<kDType>(job, by);
    }
  }
  launch_any_shape<kDType, false>(job, by);
}

}  // namespace

template <DType kDType>
void launch_compare(const Job& job, const Launch& by) {
  const Windows<kDType> windows = windows_of<kDType>(by);
  if (!windows.low) return;  // nobody asks who was off
  const dim3 grid(static_cast<unsigned>(blocks_looked_at(job.numel, windows.every)),
                  static_cast<unsigned>(job.rows.size()));
  queue("compare_kernel", compare_kernel<kDType>, job, by, grid, kCompareThreads, 0,
        table_of<kMaxRows>(job.rows), static_cast<const Bits<kDType>*>(job.out), job.numel, windows,
        by.diagnostics.sums);
}

// Queues one job of its dtype, which has numel > 0 and has passed `check`.
template <DType kDType>
void launch_job(const Job& job, const Launch& by) {
  queue_parts(job, by, launch_rule<kDType>);
  launch_compare<kDType>(job, by);
}

#if defined(LOFT_PART)
template void launch_job<part::LOFT_PART>(const Job& job, const Launch& by);
template void launch_compare<part::LOFT_PART>(const Job& job, const Launch& by);
#else
extern template void launch_job<DType::kFloat64>(const Job& job, const Launch& by);
extern template void launch_job<DType::kFloat32>(const Job& job, const Launch& by);
extern template void launch_job<DType::kFloat16>(const Job& job, const Launch& by);
extern template void launch_job<DType::kBFloat16>(const Job& job, const Launch& by);
#endif

}  // namespace loft::device

#if !defined(LOFT_PART)
void loft::aggregate_cuda(const Job& job, const CudaOptions& options) {
  using namespace device;
  check(job);
  if (job.numel == 0) return;
  const DeviceGuard guard(options.device);
  const Launch launch = launch_by(options);
  for_dtype(job.dtype, [&](auto dtype) { launch_job<dtype>(job, launch); });
}
#endif
