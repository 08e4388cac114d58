// Layer 2. The CUDA kernels for rules that see rows; cuda/rows.cu chooses among them. Only nvcc
// compiles this file.
//
// distances_kernel     squares of differences of every pair of rows, summed a block of coordinates
// add_blocks_kernel    those of all blocks, in their order
// mix_kernel           up to 32 rows mixed and aggregated in registers
// mix_shared_kernel    whatever is left: values and keys in shared memory, the matrix in the
// device's
#pragma once

#include "cuda/kernels.h"
#include "cuda/rows.h"

namespace loft::device {
namespace {  // one copy a dtype: each is compiled on its own

// A block of threads takes one pair of groups of kSide rows in one block of coordinates, and then
// the next; pairs of the same coordinates are neighbours, so that they share the L2 cache. A warp
// reads two tiles, 16 neighbouring values of each. Traffic: of g groups each row is read g times,
// all but once from the L2 cache; shared memory up to 36 KiB; deterministic.
template <DType kDType, int kSide>
__global__ void __launch_bounds__(kSlotThreads)
    distances_kernel(const __grid_constant__ Rows<kMaxRows> table, int64_t numel,
                     const __grid_constant__ DistanceSums shape, double* __restrict__ sums) {
  using Of = Distances<kDType, kSide>;
  __shared__ typename Of::Shared shared;
  const int64_t group_pairs = shape.group_pairs();
  for (int64_t item = blockIdx.x; item < shape.blocks * group_pairs; item += gridDim.x) {
    const int64_t begin = item / group_pairs * kBlock;
    const Of what{table.at, shape.rows,
                  group_pair_at(item % group_pairs, groups_of(shape.rows, kSide)), begin,
                  begin + kBlock < numel ? begin + kBlock : numel};
    typename Of::Lanes mine{};
    for (int round = 0; round < what.rounds(); ++round) {
      what.measure(threadIdx.x, round, shared);
      __syncthreads();
      what.add(threadIdx.x, shared, mine);
      __syncthreads();
    }
    what.gather(threadIdx.x, mine, shared);
    __syncthreads();
    what.finish(threadIdx.x, shared, sums + item * Of::kPairs);
    __syncthreads();
  }
}

// One thread a pair of rows, or a row's length, adds the sums of all blocks in their order;
// entries [row, column > row] of `result`, [rows + 1, rows + 1]. Reads each sum once.
[[maybe_unused]] __global__ void __launch_bounds__(kBlockThreads)
    add_blocks_kernel(const __grid_constant__ DistanceSums shape, const double* __restrict__ sums,
                      double* __restrict__ result) {
  const int side = shape.rows + 1;
  const int64_t cells = shape.cells();
  for (int place = blockIdx.x * blockDim.x + threadIdx.x; place < side * side;
       place += gridDim.x * blockDim.x) {
    const int row = place / side, column = place % side;
    if (column <= row) continue;
    const double* from = sums + shape.cell(row, column);
    double sum = 0;
#pragma unroll 16  // so many reads are under way at a time
    for (int64_t block = 0; block < shape.blocks; ++block) sum += from[block * cells];
    result[place] = sum;
  }
}

// What a mixing kernel is told of its job besides the matrix; weights and rule are the mixed rows'.
template <DType kDType>
struct MixTask {
  int64_t numel;
  int rows, num_mixed;
  int64_t total_weight;
  RuleParams params;
};

template <DType kDType>
using WideKey = Key<kWide<kDType>>;

// One thread for kTurns coordinates, kBlockThreads apart, so that a warp reads each row coalesced
// at any alignment and a weight that is loaded serves them all. Up to kRows rows are mixed onto
// kWires wires. Traffic (rows + 1) * numel * sizeof(value) bytes; no shared memory; deterministic.
template <DType kDType, int kRows, int kWires, int kTurns, typename Ranked>
__global__ void __launch_bounds__(kBlockThreads)
    mix_kernel(const __grid_constant__ Rows<kRows> table,
               const __grid_constant__ MixTable<typename Stored<kDType>::Value, kRows> by,
               const __grid_constant__ Table<int32_t, kWires> weights,
               Bits<kDType>* __restrict__ out, const __grid_constant__ MixTask<kDType> task) {
  using V = typename Stored<kDType>::Value;
  constexpr int64_t kTogether = int64_t{kBlockThreads} * kTurns;
  for (int64_t base = blockIdx.x * kTogether; base < task.numel;
       base += static_cast<int64_t>(gridDim.x) * kTogether) {
    V values[kTurns][kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t i = base + turn * kBlockThreads + threadIdx.x;
        const bool is_value = row < task.rows && i < task.numel;
        const auto* from = static_cast<const Bits<kDType>*>(table.at[row]);
        values[turn][row] = is_value ? value_of<kDType>(from[i]) * by.scales[row] : V{0};
      }
    }
    WideKey<kDType> keys[kTurns][kWires];
    mix_keys<kDType, kRows, kWires, kTurns>(values, by, task.num_mixed,
                                            Ranked::template below<kWires>(task.num_mixed), keys);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t i = base + turn * kBlockThreads + threadIdx.x;
      const auto result = Ranked::template apply<kWide<kDType>>(keys[turn], weights, task.num_mixed,
                                                                task.total_weight, task.params);
      if (i < task.numel) out[i] = narrowed<kDType>(result);
    }
  }
}

// A block for `columns` neighbouring coordinates: values [rows][columns] in shared memory, from
// which keys [num_mixed][columns] are mixed, one thread a cell, and ranked as in shared_kernel. Any
// job. `matrix` lies in the device's memory: scales [rows], then weights [num_mixed][rows]. Shared
// memory (rows * value + num_mixed * (key + weight)) * columns bytes.
template <DType kDType, bool kIsWeighted>
__global__ void __launch_bounds__(kBlockThreads)
    mix_shared_kernel(const __grid_constant__ Rows<kMaxRows> table,
                      const __grid_constant__ Table<int32_t, kMaxRows> weight_table,
                      const double* __restrict__ matrix, Bits<kDType>* __restrict__ out,
                      const __grid_constant__ MixTask<kDType> task, int columns) {
  using V = typename Stored<kDType>::Value;
  using K = WideKey<kDType>;
  constexpr DType kOf = kWide<kDType>;
  extern __shared__ char shared[];
  const int rows = task.rows, num_mixed = task.num_mixed, cells = num_mixed * columns;
  V* values = reinterpret_cast<V*>(shared);                 // [rows][columns]
  K* keys = reinterpret_cast<K*>(values + rows * columns);  // [num_mixed][columns]
  int32_t* weights = reinterpret_cast<int32_t*>(keys + cells);
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * columns; base < task.numel;
       base += static_cast<int64_t>(gridDim.x) * columns) {
    for (int cell = threadIdx.x; cell < rows * columns; cell += blockDim.x) {
      const int row = cell / columns;  // neighbouring threads read neighbouring coordinates
      const int64_t i = base + cell % columns;
      const auto* from = static_cast<const Bits<kDType>*>(table.at[row]);
      const V value = i < task.numel ? value_of<kDType>(from[i]) : V{0};
      values[cell] = value * static_cast<V>(matrix[row]);
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
      const int row = cell / columns, column = cell % columns;
      const V mixed = mixed_value<V>(
          rows, [&](int k) { return values[k * columns + column]; },
          [&](int k) { return weight_in<V>(matrix, rows, row, k); });
      keys[cell] = key_of<kOf>(bit_cast<Bits<kOf>>(mixed));
      if (kIsWeighted) weights[cell] = weight_table.at[row];
    }
    __syncthreads();
    sort_columns<kIsWeighted>(keys, weights, num_mixed, columns);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      const int64_t i = base + column;
      if (i >= task.numel) continue;  // the last block of coordinates is not full
      const auto key = [&](int rank) -> K& { return keys[rank * columns + column]; };
      const auto weight = [&](int rank) -> int32_t& { return weights[rank * columns + column]; };
      const auto outcome =
          rule_of<kOf, kIsWeighted>(task.params, num_mixed, task.total_weight, key, weight);
      out[i] = narrowed<kDType>(outcome.result);
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace loft::device
