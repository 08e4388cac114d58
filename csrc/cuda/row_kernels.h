// Layer 2. The CUDA kernels for rules that see rows; cuda/rows.cu chooses among them. Only nvcc
// compiles this file.
//
// distances_kernel     squares of differences of every pair of rows, summed a block of coordinates
// add_blocks_kernel    those of all blocks, in their order
// mix_kernel           up to 32 rows mixed and aggregated in registers; by the rules around a
//                      centre, which index local memory, up to 16: they are rare here
// mix_shared_kernel    whatever is left: values and keys in shared memory
#pragma once

#include "cuda/kernels.h"
#include "cuda/rows.h"

namespace loft::device {
namespace {  // one copy a dtype: each is compiled on its own

// A block of threads takes one pair of groups of kSide rows in one block of coordinates, and then
// the next; pairs of the same coordinates are neighbours, so that they share the L2 cache. A warp
// reads two tiles, 16 neighbouring values of each. Traffic: of g groups each row is read g times,
// all but once from the L2 cache; shared memory up to 36 KiB; deterministic. `table` has a row's
// address for each row of a group, those behind the last one, too. Few rows are one group, and of
// few coordinates there are fewer blocks than fill the device: these take registers for more blocks
// a multiprocessor.
template <DType kDType, int kSide, bool kOneGroup>
__global__ void __launch_bounds__(kSlotThreads, kOneGroup ? 6 : 4)
    distances_kernel(const __grid_constant__ Rows<kMaxRows> table, int64_t numel,
                     const __grid_constant__ DistanceSums shape, double* __restrict__ sums) {
  using Of = Distances<kDType, kSide, kOneGroup>;
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

// A warp for a pair of rows, or for a row's length, adds the sums of all blocks in their order: its
// lanes read those of the next 32 blocks while these are added. Entries [row, column > row] of
// `result`, [rows + 1, rows + 1]. Reads each sum once.
[[maybe_unused]] __global__ void __launch_bounds__(kBlockThreads)
    add_blocks_kernel(const __grid_constant__ DistanceSums shape, const double* __restrict__ sums,
                      double* __restrict__ result) {
  constexpr int kLanes = 32, kWarps = kBlockThreads / kLanes;
  const int side = shape.rows + 1, lane = threadIdx.x % kLanes;
  const int64_t cells = shape.cells();
  const int64_t entries = int64_t{side} * side;
  for (int64_t place = blockIdx.x * kWarps + threadIdx.x / kLanes; place < entries;
       place += gridDim.x * kWarps) {  // one place a warp, so its lanes stay together
    const int row = static_cast<int>(place / side), column = static_cast<int>(place % side);
    if (column <= row) continue;
    const double* from = sums + shape.cell(row, column);
    double sum = 0, next = lane < shape.blocks ? from[lane * cells] : 0;
    for (int64_t block = 0; block < shape.blocks; block += kLanes) {
      const double these = next;
      const int64_t ahead = block + kLanes + lane;
      next = ahead < shape.blocks ? from[ahead * cells] : 0;
      if (block + kLanes <= shape.blocks) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) sum += __shfl_sync(kAllLanes, these, k);
      } else {
        const int left = static_cast<int>(shape.blocks - block);
        for (int k = 0; k < left; ++k) sum += __shfl_sync(kAllLanes, these, k);
      }
    }
    if (lane == 0) result[place] = sum;
  }
}

// What a mixing kernel is told of its job besides the matrix; weights and rule are the mixed rows'.
template <DType kDType>
struct MixTask {
  uint32_t numel;  // of a part, as in Task
  int rows, num_mixed;
  int64_t total_weight;
  RuleParams params;
};

// One thread for kTurns coordinates, kBlockThreads apart, so that a warp reads each row coalesced
// at any alignment and a weight that is loaded serves them all. Up to kRows rows are mixed onto
// kWires wires. Traffic (rows + 1) * numel * sizeof(value) bytes; deterministic. Shared memory: of
// 32 mixed rows 32 KiB a block.
template <DType kDType, int kRows, int kWires, int kTurns, typename Ranked>
__global__ void __launch_bounds__(kBlockThreads)
    mix_kernel(const __grid_constant__ Rows<kRows> table,
               const __grid_constant__ MixTable<typename Stored<kDType>::Value, kRows, kWires> by,
               const __grid_constant__ Table<int32_t, kWires> weights,
               Bits<kDType>* __restrict__ out, const __grid_constant__ MixTask<kDType> task) {
  using V = typename Stored<kDType>::Value;
  using B = Bits<kDType>;
  constexpr uint32_t kTogether = kBlockThreads * kTurns;
  for (uint32_t base = blockIdx.x * kTogether; base < task.numel; base += gridDim.x * kTogether) {
    B bits[kTurns][kRows];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      // Behind the end: read, and not stored. All is asked for before any is used; see load_packs.
      const uint32_t i = base + turn * kBlockThreads + threadIdx.x;
      const uint32_t from = i < task.numel ? i : task.numel - 1;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        bits[turn][row] = static_cast<const B*>(table.at[row])[from];
      }
    }
    V values[kTurns][kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const V value = value_of<kDType>(bits[turn][row]) * by.scales[row];
        // 0 also where no mixed row has it: a NaN there is nobody's.
        values[turn][row] = by.used >> row & 1 ? value : V{0};
      }
    }
    const int below = Ranked::template below<kWires>(task.num_mixed);
    const auto finish = [&](Wire<kWide<kDType>>(&keys)[kWires], int turn) {
      const uint32_t i = base + turn * kBlockThreads + threadIdx.x;
      const auto result = Ranked::template apply<kWide<kDType>>(keys, weights, task.num_mixed,
                                                                task.total_weight, task.params);
      if (i < task.numel) out[i] = narrowed<kDType>(result);
    };
    if constexpr (kIsInTurn<kWires>) {  // each thread has cells of its own, so that none waits
      __shared__ Wire<kWide<kDType>> room[kTurns][kWires][kBlockThreads];
      mix_keys_in_turn<kDType>(
          values, by, task.num_mixed, below,
          [&](int turn, int wire, auto key) { room[turn][wire][threadIdx.x] = key; });
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        Wire<kWide<kDType>> keys[kWires];
#pragma unroll
        for (int wire = 0; wire < kWires; ++wire) keys[wire] = room[turn][wire][threadIdx.x];
        finish(keys, turn);
      }
    } else {
      Wire<kWide<kDType>> keys[kTurns][kWires];
      mix_keys<kDType, Ranked::kMindsZeros, kRows, kWires, kTurns>(values, by, task.num_mixed,
                                                                   below, keys);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) finish(keys[turn], turn);
    }
  }
}

// How the mixed rows of a block's columns are sorted: by Batcher's network in shared memory, any
// number of them, or in the registers of one thread or two neighbouring ones, up to 64 or 128.
enum class SortBy { kBatcher, kThread, kTwoLanes };

// Sorts columns of up to 64 or 128 values [num_mixed][columns] in shared memory, in registers. All
// threads of a block, after a barrier; ends with one.
template <SortBy kSort>
__device__ void sort_in_registers(float* values, int num_mixed, int columns) {
  constexpr bool kIsOne = kSort == SortBy::kThread;
  const int column = kIsOne ? threadIdx.x : threadIdx.x / 2, side = kIsOne ? 0 : threadIdx.x & 1;
  const bool is_used = column < columns;
  if (column / (kIsOne ? 32 : 16) * (kIsOne ? 32 : 16) < columns) {  // warp by warp
    float wires[kHalf];
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      const int row = side * kHalf + wire;
      wires[wire] = is_used && row < num_mixed ? values[row * columns + column]
                                               : wire_above<DType::kFloat32>();
    }
    if constexpr (kIsOne) {
      SortNetwork<kHalf>::apply(wires);
    } else {
      sort_and_exchange(wires, side);
      sort_half(wires);
    }
#pragma unroll
    for (int wire = 0; wire < kHalf; ++wire) {
      const int row = side * kHalf + wire;
      if (is_used && row < num_mixed) values[row * columns + column] = wires[wire];
    }
  }
  __syncthreads();
}

// A block for `columns` neighbouring coordinates: values [rows][columns] in shared memory, from
// which keys [num_mixed][columns] are mixed, a thread for kMixedTogether of a column, and ranked;
// then one thread a coordinate applies the rule. Any job; kSort says of how many mixed rows. `by`
// lies in the device's memory. Shared memory (rows * value + num_mixed * (key + weight)) * columns
// bytes.
template <DType kDType, bool kIsWeighted, SortBy kSort>
__global__ void __launch_bounds__(kBlockThreads)
    mix_shared_kernel(const __grid_constant__ Rows<kMaxRows> table,
                      const __grid_constant__ Table<int32_t, kMaxRows> weight_table,
                      const __grid_constant__ MixMany<typename Stored<kDType>::Value> by,
                      Bits<kDType>* __restrict__ out, const __grid_constant__ MixTask<kDType> task,
                      int columns) {
  using V = typename Stored<kDType>::Value;
  constexpr DType kOf = kWide<kDType>;
  using K = std::conditional_t<kSort == SortBy::kBatcher, Key<kOf>, Wire<kOf>>;
  extern __shared__ char shared[];
  const int rows = task.rows, num_mixed = task.num_mixed;
  V* values = reinterpret_cast<V*>(shared);                 // [rows][columns]
  K* keys = reinterpret_cast<K*>(values + rows * columns);  // [num_mixed][columns]
  int32_t* weights = reinterpret_cast<int32_t*>(keys + num_mixed * columns);
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * columns; base < task.numel;
       base += static_cast<int64_t>(gridDim.x) * columns) {
#pragma unroll 8
    for (int cell = threadIdx.x; cell < rows * columns; cell += blockDim.x) {
      const int row = cell / columns;  // neighbouring threads read neighbouring coordinates
      const int64_t i = base + cell % columns;
      const auto* from = static_cast<const Bits<kDType>*>(table.at[row]);
      const V value = value_of<kDType>(from[i < task.numel ? i : task.numel - 1]);
      values[cell] = value * by.scales[row];
    }
    __syncthreads();
    const int num_groups = (num_mixed + kMixedTogether - 1) / kMixedTogether;
    for (int cell = threadIdx.x; cell < num_groups * columns; cell += blockDim.x) {
      const int first = cell / columns * kMixedTogether, column = cell % columns;
      V mixed[kMixedTogether];
      mix_many(by, first, [&](int k) { return values[k * columns + column]; }, mixed);
#pragma unroll
      for (int o = 0; o < kMixedTogether; ++o) {
        if (first + o >= num_mixed) break;
        const int place = (first + o) * columns + column;
        if constexpr (kSort == SortBy::kBatcher) {
          keys[place] = key_of<kOf>(bit_cast<Bits<kOf>>(mixed[o]));
        } else {
          keys[place] = mixed[o];
        }
        if (kIsWeighted) weights[place] = weight_table.at[first + o];
      }
    }
    __syncthreads();
    if constexpr (kSort == SortBy::kBatcher) {
      sort_columns<kIsWeighted>(keys, weights, num_mixed, columns);
    } else {
      sort_in_registers<kSort>(keys, num_mixed, columns);
    }
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
