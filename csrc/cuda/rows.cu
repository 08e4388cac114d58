// Layer 3. Distances of rows and mixed rows on a CUDA device: checks, which kernel, which grid. No
// host sync. Compiled as launch.cu is.
//
//   rows and mixed rows   rule of mixed rows   weights                kernel
//   1 - 32 a, one mixed   any                  any                    mix_kernel, one wire
//   1 - 32 a              median, trimmed      none                   mix_kernel, ranked
//   1 - 16                any                  none; not float64: any mix_kernel, any rule
//   the rest              any                  any                    mix_shared_kernel
//
//   a  1 - 16 of float64
//
// Diagnostics queue compare_kernel behind it.

#include <memory>

#include "cuda/queue.h"
#include "cuda/row_kernels.h"

namespace loft::device {

// What is mixed, and where: Mixing as mixing_of gives it, and the same matrix for the device.
struct Mixed {
  const Matrix& matrix;
  const Mixing& mixing;
  double* room;  // mix_cells, on the device
};

namespace {

template <DType kDType, int kSide>
void launch_distances_by(const Job& job, const Launch& by, const DistanceSums& shape,
                         double* sums) {
  const int64_t items = shape.blocks * shape.group_pairs();
  const auto kernel = shape.group_pairs() == 1 ? distances_kernel<kDType, kSide, true>
                                               : distances_kernel<kDType, kSide, false>;
  queue("distances_kernel", kernel, job, by, grid_for(items, 1, by), kSlotThreads, 0,
        wires_of<kMaxRows>(job.rows, 0), job.numel, shape, sums);
}

template <DType kDType>
MixTask<kDType> mix_task_of(const Job& job, int num_mixed) {
  return {static_cast<uint32_t>(job.numel), job.num_rows(), num_mixed, job.total_weight(),
          job.params};
}

// Coordinates a thread. Bound from the registers: values and keys of two coordinates are up to 128.
// A rule that ranks in local memory takes one.
template <DType kDType>
constexpr int kTurns = kDType == DType::kFloat64 ? 1 : 2;

template <DType kDType, int kRows, int kWires, typename Ranked, int kTogether = kTurns<kDType>>
void launch_mix_of(const Job& job, const Mixed& mixed, const Launch& by) {
  using V = typename Stored<kDType>::Value;
  const int below = Ranked::template below<kWires>(mixed.matrix.num_mixed);
  queue("mix_kernel", mix_kernel<kDType, kRows, kWires, kTogether, Ranked>, job, by,
        grid_for(job.numel, kTogether * kBlockThreads, by), kBlockThreads, 0,
        wires_of<kRows>(job.rows, 0), mix_table_of<V, kRows, kWires>(mixed.mixing, below),
        table_of<kWires>(job.weights), out_of<kDType>(job),
        mix_task_of<kDType>(job, mixed.matrix.num_mixed));
}

// Queues the copy of what is mixed into the device's memory.
template <typename V>
MixMany<V> copy_mixing(const Job& job, const Mixed& mixed, const Launch& by) {
  // A graph would read the host's memory again when it is replayed.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_call(cudaStreamIsCapturing(by.stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) {
    throw std::invalid_argument(
        describe(job) + ", mixed into " + std::to_string(mixed.matrix.num_mixed) +
        ": not inside a CUDA graph, which takes up to 32 rows without weights by the median or the "
        "trimmed mean, up to 16 by any rule, and one mixed row of up to 32 (float64: up to 16, "
        "without weights but for one mixed row); aggregate outside the graph");
  }
  // The host's memory lives until the device has read it: CUDA says only of copies that wait that
  // they have when they return.
  auto bytes = std::make_unique<std::vector<char>>(mix_many_of<V>(mixed.mixing));
  check_call(
      cudaMemcpyAsync(mixed.room, bytes->data(), bytes->size(), cudaMemcpyHostToDevice, by.stream),
      "copy of the matrix for " + describe(job));
  const auto free_it = [](void* all) { delete static_cast<std::vector<char>*>(all); };
  check_call(cudaLaunchHostFunc(by.stream, free_it, bytes.get()), "cudaLaunchHostFunc");
  bytes.release();  // the stream's from here on
  return mix_many_at<V>(mixed.room, job.num_rows(), mixed.matrix.num_mixed);
}

template <DType kDType, bool kIsWeighted, SortBy kSort>
void launch_mix_shared(const Job& job, const Mixed& mixed, const Launch& by) {
  using V = typename Stored<kDType>::Value;
  const int num_mixed = mixed.matrix.num_mixed, value = sizeof(V);
  const int bytes = job.num_rows() * value + num_mixed * (value + (kIsWeighted ? 4 : 0));
  // One thread sorts a column: more columns keep more threads at work.
  const int columns = columns_for(bytes, kSort == SortBy::kThread ? 64 : 32);
  queue("mix_shared_kernel", mix_shared_kernel<kDType, kIsWeighted, kSort>, job, by,
        grid_for(job.numel, columns, by), kBlockThreads, static_cast<size_t>(bytes) * columns,
        table_of<kMaxRows>(job.rows), table_of<kMaxRows>(job.weights),
        copy_mixing<V>(job, mixed, by), out_of<kDType>(job), mix_task_of<kDType>(job, num_mixed),
        columns);
}

// More rows, or weights.
template <DType kDType>
void launch_mix_many(const Job& job, const Mixed& mixed, const Launch& by) {
  if (!job.weights.empty()) {
    return launch_mix_shared<kDType, true, SortBy::kBatcher>(job, mixed, by);
  }
  if constexpr (kDType != DType::kFloat64) {
    const int num_mixed = mixed.matrix.num_mixed;
    if (num_mixed <= kHalf) {
      return launch_mix_shared<kDType, false, SortBy::kThread>(job, mixed, by);
    }
    if (num_mixed <= 2 * kHalf) {
      return launch_mix_shared<kDType, false, SortBy::kTwoLanes>(job, mixed, by);
    }
  }
  launch_mix_shared<kDType, false, SortBy::kBatcher>(job, mixed, by);
}

// Up to kRows rows and mixed rows, in registers; false where no kernel takes them so.
template <DType kDType, int kRows>
bool launch_mix_in_registers(const Job& job, const Mixed& mixed, const Launch& by) {
  const int num_mixed = mixed.matrix.num_mixed;
  const Rule rule = job.params.rule;
  if (num_mixed == 1) {  // whatever the rule: the one value
    launch_mix_of<kDType, kRows, 1, RankedRule<Rule::kMedian, true>>(job, mixed, by);
    return true;
  }
  if (job.weights.empty() && rule == Rule::kMedian) {
    const auto launch = num_mixed % 2
                            ? launch_mix_of<kDType, kRows, kRows, RankedRule<Rule::kMedian, true>>
                            : launch_mix_of<kDType, kRows, kRows, RankedRule<Rule::kMedian, false>>;
    launch(job, mixed, by);
    return true;
  }
  if (job.weights.empty() && rule == Rule::kTrimmedMean) {
    constexpr Rule kRule = Rule::kTrimmedMean;
    const auto launch = num_mixed % 2
                            ? launch_mix_of<kDType, kRows, kRows, RankedRule<kRule, true>>
                            : launch_mix_of<kDType, kRows, kRows, RankedRule<kRule, false>>;
    launch(job, mixed, by);
    return true;
  }
  if constexpr (kRows <= 16) {
    if (job.weights.empty()) {
      launch_mix_of<kDType, kRows, kRows, AnyRule<false>, 1>(job, mixed, by);
      return true;
    }
    if constexpr (kDType != DType::kFloat64) {  // a key and its weight have 64 bits
      launch_mix_of<kDType, kRows, kRows, AnyRule<true>, 1>(job, mixed, by);
      return true;
    }
  }
  return false;
}

template <DType kDType>
void launch_mix_rule(const Job& job, const Mixed& mixed, const Launch& by) {
  const int most = std::max(job.num_rows(), mixed.matrix.num_mixed);
  const bool is_done = most <= 4    ? launch_mix_in_registers<kDType, 4>(job, mixed, by)
                       : most <= 8  ? launch_mix_in_registers<kDType, 8>(job, mixed, by)
                       : most <= 16 ? launch_mix_in_registers<kDType, 16>(job, mixed, by)
                                    : false;
  if (is_done) return;
  if constexpr (kDType != DType::kFloat64) {
    if (most > 16 && most <= 32 && launch_mix_in_registers<kDType, 32>(job, mixed, by)) return;
  }
  launch_mix_many<kDType>(job, mixed, by);
}

}  // namespace

// The sums of blocks go to `sums`, the table to `table`.
template <DType kDType>
void launch_distances(const Job& job, const Launch& by, const DistanceSums& shape, double* sums,
                      double* table) {
  if (shape.side == 4) {
    launch_distances_by<kDType, 4>(job, by, shape, sums);
  } else if constexpr (kMostSide<kDType> == 8) {
    launch_distances_by<kDType, 8>(job, by, shape, sums);
  }
  const int64_t entries = int64_t{shape.rows + 1} * (shape.rows + 1);
  queue("add_blocks_kernel", add_blocks_kernel, job, by, grid_for(entries, kBlockThreads / 32, by),
        kBlockThreads, 0, shape, static_cast<const double*>(sums), table);
}

template <DType kDType>
void launch_mix(const Job& job, const Mixed& mixed, const Launch& by) {
  queue_parts(job, by,
              [&](const Job& part, const Launch& to) { launch_mix_rule<kDType>(part, mixed, to); });
  launch_compare<kDType>(job, by);
}

#if defined(LOFT_PART)
extern template void launch_compare<part::LOFT_PART>(const Job& job, const Launch& by);
template void launch_distances<part::LOFT_PART>(const Job&, const Launch&, const DistanceSums&,
                                                double*, double*);
template void launch_mix<part::LOFT_PART>(const Job&, const Mixed&, const Launch&);
#else
#define LOFT_ELSEWHERE(dtype)                                                                  \
  extern template void launch_distances<dtype>(const Job&, const Launch&, const DistanceSums&, \
                                               double*, double*);                              \
  extern template void launch_mix<dtype>(const Job&, const Mixed&, const Launch&);
LOFT_ELSEWHERE(DType::kFloat64)
LOFT_ELSEWHERE(DType::kFloat32)
LOFT_ELSEWHERE(DType::kFloat16)
LOFT_ELSEWHERE(DType::kBFloat16)
#undef LOFT_ELSEWHERE
#endif

}  // namespace loft::device

#if !defined(LOFT_PART)
namespace loft {
namespace {

device::DistanceSums sums_of(const Job& job) {
  const bool is_wide = job.dtype == DType::kFloat64 || job.num_rows() <= 4;
  return {job.num_rows(), is_wide ? 4 : 8, (job.numel + kBlock - 1) / kBlock};
}

}  // namespace

int64_t distance_cells(const Job& job) {
  const device::DistanceSums shape = sums_of(job);
  return shape.blocks * shape.cells();
}

void distances_cuda(const Job& job, const CudaOptions& options, double* sums, double* table) {
  using namespace device;
  check_rows(job, table);
  if (job.numel == 0) return;
  const DeviceGuard guard(options.device);
  const Launch launch = launch_by(options);
  const DistanceSums shape = sums_of(job);
  for_dtype(job.dtype,
            [&](auto dtype) { launch_distances<dtype>(job, launch, shape, sums, table); });
}

void mix_cuda(const Job& job, const Matrix& matrix, double* room, const CudaOptions& options) {
  using namespace device;
  const Mixing mixing = mixing_of(job, matrix);
  if (job.numel == 0) return;
  const DeviceGuard guard(options.device);
  const Launch launch = launch_by(options);
  for_dtype(job.dtype,
            [&](auto dtype) { launch_mix<dtype>(job, Mixed{matrix, mixing, room}, launch); });
}

}  // namespace loft
#endif
