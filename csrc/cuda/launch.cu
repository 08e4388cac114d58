// Layer 3. Launchers of one dtype (LOFT_PART: the code of DType): which kernel, which grid.

#include "cuda/launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/kernels.h"

namespace loft {
namespace device {
namespace {

void check_launch(const char* kernel, const Job& job) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw std::runtime_error(
      std::string("launch of ") + kernel + " for rows=" + std::to_string(job.rows.size()) +
      ", numel=" + std::to_string(job.numel) + " failed: " + cudaGetErrorString(status));
}

unsigned grid_for(int64_t blocks, const Launch& launch) {
  const int64_t most = static_cast<int64_t>(launch.multiprocessors) * 32;
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(blocks, most)));
}

template <int kMost>
RowTable<kMost> table_of(const Job& job) {
  RowTable<kMost> table{};
  std::copy(job.rows.begin(), job.rows.end(), table.rows);
  return table;
}

bool is_aligned(const Job& job, size_t bytes) {
  uintptr_t all = reinterpret_cast<uintptr_t>(job.out);
  for (const void* row : job.rows) all |= reinterpret_cast<uintptr_t>(row);
  return all % bytes == 0;
}

template <DType kDType>
Windows<kDType> windows_of(const Launch& launch) {
  using V = typename Stored<kDType>::Value;
  const CudaDiagnostics& to = launch.diagnostics;
  return {static_cast<V*>(to.low), static_cast<V*>(to.high), to.every};
}

template <DType kDType, int kWires, int kWide, bool kIsOdd>
void launch_width(const Job& job, const Launch& launch) {
  const RowTable<kWires> table = table_of<kWires>(job);
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const int64_t threads = (job.numel + kWide - 1) / kWide;
  const unsigned grid = grid_for((threads + kBlockThreads - 1) / kBlockThreads, launch);
  const int rows = static_cast<int>(job.rows.size());
  const Windows<kDType> windows = windows_of<kDType>(launch);
  if (job.params.rule == Rule::kMedian) {
    register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kMedian>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params,
                                                    windows);
  } else {
    register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kTrimmedMean>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params,
                                                    windows);
  }
  check_launch("register_kernel", job);
}

// Coordinates a thread: 16 bytes where the registers allow, fewer for many rows.
template <DType kDType, int kWires>
constexpr int kWidth =
    std::max(1, std::min(16 / static_cast<int>(sizeof(Bits<kDType>)), kWires <= 8    ? 8
                                                                      : kWires <= 16 ? 4
                                                                      : kWires <= 32 ? 2
                                                                                     : 1));

template <DType kDType, int kWires>
void launch_wires(const Job& job, const Launch& launch) {
  constexpr int kWide = kWidth<kDType, kWires>;
  const bool is_odd = job.rows.size() % 2;
  const bool is_wide = is_aligned(job, kWide * sizeof(Bits<kDType>));
  if constexpr (kWires <= 16) {  // exact: the parity is that of kWires
    constexpr bool kIsOdd = kWires % 2;
    is_wide ? launch_width<kDType, kWires, kWide, kIsOdd>(job, launch)
            : launch_width<kDType, kWires, 1, kIsOdd>(job, launch);
  } else if (is_odd) {
    is_wide ? launch_width<kDType, kWires, kWide, true>(job, launch)
            : launch_width<kDType, kWires, 1, true>(job, launch);
  } else {
    is_wide ? launch_width<kDType, kWires, kWide, false>(job, launch)
            : launch_width<kDType, kWires, 1, false>(job, launch);
  }
}

template <DType kDType, int kWires = 16>
void launch_exact(const Job& job, const Launch& launch) {
  if constexpr (kWires >= 1) {
    if (job.rows.size() == kWires) return launch_wires<kDType, kWires>(job, launch);
    launch_exact<kDType, kWires - 1>(job, launch);
  }
}

template <DType kDType>
void launch_two_lanes(const Job& job, const Launch& launch) {
  const RowTable<128> table = table_of<128>(job);
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const unsigned grid = grid_for((2 * job.numel + kBlockThreads - 1) / kBlockThreads, launch);
  const int rows = static_cast<int>(job.rows.size());
  const Windows<kDType> windows = windows_of<kDType>(launch);
  if (job.params.rule == Rule::kMedian) {
    two_lane_kernel<kDType, Rule::kMedian><<<grid, kBlockThreads, 0, launch.stream>>>(
        table, out, job.numel, rows, job.params, windows);
  } else {
    two_lane_kernel<kDType, Rule::kTrimmedMean><<<grid, kBlockThreads, 0, launch.stream>>>(
        table, out, job.numel, rows, job.params, windows);
  }
  check_launch("two_lane_kernel", job);
}

template <int kMost>
WeightTable<kMost> weights_of(const Job& job) {
  WeightTable<kMost> table{};
  std::copy(job.weights.begin(), job.weights.end(), table.weights);
  return table;
}

int64_t total_of(const Job& job) {
  int64_t total = 0;
  for (int32_t weight : job.weights) total += weight;
  return total;
}

template <DType kDType, int kWires, bool kIsWeighted>
void launch_any_rule(const Job& job, const Launch& launch) {
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const unsigned grid = grid_for((job.numel + kBlockThreads - 1) / kBlockThreads, launch);
  any_rule_kernel<kDType, kWires, kIsWeighted><<<grid, kBlockThreads, 0, launch.stream>>>(
      table_of<kWires>(job), weights_of<kWires>(job), out, job.numel,
      static_cast<int>(job.rows.size()), total_of(job), job.params, windows_of<kDType>(launch));
  check_launch("any_rule_kernel", job);
}

// Whether a kernel of one coordinate a thread took the job: few rows, and keys that leave room for
// their weights.
template <DType kDType, bool kIsWeighted>
bool take_any_rule(const Job& job, const Launch& launch) {
  if constexpr (kIsWeighted && kDType == DType::kFloat64) {
    return false;
  } else {
    const size_t rows = job.rows.size();
    if (rows <= 4) return launch_any_rule<kDType, 4, kIsWeighted>(job, launch), true;
    if (rows <= 8) return launch_any_rule<kDType, 8, kIsWeighted>(job, launch), true;
    if (rows <= 16) return launch_any_rule<kDType, 16, kIsWeighted>(job, launch), true;
    if constexpr (kDType != DType::kFloat64) {
      if (rows <= 32) return launch_any_rule<kDType, 32, kIsWeighted>(job, launch), true;
    }
    return false;
  }
}

template <DType kDType>
void launch_shared(const Job& job, const Launch& launch) {
  const RowTable<kMaxRows> table = table_of<kMaxRows>(job);
  const WeightTable<kMaxRows> weights = weights_of<kMaxRows>(job);
  const int64_t total = total_of(job);
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const int rows = static_cast<int>(job.rows.size());
  const int cell = static_cast<int>(sizeof(Key<kDType>)) + (job.weights.empty() ? 0 : 4);
  const int columns = std::max(1, std::min(32, kSharedBytes / (rows * cell)));
  const size_t bytes = static_cast<size_t>(rows) * columns * cell;
  const unsigned grid = grid_for((job.numel + columns - 1) / columns, launch);
  const Windows<kDType> windows = windows_of<kDType>(launch);
  if (job.weights.empty()) {
    shared_kernel<kDType, false><<<grid, kBlockThreads, bytes, launch.stream>>>(
        table, weights, out, job.numel, rows, columns, total, job.params, windows);
  } else {
    shared_kernel<kDType, true><<<grid, kBlockThreads, bytes, launch.stream>>>(
        table, weights, out, job.numel, rows, columns, total, job.params, windows);
  }
  check_launch("shared_kernel", job);
}

template <DType kDType>
void launch_rule(const Job& job, const Launch& launch) {
  const size_t rows = job.rows.size();
  const bool is_ranked = job.params.rule == Rule::kMedian || job.params.rule == Rule::kTrimmedMean;
  const bool is_small = job.weights.empty() && is_ranked;
  if (is_small && rows <= 16) return launch_exact<kDType>(job, launch);
  if constexpr (kDType != DType::kFloat64) {
    if (is_small && rows <= 24) return launch_wires<kDType, 24>(job, launch);
    if (is_small && rows <= 32) return launch_wires<kDType, 32>(job, launch);
    if (is_small && rows <= 48) return launch_wires<kDType, 48>(job, launch);
    if (is_small && rows <= 64) return launch_wires<kDType, 64>(job, launch);
    if (is_small && rows <= 128) return launch_two_lanes<kDType>(job, launch);
  }
  const bool is_taken = job.weights.empty() ? take_any_rule<kDType, false>(job, launch)
                                            : take_any_rule<kDType, true>(job, launch);
  if (!is_taken) launch_shared<kDType>(job, launch);
}

template <DType kDType>
void launch(const Job& job, const Launch& launch) {
  launch_rule<kDType>(job, launch);
  const Windows<kDType> windows = windows_of<kDType>(launch);
  if (!windows.low) return;
  const dim3 grid(static_cast<unsigned>(blocks_looked_at(job.numel, windows.every)),
                  static_cast<unsigned>(job.rows.size()));
  compare_kernel<kDType><<<grid, kCompareThreads, 0, launch.stream>>>(
      table_of<kMaxRows>(job), static_cast<const Bits<kDType>*>(job.out), job.numel, windows,
      launch.diagnostics.sums);
  check_launch("compare_kernel", job);
}

}  // namespace

#if LOFT_PART == 0
void launch_float64(const Job& job, const Launch& by) { launch<DType::kFloat64>(job, by); }
#elif LOFT_PART == 1
void launch_float32(const Job& job, const Launch& by) { launch<DType::kFloat32>(job, by); }
#elif LOFT_PART == 2
void launch_float16(const Job& job, const Launch& by) { launch<DType::kFloat16>(job, by); }
#elif LOFT_PART == 3
void launch_bfloat16(const Job& job, const Launch& by) { launch<DType::kBFloat16>(job, by); }
#endif

}  // namespace device
}  // namespace loft
