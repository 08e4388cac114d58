// Layer 2. The CUDA kernels; cuda/launch.cu chooses among them. Only nvcc compiles this file.
//
// register_kernel  up to 64 rows, median, mean and trimmed mean: a few coordinates a thread
// any_rule_kernel  up to 64 rows, 32 with weights, any rule: one coordinate a thread
// two_lane_kernel  65 to 128 rows without weights: two neighbouring lanes a coordinate
// shared_kernel    whatever is left: keys in shared memory
// compare_kernel   diagnostics: rows against the window that the others left
//
// Compiled for sm_75 to sm_90, run on sm_90 alone; so are bounds that ptxas or a GPU gave.
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

// A part of a job, of up to kMostAtOnce coordinates. Kernels that rank in registers count them in
// 32 bits: an address is one instruction then, where a sum of 64 bits is two.
template <DType kDType>
struct Task {
  uint32_t numel;
  int64_t first;  // the part's first coordinate in the job
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

// All rows' values at one pack of kWide neighbouring coordinates. Nothing is computed, and nothing
// decided row by row, before all are asked for: so a warp waits for the memory once, not once a
// row. `from`: the rows' addresses, by wire; a wire without a row has any row's.
template <typename B, int kWide, int kWires>
__device__ __forceinline__ void load_packs(const Rows<kWires>& from, uint32_t pack, uint32_t numel,
                                           Pack<B, kWide> (&packs)[kWires]) {
  if (kWide == 1 || (pack + 1) * kWide <= numel) {
#pragma unroll
    for (int wire = 0; wire < kWires; ++wire) {  // one load of up to 16 bytes each
      packs[wire] = static_cast<const Pack<B, kWide>*>(from.at[wire])[pack];
    }
  } else {  // the tail: value by value
#pragma unroll
    for (int wire = 0; wire < kWires; ++wire) {
#pragma unroll
      for (int lane = 0; lane < kWide; ++lane) {
        const uint32_t i = pack * kWide + lane;
        packs[wire].values[lane] = i < numel ? static_cast<const B*>(from.at[wire])[i] : B{0};
      }
    }
  }
}

// Fewest rows on so many wires: those for which cuda/launch.cu has no kernel of fewer wires.
template <int kWires>
constexpr int kLeastRows = kWires <= 16   ? kWires
                           : kWires == 24 ? 17
                           : kWires == 32 ? 25
                           : kWires == 48 ? 33
                                          : 49;

// A value on its wire; only the outer wires, of some row counts, have none.
template <DType kDType, int kWires>
__device__ __forceinline__ Wire<kDType> on_wire(int wire, int below, int rows, Bits<kDType> bits) {
  constexpr int kMostBelow = padding_below<kWires>(kLeastRows<kWires>);
  const Wire<kDType> value = wire_of<kDType>(bits);
  if (wire < kMostBelow && wire < below) return wire_below<kDType>();
  if (wire >= kMostBelow + kLeastRows<kWires> && wire >= below + rows) return wire_above<kDType>();
  return value;
}

// Blocks that a multiprocessor is to hold where a thread has so many bytes of values, which bounds
// its registers: as many warps as there can be without values in local memory (ptxas for sm_90).
template <int kBytes>
constexpr int kLeastBlocks = kBytes <= 64    ? 8
                             : kBytes <= 144 ? 6
                                             : 4;

// One thread for kWide neighbouring coordinates; a warp reads each row coalesced, up to 16 bytes a
// lane. rows <= kWires; the rest of the wires are padding. `table` is by wire. Traffic (rows + 1) *
// numel * sizeof(value) bytes; no shared memory; deterministic.
template <DType kDType, int kWires, int kWide, bool kIsOdd, Rule kRule>
__global__ void __launch_bounds__(kBlockThreads,
                                  kLeastBlocks<kWires * kWide* int{sizeof(Wire<kDType>)}>)
    register_kernel(const __grid_constant__ Rows<kWires> table, Bits<kDType>* __restrict__ out,
                    const __grid_constant__ Task<kDType> task) {
  const uint32_t numel = task.numel, num_packs = (numel + kWide - 1) / kWide;
  const int rows = kWires <= 16 ? kWires : task.rows;
  using B = Bits<kDType>;
  const int below = padding_below<kWires>(rows);
  for (uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < num_packs;
       at += gridDim.x * blockDim.x) {
    Pack<B, kWide> packs[kWires];
    load_packs(table, at, numel, packs);
    Pack<B, kWide> result;
    const int64_t place = task.windows.place(task.first + int64_t{at} * kWide);  // < 0: unasked
#pragma unroll
    for (int lane = 0; lane < kWide; ++lane) {
      Wire<kDType> wires[kWires];
#pragma unroll
      for (int wire = 0; wire < kWires; ++wire) {
        wires[wire] = on_wire<kDType, kWires>(wire, below, rows, packs[wire].values[lane]);
      }
      Outcome<kDType> outcome;
      if constexpr (kRule == Rule::kMedian) {
        outcome = median_of<kDType, kWires, kIsOdd>(wires, task.params.kind);
      } else {
        outcome = trimmed_mean_of<kDType, kWires, kIsOdd>(wires, rows, task.params.f);
      }
      result.values[lane] = outcome.result;
      if (place >= 0) task.windows.put(place + lane, outcome);  // has room for whole blocks
    }
    if ((at + 1) * kWide <= numel) {
      reinterpret_cast<Pack<B, kWide>*>(out)[at] = result;
    } else {
#pragma unroll
      for (int lane = 0; lane < kWide; ++lane) {
        if (at * kWide + lane < numel) out[at * kWide + lane] = result.values[lane];
      }
    }
  }
}

// Of two neighbouring lanes with 64 wires each, side 0 is left with the smaller half of all, side 1
// with the larger: bitonic, not sorted. All lanes of a warp.
template <typename W>
__device__ __forceinline__ void sort_and_exchange(W (&wires)[kHalf], int side) {
  SortNetwork<kHalf>::apply(wires);
  W other[kHalf];  // the other lane's, in descending order
#pragma unroll
  for (int wire = 0; wire < kHalf; ++wire) {
    other[wire] = __shfl_xor_sync(kAllLanes, wires[kHalf - 1 - wire], 1);
  }
  keep_half(wires, other, side);
}

// Two neighbouring lanes for a coordinate with 65 to 128 rows: each sorts 64 wires in registers;
// one exchange by shuffles leaves the smaller half in the even lane and the larger in the odd one.
// Traffic as above; a warp reads 16 neighbouring values of two rows at a time. `table` is by wire.
// A kRule that is neither the median nor the trimmed mean stands for both rules around a centre.
// They index the ranks, which are in 32 KiB of shared memory then.
template <DType kDType, Rule kRule>
__global__ void __launch_bounds__(kBlockThreads, kRule == Rule::kMedian ? 4 : 3)
    two_lane_kernel(const __grid_constant__ Rows<128> table, Bits<kDType>* __restrict__ out,
                    const __grid_constant__ Task<kDType> task) {
  const uint32_t numel = task.numel;
  const int rows = task.rows;
  using V = typename Stored<kDType>::Value;
  using B = Bits<kDType>;
  using W = Wire<kDType>;
  constexpr bool kIsAround = kRule != Rule::kMedian && kRule != Rule::kTrimmedMean;
  constexpr int kColumns = kBlockThreads / 2;  // coordinates
  const int side = threadIdx.x & 1;            // 0: the lower 64 wires, 1: the upper
  const int below = padding_below<2 * kHalf>(rows);
  const uint32_t stride = gridDim.x * kColumns;
  // Every lane runs every round, so that all take part in the shuffles.
  for (uint32_t round = blockIdx.x * kColumns; round < numel; round += stride) {
    const uint32_t i = round + threadIdx.x / 2;
    const uint32_t from = i < numel ? i : numel - 1;  // behind the end: read, and not stored
    B bits[kHalf];
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      bits[wire] = static_cast<const B*>(table.at[side * kHalf + wire])[from];
    }
    W keys[kHalf];
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      const int row = side * kHalf + wire - below;
      keys[wire] = row < 0       ? wire_below<kDType>()
                   : row >= rows ? wire_above<kDType>()
                                 : wire_of<kDType>(bits[wire]);
    }
    sort_and_exchange(keys, side);
    const bool stores = side == 0 && i < numel;
    const int64_t place = task.windows.place(task.first + i);
    if constexpr (kRule == Rule::kMedian) {
      const W lower = edge_of(keys, side);
      const W upper = __shfl_xor_sync(kAllLanes, lower, 1);
      if (stores) {
        const auto outcome = median_of_middle<kDType>(
            value_at<kDType>(lower), value_at<kDType>(upper), rows % 2, task.params.kind);
        out[i] = outcome.result;
        task.windows.put(place, outcome);
      }
      continue;
    }
    sort_half(keys);  // what is left is bitonic
    if constexpr (kIsAround) {
      __shared__ W ranked[2 * kHalf * kColumns + 16];  // [wires][columns]
      // The two sides of 16 columns use all banks.
      const auto at = [&](int wire) -> W& {
        return ranked[wire * kColumns + threadIdx.x / 2 + (wire < kHalf ? 0 : 16)];
      };
#pragma unroll
      for (int wire = 0; wire < kHalf; ++wire) at(side * kHalf + wire) = keys[wire];
      __syncwarp();
      if (stores) {
        const auto key = [&](int rank) -> W& { return at(below + rank); };
        const auto weight = [&](int rank) -> int32_t& {  // not called
          return reinterpret_cast<int32_t&>(at(rank));
        };
        const auto outcome =
            rule_of<kDType, false>(task.params, rows, task.total_weight, key, weight);
        out[i] = outcome.result;
        task.windows.put(place, outcome);
      }
      __syncwarp();
    } else {
      V above[kHalf];
#pragma unroll
      for (int wire = 0; wire < kHalf; ++wire) {
        above[wire] = __shfl_xor_sync(kAllLanes, value_at<kDType>(keys[wire]), 1);
      }
      if (stores) {
        const auto outcome = trimmed_mean_of_halves<kDType>(keys, above, rows, task.params.f);
        out[i] = outcome.result;
        task.windows.put(place, outcome);
      }
    }
  }
}

// One thread a coordinate, any rule, weights or not; rows <= kWires, sorted in registers. What is
// done with the ranks indexes them, so each thread has a column of shared memory for them, up to 32
// KiB a block. A warp reads each row coalesced. Traffic (rows + 1) * numel * sizeof(value) bytes;
// deterministic.
template <DType kDType, int kWires, bool kIsWeighted>
__global__ void __launch_bounds__(kBlockThreads)
    any_rule_kernel(const __grid_constant__ Rows<kWires> table,
                    const __grid_constant__ Table<int32_t, kWires> weight_table,
                    Bits<kDType>* __restrict__ out, const __grid_constant__ Task<kDType> task) {
  __shared__ Wire<kDType> ranked[kWires][kBlockThreads];
  __shared__ int32_t ranked_weights[kIsWeighted ? kWires : 1][kBlockThreads];
  const uint32_t numel = task.numel;
  const int rows = task.rows;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < numel; i += gridDim.x * blockDim.x) {
    Pack<Bits<kDType>, 1> packs[kWires];
    load_packs(table, i, numel, packs);
    Wire<kDType> keys[kWires];
    int32_t weights[kWires];
#pragma unroll
    for (int row = 0; row < kWires; ++row) {
      keys[row] = row < rows ? wire_of<kDType>(packs[row].values[0]) : wire_above<kDType>();
      weights[row] = kIsWeighted ? weight_table.at[row] : 0;
    }
    sort_rows<kDType, kWires, kIsWeighted>(keys, weights, rows);
#pragma unroll
    for (int rank = 0; rank < kWires; ++rank) {
      ranked[rank][threadIdx.x] = keys[rank];
      if (kIsWeighted) ranked_weights[rank][threadIdx.x] = weights[rank];
    }
    const auto key = [&](int rank) -> Wire<kDType>& { return ranked[rank][threadIdx.x]; };
    const auto weight = [&](int rank) -> int32_t& {
      return ranked_weights[kIsWeighted ? rank : 0][threadIdx.x];
    };
    const auto outcome =
        rule_of<kDType, kIsWeighted>(task.params, rows, task.total_weight, key, weight);
    out[i] = outcome.result;
    task.windows.put(task.windows.place(task.first + i), outcome);
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
      task.windows.put(task.windows.place(task.first + i), outcome);
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
