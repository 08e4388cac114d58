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

// What is asked of one block of threads. kOneGroup: of up to kSide rows, which are one group.
template <DType kDType, int kSide, bool kOneGroup>
struct Distances {
  using V = typename Stored<kDType>::Value;
  using B = Bits<kDType>;
  static constexpr int kPairs = kSide * kSide;
  static constexpr int kCells = kPairs * kSumLanes / kSlotThreads;  // (pair, lane) a thread
  static_assert(kCells * kSlotThreads == kPairs * kSumLanes, "every thread adds as many");
  // Steps of a tile whose values are read before the first is used. Bound from the registers.
  static constexpr int kTogether = !kOneGroup ? 1 : 16 / kSide;
  static_assert(kSumTile % (kTogether * kSumLanes) == 0, "a tile has whole groups of steps");
  // The padding lets the 32 lanes of a warp, which read two pairs, use 32 banks.
  union Shared {
    V squares[kPairs][kSlotThreads + kSumLanes];
    double lanes[kPairs][kSumLanes + 1];
  };
  struct Lanes {
    double at[kCells];  // this thread's (pair, lane), in double
  };

  const void* const* rows;  // behind the last one any row's address, for the group's rest
  int num_rows;
  GroupPair groups;    // each from row `side * group` on
  int64_t begin, end;  // coordinates, of one block

  LOFT_HOST_DEVICE int rounds() const {
    constexpr int64_t kRound = int64_t{kSlots} * kSumTile;
    return static_cast<int>((end - begin + kRound - 1) / kRound);
  }

  // Rows behind the last one, and coordinates behind the end, are 0; kIsWhole: there are none. What
  // is read does not depend on that, so that many reads are under way at a time.
  template <bool kIsWhole>
  LOFT_INLINE V value(int row, int64_t i) const {
    const B* from = static_cast<const B*>(rows[row]);
    if constexpr (kIsWhole) {
      return value_of<kDType>(from[i]);
    } else {
      const V value = value_of<kDType>(from[i < end ? i : end - 1]);
      return row < num_rows && i < end ? value : V{0};
    }
  }

  // Step 1 of a round: one lane's squares of one tile, for all pairs.
  LOFT_HOST_DEVICE void measure(int thread, int round, Shared& shared) const {
    const int64_t tile = begin + int64_t{round} * kSlots * kSumTile;
    const bool is_whole =
        tile + kSlots * kSumTile <= end && (groups.b + 1) * kSide <= num_rows;  // for all threads
    if (kOneGroup || groups.a == groups.b) {
      is_whole ? measure_pairs<true, true>(thread, tile, shared)
               : measure_pairs<true, false>(thread, tile, shared);
    } else if constexpr (!kOneGroup) {
      is_whole ? measure_pairs<false, true>(thread, tile, shared)
               : measure_pairs<false, false>(thread, tile, shared);
    }
  }
  template <bool kIsSame, bool kIsWhole>
  LOFT_INLINE void measure_pairs(int thread, int64_t tile, Shared& shared) const {
    const int64_t first = tile + thread / kSumLanes * kSumTile + thread % kSumLanes;
    const int a = kOneGroup ? 0 : groups.a * kSide, b = kOneGroup ? 0 : groups.b * kSide;
    V sums[kSide][kSide] = {};
    for (int step = 0; step < kSumTile; step += kTogether * kSumLanes) {
      V left[kTogether][kSide], right[kTogether][kSide];
      LOFT_UNROLL
      for (int at = 0; at < kTogether; ++at) {
        const int64_t i = first + step + at * kSumLanes;
        LOFT_UNROLL
        for (int p = 0; p < kSide; ++p) left[at][p] = value<kIsWhole>(a + p, i);
        LOFT_UNROLL
        for (int q = 0; q < kSide; ++q) {
          right[at][q] = kIsSame ? left[at][q] : value<kIsWhole>(b + q, i);
        }
      }
      LOFT_UNROLL
      for (int at = 0; at < kTogether; ++at) {
        LOFT_UNROLL
        for (int p = 0; p < kSide; ++p) {
          LOFT_UNROLL
          for (int q = kIsSame ? p : 0; q < kSide; ++q) {
            const bool is_length = kIsSame && p == q;
            const V away = is_length ? left[at][p] : right[at][q] - left[at][p];
            sums[p][q] += away * away;
          }
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

// How up to kRows rows are mixed onto kWires wires, as kernel parameters, by wire: so a weight is
// at a place that is known when it is compiled, and an operand.
template <typename V, int kRows, int kWires>
struct MixTable {
  V scales[kRows];
  uint32_t named[kWires];  // bit k: row k is in the sum
  V common[kWires];        // by this a sum is multiplied; 0: each row has a weight of its own
  V by[kWires][kRows];     // 1 where the weight is common
  uint32_t used;           // bit k: some mixed row has row k in its sum
  bool is_quick;           // all have a common weight
};

// On the host, from what mixing_of gives, the first mixed row on wire `below`.
template <typename V, int kRows, int kWires>
MixTable<V, kRows, kWires> mix_table_of(const Mixing& mixing, int below) {
  MixTable<V, kRows, kWires> table{};
  for (size_t row = 0; row < mixing.scales.size(); ++row) {
    table.scales[row] = static_cast<V>(mixing.scales[row]);
  }
  table.is_quick = true;
  for (size_t mixed = 0; mixed < mixing.common.size(); ++mixed) {
    const size_t wire = mixed + below;
    const double common = mixing.common[mixed];
    table.common[wire] = static_cast<V>(common);
    table.is_quick = table.is_quick && common != 0;
    for (int at = mixing.starts[mixed]; at < mixing.starts[mixed + 1]; ++at) {
      table.named[wire] |= uint32_t{1} << mixing.from[at];
      table.used |= uint32_t{1} << mixing.from[at];
      table.by[wire][mixing.from[at]] = static_cast<V>(common != 0 ? 1 : mixing.by[at]);
    }
  }
  return table;
}

// What a sum starts with: -0 + x is x, also where x is -0. Of no rows it is +0: the sign decides
// which of two zeros a weighted rule drops.
template <typename V>
constexpr V kNothing = -V{0};

// sum + value * by, of which `by` is 1 or 0: the product is exact, so that one rounding, as a fused
// operation has it, gives the bits of two.
template <typename V>
LOFT_INLINE V add_product(V sum, V value, V by) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(V) == 4) {
    return __fmaf_rn(value, by, sum);
  } else {
    return __fma_rn(value, by, sum);
  }
#else
  return sum + value * by;
#endif
}

// Adds values at kTurns coordinates if a row is in the sum, which all threads find alike. Of many
// rows a branch would take longer than the additions: on a device one predicate serves those of two
// coordinates.
template <bool kIsMany, typename V, int kTurns, int kRows>
LOFT_INLINE void add_named(V (&sums)[kTurns], const V (&values)[kTurns][kRows], int k,
                           uint32_t named) {
#if defined(__CUDA_ARCH__)
  if constexpr (kIsMany) {
    static_assert(kTurns == 2 && sizeof(V) == 4, "of float64 there are no kernels of many rows");
    asm("{\n"
        ".reg .pred p;\n"
        ".reg .b32 bit;\n"
        "and.b32 bit, %2, %3;\n"
        "setp.ne.u32 p, bit, 0;\n"
        "@p add.rn.f32 %0, %0, %4;\n"
        "@p add.rn.f32 %1, %1, %5;\n"
        "}"
        : "+f"(sums[0]), "+f"(sums[1])
        : "r"(named), "r"(uint32_t{1} << k), "f"(values[0][k]), "f"(values[1][k]));
    return;
  }
#endif
  if (!(named >> k & 1)) return;
  LOFT_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) sums[turn] += values[turn][k];
}

// A mixed row at kTurns coordinates, from scaled values.
template <typename V, int kRows, int kWires, int kTurns>
LOFT_INLINE void mix_row(const V (&values)[kTurns][kRows], const MixTable<V, kRows, kWires>& table,
                         int wire, V (&sums)[kTurns]) {
  const uint32_t named = table.named[wire];
  const V common = table.common[wire];
  LOFT_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) sums[turn] = named ? kNothing<V> : V{0};
  if (common != 0) {
    LOFT_UNROLL
    for (int k = 0; k < kRows; ++k) add_named<(kRows > 16)>(sums, values, k, named);
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) sums[turn] *= common;
    return;
  }
  LOFT_UNROLL
  for (int k = 0; k < kRows; ++k) {
    if (!(named >> k & 1)) continue;
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) sums[turn] += values[turn][k] * table.by[wire][k];
  }
}

// The same of finite values with a common weight, but for the sign of a zero: a fused sum takes one
// instruction, a question and a sum take three.
template <typename V, int kRows, int kWires, int kTurns>
LOFT_INLINE void mix_row_quickly(const V (&values)[kTurns][kRows],
                                 const MixTable<V, kRows, kWires>& table, int wire,
                                 V (&sums)[kTurns]) {
  LOFT_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) sums[turn] = 0;
  LOFT_UNROLL
  for (int k = 0; k < kRows; ++k) {
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      sums[turn] = add_product(sums[turn], values[turn][k], table.by[wire][k]);
    }
  }
  LOFT_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) sums[turn] *= table.common[wire];
}

// The arithmetic type's own format: mixed rows are neither widened nor narrowed.
template <DType kDType>
constexpr DType kWide = kDType == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;

// Mixed rows on kWires wires, from wire `below` on. kMindsZeros: what comes tells -0 from +0.
template <DType kDType, bool kMindsZeros, int kRows, int kWires, int kTurns>
LOFT_INLINE void mix_keys(const typename Stored<kDType>::Value (&values)[kTurns][kRows],
                          const MixTable<typename Stored<kDType>::Value, kRows, kWires>& table,
                          int num_mixed, int below, Wire<kWide<kDType>> (&keys)[kTurns][kWires]) {
  constexpr DType kOf = kWide<kDType>;
  using V = typename Stored<kDType>::Value;
  const auto on_wires = [&](const auto& mix) {
    LOFT_UNROLL
    for (int wire = 0; wire < kWires; ++wire) {
      const bool is_row = wire >= below && wire < below + num_mixed;
      V mixed[kTurns];
      if (is_row) mix(wire, mixed);
      LOFT_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        keys[turn][wire] = is_row         ? wire_of<kOf>(bit_cast<Bits<kOf>>(mixed[turn]))
                           : wire < below ? wire_below<kOf>()
                                          : wire_above<kOf>();
      }
    }
  };
  if constexpr (!kMindsZeros && kRows <= 16) {  // of more, one wire: not worth its code
    V none = 0;  // the sum of values times 0: NaN where one is not finite
    LOFT_UNROLL
    for (int k = 0; k < kRows; ++k) {
      LOFT_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) none = add_product(none, values[turn][k], V{0});
    }
    if (table.is_quick && none == 0) {
      return on_wires(
          [&](int wire, V(&mixed)[kTurns]) { mix_row_quickly(values, table, wire, mixed); });
    }
  }
  on_wires([&](int wire, V(&mixed)[kTurns]) { mix_row(values, table, wire, mixed); });
}

// Whether mixed rows are made one after the other, by a loop. Unrolled, 32 rows take 11,000
// instructions, and keys take the registers of threads that could run meanwhile: 4.8 passes of an
// H200, and 2.8 so.
template <int kWires>
constexpr bool kIsInTurn = kWires > 16;

// The same as mix_keys, in a loop over the mixed rows, each key to put(turn, wire, key).
template <DType kDType, int kRows, int kWires, int kTurns, typename Put>
LOFT_INLINE void mix_keys_in_turn(
    const typename Stored<kDType>::Value (&values)[kTurns][kRows],
    const MixTable<typename Stored<kDType>::Value, kRows, kWires>& table, int num_mixed, int below,
    const Put& put) {
  constexpr DType kOf = kWide<kDType>;
  const auto fill = [&](int from, int to, Wire<kOf> key) {
    LOFT_NO_UNROLL
    for (int wire = from; wire < to; ++wire) {
      LOFT_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) put(turn, wire, key);
    }
  };
  fill(0, below, wire_below<kOf>());
  LOFT_NO_UNROLL
  for (int wire = below; wire < below + num_mixed; ++wire) {
    typename Stored<kDType>::Value mixed[kTurns];
    mix_row(values, table, wire, mixed);
    LOFT_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      put(turn, wire, wire_of<kOf>(bit_cast<Bits<kOf>>(mixed[turn])));
    }
  }
  fill(below + num_mixed, kWires, wire_above<kOf>());
}

// What a rule makes of keys on its wires, and where mixed rows begin there.
template <Rule kRule, bool kIsOdd>
struct RankedRule {
  static constexpr bool kMindsZeros = false;
  template <int kWires>
  static LOFT_INLINE int below(int rows) {
    return padding_below<kWires>(rows);
  }
  template <DType kOf, int kWires, typename Weights>
  static LOFT_INLINE Bits<kOf> apply(Wire<kOf> (&keys)[kWires], const Weights&, int rows, int64_t,
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
  static constexpr bool kMindsZeros = kIsWeighted;  // ties are dropped by weight
  template <int kWires>
  static LOFT_INLINE int below(int) {
    return 0;
  }
  template <DType kOf, int kWires, typename Weights>
  static LOFT_INLINE Bits<kOf> apply(Wire<kOf> (&keys)[kWires], const Weights& weights, int rows,
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

// How more rows are mixed: a table in the device's memory, in this order.
template <typename V>
struct MixMany {
  const V* by;            // [num_mixed, rows]
  const V* scales;        // [rows]
  const V* common;        // [num_mixed]; as in MixTable
  const uint32_t* named;  // [num_mixed, words]: bit k of word w: row 32 w + k is in the sum
  int rows, num_mixed, words;
};

// Where its parts are in memory that begins at `room`, of mix_cells.
template <typename V>
MixMany<V> mix_many_at(const void* room, int rows, int num_mixed) {
  const V* by = static_cast<const V*>(room);
  const V* scales = by + int64_t{num_mixed} * rows;
  const V* common = scales + rows;
  const auto* named = reinterpret_cast<const uint32_t*>(common + num_mixed);
  return {by, scales, common, named, rows, num_mixed, (rows + 31) / 32};
}

// The bytes that are to lie there, from what mixing_of gives.
template <typename V>
std::vector<char> mix_many_of(const Mixing& mixing) {
  const size_t rows = mixing.scales.size(), num_mixed = mixing.common.size();
  const size_t words = (rows + 31) / 32;
  std::vector<V> numbers(num_mixed * rows);  // by, scales, common
  numbers.insert(numbers.end(), mixing.scales.begin(), mixing.scales.end());
  numbers.insert(numbers.end(), mixing.common.begin(), mixing.common.end());
  std::vector<uint32_t> named(num_mixed * words);
  for (size_t mixed = 0; mixed < num_mixed; ++mixed) {
    for (int at = mixing.starts[mixed]; at < mixing.starts[mixed + 1]; ++at) {
      const size_t k = static_cast<size_t>(mixing.from[at]);
      numbers[mixed * rows + k] = static_cast<V>(mixing.by[at]);
      named[mixed * words + k / 32] |= uint32_t{1} << k % 32;
    }
  }
  const size_t num_bytes = numbers.size() * sizeof(V);
  std::vector<char> bytes(num_bytes + named.size() * sizeof(uint32_t));
  std::memcpy(bytes.data(), numbers.data(), num_bytes);
  std::memcpy(bytes.data() + num_bytes, named.data(), named.size() * sizeof(uint32_t));
  return bytes;
}

// Mixed rows that one thread adds up at a time.
constexpr int kMixedTogether = 8;

// One coordinate of mixed rows first .. first + kMixedTogether - 1, or up to the last one: each
// value, `value(k)` of row k, already scaled, is read once for all of them.
template <typename V, typename ValueAt>
LOFT_INLINE void mix_many(const MixMany<V>& table, int first, const ValueAt& value,
                          V (&mixed)[kMixedTogether]) {
  V common[kMixedTogether];
  bool has_own = false;  // a mixed row whose weights differ
  LOFT_UNROLL
  for (int o = 0; o < kMixedTogether; ++o) {
    mixed[o] = kNothing<V>;
    common[o] = first + o < table.num_mixed ? table.common[first + o] : V{1};
    has_own = has_own || common[o] == 0;
  }
  for (int word = 0; word < table.words; ++word) {
    uint32_t named[kMixedTogether];
    LOFT_UNROLL
    for (int o = 0; o < kMixedTogether; ++o) {
      named[o] =
          first + o < table.num_mixed ? table.named[int64_t{first + o} * table.words + word] : 0;
    }
    const int begin = 32 * word, count = table.rows - begin < 32 ? table.rows - begin : 32;
    const auto add = [&](int k) {
      const V one = value(begin + k);
      LOFT_UNROLL
      for (int o = 0; o < kMixedTogether; ++o) {
        if (!(named[o] >> k & 1)) continue;
        mixed[o] +=
            common[o] != 0 ? one : one * table.by[int64_t{first + o} * table.rows + begin + k];
      }
    };
    if (has_own || count < 32) {
      for (int k = 0; k < count; ++k) add(k);
    } else {  // the usual case, with constants for bits
      LOFT_UNROLL
      for (int k = 0; k < 32; ++k) {
        const V one = value(begin + k);
        LOFT_UNROLL
        for (int o = 0; o < kMixedTogether; ++o) {
          if (named[o] >> k & 1) mixed[o] += one;
        }
      }
    }
  }
  LOFT_UNROLL
  for (int o = 0; o < kMixedTogether; ++o) {
    if (common[o] != 0) {
      mixed[o] *= common[o];
    } else {  // a mixed row, as common is 1 behind the last one
      bool has_any = false;
      for (int word = 0; word < table.words; ++word) {
        has_any = has_any || table.named[int64_t{first + o} * table.words + word];
      }
      if (!has_any) mixed[o] = V{0};
    }
  }
}

}  // namespace loft::device
