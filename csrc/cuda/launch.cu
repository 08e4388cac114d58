// Layer 3. Launchers of one dtype (LOFT_PART, by its name): which kernel, which grid.
//
//   rule                rows       dtype, weights            kernel
//   median, trimmed     1 - 16     any, none                 register_kernel, exact
//   mean (and mean)     17 - 64    not float64, none         register_kernel, padded to 24, 32, 48,
//   64
//                       65 - 128   not float64, none         two_lane_kernel
//   any                 1 - 16     any, not float64 if any   any_rule_kernel, padded to 4, 8, 16
//                       17 - 32    not float64, any          any_rule_kernel, padded to 32
//   any                 the rest                             shared_kernel
//
// Diagnostics queue compare_kernel behind it.

#include "cuda/launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/kernels.h"

namespace loft::device {
namespace {

// Queues a kernel and throws with the job's values when that fails.
template <typename... Parameters, typename... Arguments>
void queue(const char* name, void (*kernel)(Parameters...), const Job& job, const Launch& by,
           dim3 grid, int threads, size_t shared_bytes, const Arguments&... arguments) {
  kernel<<<grid, threads, shared_bytes, by.stream>>>(arguments...);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw std::runtime_error(
      std::string("launch of ") + name + " for rows=" + std::to_string(job.rows.size()) +
      ", numel=" + std::to_string(job.numel) + " failed: " + cudaGetErrorString(status));
}

// Blocks enough to fill the device several times over, and no more: a block takes its share of the
// coordinates in a loop. Bound from the hardware: a multiprocessor runs at most 32 blocks at once.
dim3 grid_for(int64_t blocks, const Launch& by) {
  const int64_t most = static_cast<int64_t>(by.multiprocessors) * 32;
  return dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min(blocks, most))));
}
dim3 grid_of_threads(int64_t threads, const Launch& by) {
  return grid_for((threads + kBlockThreads - 1) / kBlockThreads, by);
}

template <int kMost>
RowTable<kMost> rows_of(const Job& job) {
  RowTable<kMost> table{};
  std::copy(job.rows.begin(), job.rows.end(), table.rows);
  return table;
}

template <int kMost>
WeightTable<kMost> weights_of(const Job& job) {
  WeightTable<kMost> table{};
  std::copy(job.weights.begin(), job.weights.end(), table.weights);
  return table;
}

template <DType kDType>
Task<kDType> task_of(const Job& job, const Launch& by) {
  using V = typename Stored<kDType>::Value;
  const CudaDiagnostics& to = by.diagnostics;
  Task<kDType> task{job.numel, static_cast<int>(job.rows.size()), 0, job.params, {}};
  for (int32_t weight : job.weights) task.total_weight += weight;  // 0 without weights
  task.windows = {static_cast<V*>(to.low), static_cast<V*>(to.high), to.every};
  return task;
}

template <DType kDType>
Bits<kDType>* out_of(const Job& job) {
  return static_cast<Bits<kDType>*>(job.out);
}

bool is_aligned(const Job& job, size_t bytes) {
  uintptr_t all = reinterpret_cast<uintptr_t>(job.out);
  for (const void* row : job.rows) all |= reinterpret_cast<uintptr_t>(row);
  return all % bytes == 0;  // no address has a lower bit set
}

template <DType kDType, int kWires, int kWide, bool kIsOdd>
void launch_width(const Job& job, const Launch& by) {
  const auto kernel = job.params.rule == Rule::kMedian
                          ? register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kMedian>
                          : register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kTrimmedMean>;
  const dim3 grid = grid_of_threads((job.numel + kWide - 1) / kWide, by);  // kWide a thread
  queue("register_kernel", kernel, job, by, grid, kBlockThreads, 0, rows_of<kWires>(job),
        out_of<kDType>(job), task_of<kDType>(job, by));
}

// Coordinates a thread: loads of 16 bytes where the registers have room for as many keys, fewer for
// many rows. Bound from the registers: 64 keys and what a network needs are below 128.
template <DType kDType, int kWires>
constexpr int kWidth =
    std::max(1, std::min(16 / static_cast<int>(sizeof(Bits<kDType>)), kWires <= 8    ? 8
                                                                      : kWires <= 16 ? 4
                                                                      : kWires <= 32 ? 2
                                                                                     : 1));

template <DType kDType, int kWires, bool kIsOdd>
void launch_wires(const Job& job, const Launch& by) {
  constexpr int kWide = kWidth<kDType, kWires>;
  is_aligned(job, kWide * sizeof(Bits<kDType>))
      ? launch_width<kDType, kWires, kWide, kIsOdd>(job, by)
      : launch_width<kDType, kWires, 1, kIsOdd>(job, by);
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
  const auto kernel = job.params.rule == Rule::kMedian
                          ? two_lane_kernel<kDType, Rule::kMedian>
                          : two_lane_kernel<kDType, Rule::kTrimmedMean>;
  queue("two_lane_kernel", kernel, job, by, grid_of_threads(2 * job.numel, by), kBlockThreads, 0,
        rows_of<128>(job), out_of<kDType>(job), task_of<kDType>(job, by));
}

template <DType kDType, int kWires, bool kIsWeighted>
void launch_any_rule(const Job& job, const Launch& by) {
  queue("any_rule_kernel", any_rule_kernel<kDType, kWires, kIsWeighted>, job, by,
        grid_of_threads(job.numel, by), kBlockThreads, 0, rows_of<kWires>(job),
        weights_of<kWires>(job), out_of<kDType>(job), task_of<kDType>(job, by));
}

template <DType kDType, bool kIsWeighted>
void launch_shared(const Job& job, const Launch& by) {
  const int rows = static_cast<int>(job.rows.size());
  const int cell = static_cast<int>(sizeof(Key<kDType>)) + (kIsWeighted ? 4 : 0);  // bytes
  const int columns = std::max(1, std::min(32, kSharedBytes / (rows * cell)));
  queue("shared_kernel", shared_kernel<kDType, kIsWeighted>, job, by,
        grid_for((job.numel + columns - 1) / columns, by), kBlockThreads,
        static_cast<size_t>(rows) * columns * cell, rows_of<kMaxRows>(job),
        weights_of<kMaxRows>(job), out_of<kDType>(job), task_of<kDType>(job, by), columns);
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
    }
  }
  launch_shared<kDType, kIsWeighted>(job, by);
}

// The matrix above.
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

template <DType kDType>
void launch(const Job& job, const Launch& by) {
  launch_rule<kDType>(job, by);
  const Windows<kDType> windows = task_of<kDType>(job, by).windows;
  if (!windows.low) return;  // nobody asks who was off
  const dim3 grid(static_cast<unsigned>(blocks_looked_at(job.numel, windows.every)),
                  static_cast<unsigned>(job.rows.size()));
  queue("compare_kernel", compare_kernel<kDType>, job, by, grid, kCompareThreads, 0,
        rows_of<kMaxRows>(job), static_cast<const Bits<kDType>*>(job.out), job.numel, windows,
        by.diagnostics.sums);
}

}  // namespace

// The part that CMake names.
namespace part {
[[maybe_unused]] constexpr DType float64 = DType::kFloat64, float32 = DType::kFloat32;
[[maybe_unused]] constexpr DType float16 = DType::kFloat16, bfloat16 = DType::kBFloat16;
}  // namespace part

template <>
void launch_job<part::LOFT_PART>(const Job& job, const Launch& by) {
  launch<part::LOFT_PART>(job, by);
}

}  // namespace loft::device
