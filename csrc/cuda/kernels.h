// Layer 2. The CUDA kernels; cuda/launch.cu chooses among them. Only nvcc compiles this file.
//
// register_kernel  up to 64 rows, median, mean and trimmed mean: a few coordinates a thread
// two_lane_kernel  65 to 128 rows, the same rules: two neighbouring lanes a coordinate
// any_rule_kernel  up to 32 rows, weights and the rules around a centre: one coordinate a thread
// shared_kernel    whatever is left: keys in shared memory
// compare_kernel   diagnostics: rows against the window that the others left
//
// Nothing here needs more than sm_70 offers.
#pragma once

#include "cuda/coordinate.h"

namespace loft::device {
namespace {  // one copy a dtype: each is compiled on its own

// Bound from the registers: a multiprocessor's 65,536 hold two blocks of 128 threads with 255 each,
// the most that a thread can have, and six blocks with 80.
constexpr int kBlockThreads = 128;
constexpr int kCompareThreads = 512;         // a block of coordinates takes each 32 rounds
constexpr int kSharedBytes = 48 * 1024;      // what a kernel gets without asking for more
constexpr unsigned kAllLanes = 0xffffffffu;  // of a warp: all 32 take part in a shuffle

// The rows' addresses and weights travel as kernel parameters: no copy, no buffer to keep alive.
template <typename T, int kMost>
struct Table {
  T at[kMost];
};
template <int kMost>
using Rows = Table<const void*, kMost>;

template <DType kDType>
struct Task {
  int64_t numel;
  int rows;
  int64_t total_weight;
  RuleParams params;
  Windows<kDType> windows;
};

template <DType kDType>
__device__ __forceinline__ Key<kDType> load_key(const void* row, int64_t i) {
  return static_cast<Key<kDType>>(key_of<kDType>(static_cast<const Bits<kDType>*>(row)[i]));
}

template <typename B, int kWide>
struct alignas(sizeof(B) * kWide) Pack {
  B values[kWide];
};

// One thread for kWide neighbouring coordinates; a warp reads each row coalesced, up to 16 bytes a
// lane. rows <= kWires; the rest of the wires are padding. Traffic (rows + 1) * numel *
// sizeof(value) bytes; no shared memory; deterministic.
template <DType kDType, int kWires, int kWide, bool kIsOdd, Rule kRule>
__global__ void __launch_bounds__(kBlockThreads)
    register_kernel(const __grid_constant__ Rows<kWires> table, Bits<kDType>* __restrict__ out,
                    const __grid_constant__ Task<kDType> task) {
  const int64_t numel = task.numel;
  const int rows = task.rows;
  using B = Bits<kDType>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * kWide;
  const int below = padding_below<kWires>(rows);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWide; i < numel;
       i += stride) {
    const bool is_whole = i + kWide <= numel;
    Key<kDType> keys[kWide][kWires];  // [coordinates of this thread, wires]
#pragma unroll
    for (int wire = 0; wire < kWires; ++wire) {
      const int row = wire - below;
      const bool is_row = row >= 0 && row < rows;
      const B* from = static_cast<const B*>(table.at[is_row ? row : 0]) + i;
      Pack<B, kWide> pack{};
      if (is_row && is_whole) {
        pack = *reinterpret_cast<const Pack<B, kWide>*>(from);  // one load of up to 16 bytes
      } else if (is_row) {                                      // the tail: value by value
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
    const int64_t place = task.windows.place(i);  // negative where nobody asks
#pragma unroll
    for (int lane = 0; lane < kWide; ++lane) {
      Outcome<kDType> outcome;
      if constexpr (kRule == Rule::kMedian) {
        outcome = median_of<kDType, kWires, kIsOdd>(keys[lane], task.params.kind);
      } else {
        outcome = trimmed_mean_of<kDType, kWires, kIsOdd>(keys[lane], rows, task.params.f);
      }
      result.values[lane] = outcome.result;
      if (place >= 0) task.windows.put(place + lane, outcome);  // has room for whole blocks
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
    two_lane_kernel(const __grid_constant__ Rows<128> table, Bits<kDType>* __restrict__ out,
                    const __grid_constant__ Task<kDType> task) {
  const int64_t numel = task.numel;
  const int rows = task.rows;
  using V = typename Stored<kDType>::Value;
  const int side = threadIdx.x & 1;  // 0: the lower 64 wires, 1: the upper
  const int below = padding_below<2 * kHalf>(rows);
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
      keys[wire] = is_row    ? load_key<kDType>(table.at[row], i)
                   : row < 0 ? kFirst<kDType>
                             : kLast<kDType>;
    }
    SortNetwork<kHalf>::apply(keys);
    Key<kDType> other[kHalf];  // the other lane's, in descending order
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      other[wire] = __shfl_xor_sync(kAllLanes, keys[kHalf - 1 - wire], 1);
    }
    keep_half(keys, other, side);  // now side 0 has minima, side 1 maxima
    if constexpr (kRule == Rule::kMedian) {
      const Key<kDType> lower = edge_of(keys, side);
      const Key<kDType> upper = __shfl_xor_sync(kAllLanes, lower, 1);
      if (side == 0 && i < numel) {
        const auto outcome = median_of_middle<kDType>(
            value_at<kDType>(lower), value_at<kDType>(upper), rows % 2, task.params.kind);
        out[i] = outcome.result;
        task.windows.put(task.windows.place(i), outcome);
      }
    } else {
      sort_half(keys);  // what is left is bitonic
      V above[kHalf];
#pragma unroll
      for (int wire = 0; wire < kHalf; ++wire) {
        above[wire] = __shfl_xor_sync(kAllLanes, value_at<kDType>(keys[wire]), 1);
      }
      if (side == 0 && i < numel) {
        const auto outcome = trimmed_mean_of_halves<kDType>(keys, above, rows, task.params.f);
        out[i] = outcome.result;
        task.windows.put(task.windows.place(i), outcome);
      }
    }
  }
}

// One thread a coordinate, any rule, weights or not; rows <= kWires. A warp reads each row
// coalesced. Traffic (rows + 1) * numel * sizeof(value) bytes; local memory for the ranked values,
// 128 bytes a thread at 16 rows and 320 at 32 with weights (by ptxas for sm_90), more than the L1
// cache has for all threads; no shared memory; deterministic.
template <DType kDType, int kWires, bool kIsWeighted>
__global__ void __launch_bounds__(kBlockThreads)
    any_rule_kernel(const __grid_constant__ Rows<kWires> table,
                    const __grid_constant__ Table<int32_t, kWires> weight_table,
                    Bits<kDType>* __restrict__ out, const __grid_constant__ Task<kDType> task) {
  const int64_t numel = task.numel;
  const int rows = task.rows;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel;
       i += stride) {
    Key<kDType> keys[kWires];
    int32_t weights[kWires];
#pragma unroll
    for (int row = 0; row < kWires; ++row) {
      keys[row] = row < rows ? load_key<kDType>(table.at[row], i) : kLast<kDType>;
      weights[row] = kIsWeighted ? weight_table.at[row] : 0;
    }
    const auto outcome = any_rule_of<kDType, kWires, kIsWeighted>(keys, weights, rows,
                                                                  task.total_weight, task.params);
    out[i] = outcome.result;
    task.windows.put(task.windows.place(i), outcome);
  }
}

// Sorts every column of keys [rows][columns] in shared memory by Batcher's network, one comparator
// a thread and step; weights, [rows][columns], travel with their keys and order ties. All threads
// of a block, after a barrier; ends with one.
template <bool kIsWeighted, typename K>
__device__ void sort_columns(K* keys, int32_t* weights, int rows, int columns) {
  const int cells = rows * columns;
  for (int p = 1; p < rows; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
        if (!is_batcher_low(cell / columns, rows, p, k)) continue;
        const int to = cell + k * columns;  // the same column, k rows on
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
}

// A block for `columns` neighbouring coordinates: keys [rows][columns] (and weights) in shared
// memory, sorted there; then one thread a coordinate applies the rule. Any job. Shared memory rows
// * columns * (key + weight) bytes.
template <DType kDType, bool kIsWeighted>
__global__ void __launch_bounds__(kBlockThreads)
    shared_kernel(const __grid_constant__ Rows<kMaxRows> table,
                  const __grid_constant__ Table<int32_t, kMaxRows> weight_table,
                  Bits<kDType>* __restrict__ out, const __grid_constant__ Task<kDType> task,
                  int columns) {
  const int64_t numel = task.numel;
  const int rows = task.rows;
  using K = Key<kDType>;
  extern __shared__ char shared[];
  K* keys = reinterpret_cast<K*>(shared);
  int32_t* weights = reinterpret_cast<int32_t*>(keys + rows * columns);  // [rows][columns]
  const int cells = rows * columns;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * columns; base < numel;
       base += static_cast<int64_t>(gridDim.x) * columns) {
    for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
      const int row = cell / columns;  // neighbouring threads read neighbouring coordinates
      const int64_t i = base + cell % columns;
      keys[cell] = i < numel ? load_key<kDType>(table.at[row], i) : K{0};
      if (kIsWeighted) weights[cell] = weight_table.at[row];
    }
    __syncthreads();
    sort_columns<kIsWeighted>(keys, weights, rows, columns);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      const int64_t i = base + column;
      if (i >= numel) continue;  // the last block of coordinates is not full
      const auto key = [&](int rank) -> K& { return keys[rank * columns + column]; };
      const auto weight = [&](int rank) -> int32_t& { return weights[rank * columns + column]; };
      const auto outcome =
          rule_of<kDType, kIsWeighted>(task.params, rows, task.total_weight, key, weight);
      out[i] = outcome.result;
      task.windows.put(task.windows.place(i), outcome);
    }
    __syncthreads();
  }
}

// A block of threads for one row (blockIdx.y) in one block of coordinates that is looked at
// (blockIdx.x): sums[s][row][blockIdx.x], s in the order of RowSums' members. Reads the row, the
// results and their windows there, coalesced; static shared memory; the sums' order is fixed.
template <DType kDType>
__global__ void __launch_bounds__(kCompareThreads)
    compare_kernel(const __grid_constant__ Rows<kMaxRows> table,
                   const Bits<kDType>* __restrict__ out, int64_t numel, Windows<kDType> windows,
                   double* __restrict__ sums) {
  __shared__ RowSums shared[kCompareThreads];
  const auto* row = static_cast<const Bits<kDType>*>(table.at[blockIdx.y]);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * windows.every * kBlock;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kBlock;
  const int count = static_cast<int>(numel - begin < kBlock ? numel - begin : kBlock);
  RowSums mine{};
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kCompareThreads) {
    mine.add(value_of<kDType>(row[begin + i]), value_of<kDType>(out[begin + i]),
             windows.low[place + i], windows.high[place + i]);
  }
  shared[threadIdx.x] = mine;  // then halves are added to halves, always in this order
  for (int half = kCompareThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x].add(shared[threadIdx.x + half]);
  }
  if (threadIdx.x != 0) return;  // one thread has the sum of all
  const int64_t cells = static_cast<int64_t>(gridDim.x) * gridDim.y;
  double* cell = sums + static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  cell[0] = shared[0].outside;
  cell[cells] = shared[0].non_finite;
  cell[2 * cells] = shared[0].squared;
}

}  // namespace
}  // namespace loft::device
