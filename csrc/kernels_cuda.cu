// Layer 2. CUDA kernels and launchers of one dtype (LOFT_PART: the code of DType).
//
// Up to 64 rows: all rows of a few neighbouring coordinates in the registers of one thread. 65 to
// 128: two lanes a coordinate. More rows, weights, and the rules around a centre: keys in shared
// memory. Nothing here needs more than sm_70 offers.

#include <algorithm>
#include <stdexcept>
#include <string>

#include "coordinate_cuda.h"
#include "launch_cuda.h"

namespace loft {
namespace device {
namespace {

constexpr int kBlockThreads = 128;
constexpr int kSharedBytes = 48 * 1024;
constexpr unsigned kAllLanes = 0xffffffffu;

template <int kMost>
struct RowTable {
  const void* rows[kMost];
};
struct WeightTable {
  int32_t weights[kMaxRows];
};

template <typename B, int kWide>
struct alignas(sizeof(B) * kWide) Pack {
  B values[kWide];
};

// One thread for kWide neighbouring coordinates; a warp reads each row coalesced, up to 16 bytes a
// lane. rows <= kWires; the rest of the wires are padding. Traffic (rows + 1) * numel *
// sizeof(value) bytes; no shared memory; deterministic.
template <DType kDType, int kWires, int kWide, bool kIsOdd, Rule kRule>
__global__ void __launch_bounds__(kBlockThreads)
    register_kernel(const __grid_constant__ RowTable<kWires> table, Bits<kDType>* __restrict__ out,
                    int64_t numel, int rows, RuleParams params) {
  using B = Bits<kDType>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * kWide;
  const int below = padding_below<kWires>(rows);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWide; i < numel;
       i += stride) {
    const bool is_whole = i + kWide <= numel;
    Key<kDType> keys[kWide][kWires];
#pragma unroll
    for (int wire = 0; wire < kWires; ++wire) {
      const int row = wire - below;
      const bool is_row = row >= 0 && row < rows;
      const B* from = static_cast<const B*>(table.rows[is_row ? row : 0]) + i;
      Pack<B, kWide> pack{};
      if (is_row && is_whole) {
        pack = *reinterpret_cast<const Pack<B, kWide>*>(from);
      } else if (is_row) {
#pragma unroll
        for (int lane = 0; lane < kWide; ++lane) {
          if (i + lane < numel) pack.values[lane] = from[lane];
        }
      }
#pragma unroll
      for (int lane = 0; lane < kWide; ++lane) {
        keys[lane][wire] = is_row ? static_cast<Key<kDType>>(key_of<kDType>(pack.values[lane]))
                                  : (row < 0 ? kFirst<kDType> : kLast<kDType>);
      }
    }
    Pack<B, kWide> result;
#pragma unroll
    for (int lane = 0; lane < kWide; ++lane) {
      if constexpr (kRule == Rule::kMedian) {
        result.values[lane] = median_of<kDType, kWires, kIsOdd>(keys[lane], params.kind);
      } else {
        result.values[lane] = trimmed_mean_of<kDType, kWires, kIsOdd>(keys[lane], rows, params.f);
      }
    }
    if (is_whole) {
      *reinterpret_cast<Pack<B, kWide>*>(out + i) = result;
    } else {
#pragma unroll
      for (int lane = 0; lane < kWide; ++lane) {
        if (i + lane < numel) out[i + lane] = result.values[lane];
      }
    }
  }
}

// Two neighbouring lanes for a coordinate with 65 to 128 rows: each sorts 64 wires in registers;
// one exchange by shuffles leaves the smaller half in the even lane and the larger in the odd one.
// Traffic as above; a warp reads 16 neighbouring values of two rows at a time.
template <DType kDType, Rule kRule>
__global__ void __launch_bounds__(kBlockThreads)
    two_lane_kernel(const __grid_constant__ RowTable<128> table, Bits<kDType>* __restrict__ out,
                    int64_t numel, int rows, RuleParams params) {
  using B = Bits<kDType>;
  using V = typename Stored<kDType>::Value;
  constexpr int kHalf = 64;
  const int side = threadIdx.x & 1;
  const int below = padding_below<2 * kHalf>(rows);
  const bool is_odd = rows % 2;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x / 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 2;
  // Every lane runs every round, so that all take part in the shuffles.
  const int64_t rounds = (numel + stride - 1) / stride;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t i = first + round * stride;
    Key<kDType> keys[kHalf];
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      const int row = side * kHalf + wire - below;
      const bool is_row = row >= 0 && row < rows && i < numel;
      keys[wire] =
          is_row
              ? static_cast<Key<kDType>>(key_of<kDType>(static_cast<const B*>(table.rows[row])[i]))
              : (row < 0 ? kFirst<kDType> : kLast<kDType>);
    }
    SortNetwork<kHalf>::apply(keys);
    Key<kDType> other[kHalf];
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      other[wire] = __shfl_xor_sync(kAllLanes, keys[kHalf - 1 - wire], 1);
    }
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {  // the even lane keeps minima, the odd lane maxima
      const bool takes_other = (other[wire] < keys[wire]) == (side == 0);
      keys[wire] = takes_other ? other[wire] : keys[wire];
    }
    if constexpr (kRule == Rule::kMedian) {
      Key<kDType> edge = keys[0];  // the even lane's largest, the odd lane's smallest
#pragma unroll
      for (int wire = 1; wire < kHalf; ++wire) {
        edge = (keys[wire] > edge) == (side == 0) ? keys[wire] : edge;
      }
      const Key<kDType> upper = __shfl_xor_sync(kAllLanes, edge, 1);
      const V lower = value_at<kDType>(edge);
      const V picked = is_odd ? lower : pick_median(lower, value_at<kDType>(upper), params.kind);
      if (side == 0 && i < numel) out[i] = result_bits<kDType>(picked);
    } else {
      const int num_leaves = (rows - 2 * params.f + 1) / 2;
#pragma unroll
      for (int distance = kHalf / 2; distance > 0; distance /= 2) {  // bitonic, so this sorts it
#pragma unroll
        for (int wire = 0; wire < kHalf; ++wire) {
          if (!(wire & distance)) exchange(keys[wire], keys[wire + distance]);
        }
      }
      V above[kHalf];
#pragma unroll
      for (int wire = 0; wire < kHalf; ++wire) {
        above[wire] = __shfl_xor_sync(kAllLanes, value_at<kDType>(keys[wire]), 1);
      }
      V low{}, high{};
      const auto pair = [&](int k, auto scale) {
        using S = decltype(scale);
        const S from = static_cast<S>(value_at<kDType>(keys[kHalf - 1 - k])) * scale;
        if (!is_odd) return from + static_cast<S>(above[k]) * scale;
        return k == 0 ? from : from + static_cast<S>(above[k > 0 ? k - 1 : 0]) * scale;
      };
      const auto leaf = [&](int k) -> V { return k < num_leaves ? pair(k, V{1}) : V{0}; };
      const V sum = Tree<kHalf>::sum(leaf, 0);
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        if (k == num_leaves - 1) {
          low = value_at<kDType>(keys[kHalf - 1 - k]);
          high = !is_odd ? above[k] : k == 0 ? low : above[k > 0 ? k - 1 : 0];
        }
      }
      const int count = rows - 2 * params.f;
      V mean = sum / static_cast<V>(count);
      if (!(sum - sum == 0) && low - low == 0 && high - high == 0) {
        constexpr double kScale = 1.0 / 18446744073709551616.0;
        const auto scaled = [&](int k) -> double { return k < num_leaves ? pair(k, kScale) : 0.0; };
        mean = static_cast<V>(Tree<kHalf>::sum(scaled, 0) / count / kScale);
      }
      if (side == 0 && i < numel) out[i] = result_bits<kDType>(clamp_mean(mean, low, high));
    }
  }
}

// A block for `columns` neighbouring coordinates: keys [rows][columns] (and weights) in shared
// memory, sorted there by Batcher's network, one comparator a thread and step; then one thread a
// coordinate applies the rule. Any rows, rule and weights. Shared memory rows * columns * (key +
// weight) bytes.
template <DType kDType, bool kIsWeighted>
__global__ void __launch_bounds__(kBlockThreads)
    shared_kernel(const __grid_constant__ RowTable<kMaxRows> table,
                  const __grid_constant__ WeightTable weight_table, Bits<kDType>* __restrict__ out,
                  int64_t numel, int rows, int columns, int64_t total_weight, RuleParams params) {
  using B = Bits<kDType>;
  using K = Key<kDType>;
  extern __shared__ char shared[];
  K* keys = reinterpret_cast<K*>(shared);
  int32_t* weights = reinterpret_cast<int32_t*>(keys + rows * columns);
  const int cells = rows * columns;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * columns; base < numel;
       base += static_cast<int64_t>(gridDim.x) * columns) {
    for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
      const int row = cell / columns;
      const int64_t i = base + cell % columns;
      const B stored = i < numel ? static_cast<const B*>(table.rows[row])[i] : B{0};
      keys[cell] = static_cast<K>(key_of<kDType>(stored));
      if (kIsWeighted) weights[cell] = weight_table.weights[row];
    }
    __syncthreads();
    for (int p = 1; p < rows; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
          const int low = cell / columns, high = low + k, skip = k % p;
          const bool is_used = high < rows && low >= skip && (low - skip) % (2 * k) < k &&
                               low / (2 * p) == high / (2 * p);
          if (!is_used) continue;
          const int to = cell + k * columns;
          const K a = keys[cell], b = keys[to];
          bool swaps = a > b;
          if (kIsWeighted) swaps = swaps || (a == b && weights[cell] > weights[to]);
          if (!swaps) continue;
          keys[cell] = b;
          keys[to] = a;
          if (kIsWeighted) {
            const int32_t weight = weights[cell];
            weights[cell] = weights[to];
            weights[to] = weight;
          }
        }
        __syncthreads();
      }
    }
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      if (base + column >= numel) continue;
      const auto key = [&](int i) -> K& { return keys[i * columns + column]; };
      const auto weight = [&](int i) -> int32_t& { return weights[i * columns + column]; };
      out[base + column] = rule_of<kDType, kIsWeighted>(params, rows, total_weight, key, weight);
    }
    __syncthreads();
  }
}

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

template <DType kDType, int kWires, int kWide, bool kIsOdd>
void launch_width(const Job& job, const Launch& launch) {
  const RowTable<kWires> table = table_of<kWires>(job);
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const int64_t threads = (job.numel + kWide - 1) / kWide;
  const unsigned grid = grid_for((threads + kBlockThreads - 1) / kBlockThreads, launch);
  const int rows = static_cast<int>(job.rows.size());
  if (job.params.rule == Rule::kMedian) {
    register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kMedian>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params);
  } else {
    register_kernel<kDType, kWires, kWide, kIsOdd, Rule::kTrimmedMean>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params);
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
  if (job.params.rule == Rule::kMedian) {
    two_lane_kernel<kDType, Rule::kMedian>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params);
  } else {
    two_lane_kernel<kDType, Rule::kTrimmedMean>
        <<<grid, kBlockThreads, 0, launch.stream>>>(table, out, job.numel, rows, job.params);
  }
  check_launch("two_lane_kernel", job);
}

template <DType kDType>
void launch_shared(const Job& job, const Launch& launch) {
  const RowTable<kMaxRows> table = table_of<kMaxRows>(job);
  WeightTable weights{};
  std::copy(job.weights.begin(), job.weights.end(), weights.weights);
  int64_t total = 0;
  for (int32_t weight : job.weights) total += weight;
  auto* out = static_cast<Bits<kDType>*>(job.out);
  const int rows = static_cast<int>(job.rows.size());
  const int cell = static_cast<int>(sizeof(Key<kDType>)) + (job.weights.empty() ? 0 : 4);
  const int columns = std::max(1, std::min(32, kSharedBytes / (rows * cell)));
  const size_t bytes = static_cast<size_t>(rows) * columns * cell;
  const unsigned grid = grid_for((job.numel + columns - 1) / columns, launch);
  if (job.weights.empty()) {
    shared_kernel<kDType, false><<<grid, kBlockThreads, bytes, launch.stream>>>(
        table, weights, out, job.numel, rows, columns, total, job.params);
  } else {
    shared_kernel<kDType, true><<<grid, kBlockThreads, bytes, launch.stream>>>(
        table, weights, out, job.numel, rows, columns, total, job.params);
  }
  check_launch("shared_kernel", job);
}

template <DType kDType>
void launch(const Job& job, const Launch& launch) {
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
  launch_shared<kDType>(job, launch);
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
