// Layer 1. What CUDA threads do for rules that see rows, as host and device code as in
// coordinate.h: squared distances of rows, and rows mixed by weights. Sums run in the order of
// cpu/distances.cpp and cpu/mix.cpp; loft_hvd/aggregation/distances.py is the definition.
#pragma once

#include "aggregate.h"
#include "cuda/coordinate.h"

namespace loft::device {

// --- distances: one block of threads for one block of coordinates and two groups of kSide rows
//
// Thread (slot, lane) adds the squares of lane `lane` of tile `slot` for every pair of rows, so
// each value that it loads serves kSide pairs. What it finds goes to shared memory, where each
// thread then adds up some (pair, lane) in double, tile after tile. Of 2 x 2 pairs, 2 slots and 3
// lanes:
//   squares    pair 0: s0l0 s0l1 s0l2  s1l0 s1l1 s1l2    pair 1: ...
//   thread 0 adds s0l0 of pair 0 to its lane, then s1l0, which is the next tile
// A block's tiles are taken kSlots at a time; between the steps all threads wait for each other.

// Most tiles that one block of threads takes at a time, and its threads.
constexpr int kSlots = 8, kSlotThreads = kSlots * kSumLanes;

// Pairs of groups, of all rows in groups of `side`: (0, 0), (0, 1) ... (1, 1) ...
struct GroupPair {
  int a, b;  // a <= b
};
LOFT_HOST_DEVICE constexpr int groups_of(int rows, int side) { return (rows + side - 1) / side; }
LOFT_HOST_DEVICE constexpr int64_t num_group_pairs(int groups) {
  return int64_t{groups} * (groups + 1) / 2;
}
LOFT_HOST_DEVICE constexpr int64_t place_of(GroupPair pair, int groups) {
  return int64_t{pair.a} * groups - int64_t{pair.a} * (pair.a - 1) / 2 + (pair.b - pair.a);
}
LOFT_HOST_DEVICE constexpr GroupPair group_pair_at(int64_t place, int groups) {
  int a = 0;
  for (; place >= groups - a; ++a) place -= groups - a;
  return {a, a + static_cast<int>(place)};
}

// Rows of a group. Bound from the registers and the shared memory: 8 x 8 sums of float32, 36 KiB.
template <DType kDType>
constexpr int kMostSide = kDType == DType::kFloat64 ? 4 : 8;

// What is asked of one block of threads.
template <DType kDType, int kSide>
struct Distances {
  using V = typename Stored<kDType>::Value;
  using B = Bits<kDType>;
  static constexpr int kPairs = kSide * kSide;
  static constexpr int kCells = kPairs * kSumLanes / kSlotThreads;  // (pair, lane) a thread
  static_assert(kCells * kSlotThreads == kPairs * kSumLanes, "every thread adds as many");
  // The padding lets the 32 lanes of a warp, which read two pairs, use 32 banks.
  union Shared {
    V squares[kPairs][kSlotThreads + kSumLanes];
    double lanes[kPairs][kSumLanes + 1];
  };
  struct Lanes {
    double at[kCells];  // this thread's (pair, lane), in double
  };

  const void* const* rows;
  int num_rows;
  GroupPair groups;    // each from row `side * group` on
  int64_t begin, end;  // coordinates, of one block

  LOFT_HOST_DEVICE int rounds() const {
    constexpr int64_t kRound = int64_t{kSlots} * kSumTile;
    return static_cast<int>((end - begin + kRound - 1) / kRound);
  }

  // Rows behind the last one, and coordinates behind the end, are 0.
  LOFT_INLINE V value(int row, int64_t i) const {
    return row < num_rows && i < end ? value_of<kDType>(static_cast<const B*>(rows[row])[i]) : V{0};
  }

  // Step 1 of a round: one lane's squares of one tile, for all pairs.
  LOFT_HOST_DEVICE void measure(int thread, int round, Shared& shared) const {
    groups.a == groups.b ? measure_pairs<true>(thread, round, shared)
                         : measure_pairs<false>(thread, round, shared);
  }
  template <bool kIsSame>
  LOFT_INLINE void measure_pairs(int thread, int round, Shared& shared) const {
    const int64_t tile = begin + (int64_t{round} * kSlots + thread / kSumLanes) * kSumTile;
    const int64_t first = tile + thread % kSumLanes;
    V sums[kSide][kSide] = {};
    for (int step = 0; step < kSumTile; step += kSumLanes) {
      V left[kSide], right[kSide];
      LOFT_UNROLL
      for (int p = 0; p < kSide; ++p) left[p] = value(groups.a * kSide + p, first + step);
      LOFT_UNROLL
      for (int q = 0; q < kSide; ++q) {
        right[q] = kIsSame ? left[q] : value(groups.b * kSide + q, first + step);
      }
      LOFT_UNROLL
      for (int p = 0; p < kSide; ++p) {
        LOFT_UNROLL
        for (int q = kIsSame ? p : 0; q < kSide; ++q) {
          const V away = kIsSame && p == q ? left[p] : right[q] - left[p];  // p == q: the length
          sums[p][q] += away * away;
        }
      }
    }
    LOFT_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {  // below the diagonal of one group: zeros
      shared.squares[pair][thread] = sums[pair / kSide][pair % kSide];
    }
  }

  // Step 2: the tiles of a round, in order.
  LOFT_HOST_DEVICE void add(int thread, const Shared& shared, Lanes& mine) const {
    LOFT_UNROLL
    for (int cell = 0; cell < kCells; ++cell) {
      const int place = thread + cell * kSlotThreads;
      LOFT_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        mine.at[cell] += static_cast<double>(
            shared.squares[place / kSumLanes][slot * kSumLanes + place % kSumLanes]);
      }
    }
  }

  // When all rounds are over: lanes beside each other, and then one thread a pair adds them.
  LOFT_HOST_DEVICE void gather(int thread, const Lanes& mine, Shared& shared) const {
    LOFT_UNROLL
    for (int cell = 0; cell < kCells; ++cell) {
      const int place = thread + cell * kSlotThreads;
      shared.lanes[place / kSumLanes][place % kSumLanes] = mine.at[cell];
    }
  }
  LOFT_HOST_DEVICE void finish(int thread, const Shared& shared, double* sums) const {
    if (thread >= kPairs) return;
    double sum = 0;
    for (int lane = 0; lane < kSumLanes; ++lane) sum += shared.lanes[thread][lane];
    sums[thread] = sum;
  }
};

// The sums of all blocks, [blocks][pairs of groups][side * side], and where a pair's are.
struct DistanceSums {
  int rows, side;
  int64_t blocks;

  LOFT_HOST_DEVICE int64_t group_pairs() const { return num_group_pairs(groups_of(rows, side)); }
  LOFT_HOST_DEVICE int64_t cells() const { return group_pairs() * side * side; }  // a block
  // Of row a and row b > a, or its length where b is the number of rows.
  LOFT_HOST_DEVICE int64_t cell(int a, int b) const {
    const int other = b == rows ? a : b;
    const int64_t group = place_of({a / side, other / side}, groups_of(rows, side));
    return (group * side + a % side) * side + other % side;
  }
};

// --- mixing

// How rows of up to kRows are mixed into as many, as kernel parameters.
template <typename V, int kRows>
struct MixTable {
  V scales[kRows];
  uint32_t named[kRows];  // bit k: mixed row i has row k in its sum
  V common[kRows];        // by this its sum is multiplied; 0: each row has a weight of its own
  V by[kRows][kRows];
};

// On the host, from what mixing_of gives.
template <typename V, int kRows>
MixTable<V, kRows> mix_table_of(const Mixing& mixing) {
  MixTable<V, kRows> table{};
  for (size_t row = 0; row < mixing.scales.size(); ++row) {
    table.scales[row] = static_cast<V>(mixing.scales[row]);
  }
  for (size_t mixed = 0; mixed + 1 < mixing.starts.size(); ++mixed) {
    table.common[mixed] = static_cast<V>(mixing.common[mixed]);
    for (int at = mixing.starts[mixed]; at < mixing.starts[mixed + 1]; ++at) {
      table.named[mixed] |= uint32_t{1} << mixing.from[at];
      table.by[mixed][mixing.from[at]] = static_cast<V>(mixing.by[at]);
    }
  }
  return table;
}

// What a sum starts with: -0 + x is x, also where x is -0. Of no rows it is +0: the sign decides
// which of two zeros a weighted rule drops.
template <typename V>
constexpr V kNothing = -V{0};

// A mixed row at kTurns coordinates, from scaled values.
template <typename V, int kRows, int kTurns>
LOFT_INLINE void mix_row(const V (&values)[kTurns][kRows], const MixTable<V, kRows>& table, int row,
                         V (&sums)[kTurns]) {
  const uint32_t named = table.named[row];
  const V common = table.common[row];
  LOFT_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) sums[turn] = named ? kNothing<V> : V{0};
  if (common != 0) {
    LOFT_UNROLL
    for (int k = 0; k < kRows; ++k) {
      if (!(named >> k & 1)) continue;  // alike for all threads
      LOFT_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) sums[turn] += values[turn][k];
    }
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) sums[turn] *= common;
    return;
  }
  LOFT_UNROLL
  for (int k = 0; k < kRows; ++k) {
    if (!(named >> k & 1)) continue;
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) sums[turn] += values[turn][k] * table.by[row][k];
  }
}

// The arithmetic type's own format: mixed rows are neither widened nor narrowed.
template <DType kDType>
constexpr DType kWide = kDType == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;

// Mixed rows as keys on kWires wires, from wire `below` on.
template <DType kDType, int kRows, int kWires, int kTurns>
LOFT_INLINE void mix_keys(const typename Stored<kDType>::Value (&values)[kTurns][kRows],
                          const MixTable<typename Stored<kDType>::Value, kRows>& table,
                          int num_mixed, int below, Key<kWide<kDType>> (&keys)[kTurns][kWires]) {
  constexpr DType kOf = kWide<kDType>;
  using V = typename Stored<kDType>::Value;
  LOFT_UNROLL
  for (int wire = 0; wire < kWires; ++wire) {
    const int row = wire - below;
    const bool is_row = row >= 0 && row < num_mixed;
    V mixed[kTurns];
    if (is_row) mix_row(values, table, row, mixed);
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      keys[turn][wire] = is_row    ? key_of<kOf>(bit_cast<Bits<kOf>>(mixed[turn]))
                         : row < 0 ? kFirst<kOf>
                                   : kLast<kOf>;
    }
  }
}

// What a rule makes of keys on its wires, and where mixed rows begin there.
template <Rule kRule, bool kIsOdd>
struct RankedRule {
  template <int kWires>
  static LOFT_INLINE int below(int rows) {
    return padding_below<kWires>(rows);
  }
  template <DType kOf, int kWires, typename Weights>
  static LOFT_INLINE Bits<kOf> apply(Key<kOf> (&keys)[kWires], const Weights&, int rows, int64_t,
                                     const RuleParams& params) {
    if constexpr (kRule == Rule::kMedian) {
      return median_of<kOf, kWires, kIsOdd>(keys, params.kind).result;
    } else {
      return trimmed_mean_of<kOf, kWires, kIsOdd>(keys, rows, params.f).result;
    }
  }
};
template <bool kIsWeighted>
struct AnyRule {
  template <int kWires>
  static LOFT_INLINE int below(int) {
    return 0;
  }
  template <DType kOf, int kWires, typename Weights>
  static LOFT_INLINE Bits<kOf> apply(Key<kOf> (&keys)[kWires], const Weights& weights, int rows,
                                     int64_t total_weight, const RuleParams& params) {
    int32_t counts[kWires];
    LOFT_UNROLL
    for (int row = 0; row < kWires; ++row) counts[row] = kIsWeighted ? weights.at[row] : 0;
    return any_rule_of<kOf, kWires, kIsWeighted>(keys, counts, rows, total_weight, params).result;
  }
};

// A result of the arithmetic type as it is stored.
template <DType kDType>
LOFT_INLINE Bits<kDType> narrowed(Bits<kWide<kDType>> result) {
  return result_bits<kDType>(bit_cast<typename Stored<kDType>::Value>(result));
}

// Row k's weight in a mixed row as the arithmetic has it, 0 where its scale is 0; `matrix` has the
// scales, [rows], and then the weights, [num_mixed, rows].
template <typename V>
LOFT_HOST_DEVICE V weight_in(const double* matrix, int rows, int mixed, int k) {
  const V by = static_cast<V>(matrix[(int64_t{mixed} + 1) * rows + k]);
  return static_cast<V>(matrix[k]) == 0 ? V{0} : by;
}

// One value of a mixed row of any number of rows: `value(k)`, already scaled, and `weight(k)` of
// row k; a weight of 0 leaves the row out. Whether the weights are all the same shows at the end
// only, so both sums are kept.
template <typename V, typename ValueAt, typename WeightAt>
LOFT_HOST_DEVICE V mixed_value(int rows, const ValueAt& value, const WeightAt& weight) {
  V plain = kNothing<V>, products = kNothing<V>, first = 0;
  bool is_common = true;
  for (int k = 0; k < rows; ++k) {
    const V by = weight(k);
    if (by == 0) continue;
    if (first == 0) first = by;
    is_common = is_common && by == first;
    plain += value(k);
    products += value(k) * by;
  }
  if (first == 0) return V{0};  // no row
  return is_common ? plain * first : products;
}

}  // namespace loft::device
