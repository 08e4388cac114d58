// Layer 2. Squared distances between rows, on the vectors of one instruction set.
//
// Lane l of kSumLanes adds the squares of coordinates l, l + 16, ... of a tile in the type of the
// arithmetic; the lanes of a block's tiles are added in double, and then the lanes in their order
// (loft_hvd/aggregation/distances.py is the definition). No vector is wider than the lanes, so
// every level gives the same bits.
//
// Up to kSide x kSide pairs are summed in registers at a time: each value that is loaded serves
// kSide pairs. Arithmetic of a pair: subtract, multiply, add.

#include "cpu/tiles.h"

namespace loft::LOFT_ISA {
namespace {

// Bound from the registers: 4 x 4 sums and 8 rows of 32, 2 x 2 and 4 of 16.
constexpr int kSide = kRegisters == 32 ? 4 : 2;

// The lanes of every pair of one call, in double.
using Lanes = double[kSumLanes];

template <typename T>
using Tile = T[kSumTile];

// a - b. Of the two subtractions and additions of a pair, units that multiply take a part: they
// subtract exactly, as a * 1 is exact, and on some machines have less to do.
template <typename V>
LOFT_INLINE V difference(V a, V b, [[maybe_unused]] bool by_product) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Lane<V>) == 4) {
    if (by_product) return bit_cast<V>(_mm512_fmsub_ps(a, V{} + 1.0f, b));
  }
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(Lane<V>) == 4) {
    if (by_product) return bit_cast<V>(_mm256_fmsub_ps(a, V{} + 1.0f, b));
  }
#endif
  return a - b;
}

// Adds a register's lanes, from `first` on, to those of a pair.
template <typename V>
LOFT_INLINE void add_lanes(double* lanes, V sum) {
  using Wide = Vector<double, sizeof(V) / sizeof(Lane<V>) * 8>;  // as many lanes
  store(lanes, load<Wide>(lanes) + __builtin_convertvector(sum, Wide));
}

// One tile of kA rows against kB others; kIsSame: of kA rows among each other, and their squares.
template <typename T, int kA, int kB, bool kIsSame>
LOFT_INLINE void add_pairs(const Tile<T>* a, const Tile<T>* b, Lanes* lanes) {
  using V = Vector<T>;
  constexpr int kWide = kVectorBytes / sizeof(T);
  for (int lane = 0; lane < kSumLanes; lane += kWide) {  // independent sums of each register
    V sums[kA][kB] = {};
    for (int i = lane; i < kSumTile; i += kSumLanes) {
      V left[kA], right[kB];
#pragma GCC unroll 4
      for (int p = 0; p < kA; ++p) left[p] = load<V>(a[p] + i);
#pragma GCC unroll 4
      for (int q = 0; q < kB; ++q) right[q] = kIsSame ? left[q] : load<V>(b[q] + i);
#pragma GCC unroll 4
      for (int p = 0; p < kA; ++p) {
#pragma GCC unroll 4
        for (int q = kIsSame ? p : 0; q < kB; ++q) {
          const V away = kIsSame && p == q ? left[p] : difference(right[q], left[p], q % 2);
          sums[p][q] += away * away;
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kA; ++p) {
#pragma GCC unroll 4
      for (int q = kIsSame ? p : 0; q < kB; ++q) {
        add_lanes(lanes[p * kGroupRows + q] + lane, sums[p][q]);
      }
    }
  }
}

template <typename T>
using AddPairs = void (*)(const Tile<T>*, const Tile<T>*, Lanes*);

// The function for so many rows of each side.
template <typename T>
AddPairs<T> add_pairs_for(int num_a, int num_b, bool is_same) {
  constexpr auto same =
      table_of<kSide>([](auto a) -> AddPairs<T> { return add_pairs<T, a + 1, a + 1, true>; });
  constexpr auto apart = table_of<kSide * kSide>(
      [](auto at) -> AddPairs<T> { return add_pairs<T, at / kSide + 1, at % kSide + 1, false>; });
  return is_same ? same[num_a - 1] : apart[(num_a - 1) * kSide + num_b - 1];
}

template <DType kDType>
void distances_of(const RowRanges& what, double* found) {
  using T = Value<kDType>;
  alignas(64) Tile<T> tiles[2 * kGroupRows];
  alignas(64) Lanes lanes[kGroupRows * kGroupRows] = {};
  const int num_a = what.a_end - what.a, num_b = what.b_end - what.b;
  const Tile<T>* b_tiles = what.is_same() ? tiles : tiles + num_a;
  for (int64_t at = what.begin; at < what.end; at += kSumTile) {
    const int count = static_cast<int>(what.end - at < kSumTile ? what.end - at : kSumTile);
    for (int row = 0; row < num_a; ++row) {
      load_tile<kDType>(what.rows[what.a + row], at, count, tiles[row]);
    }
    for (int row = 0; row < (what.is_same() ? 0 : num_b); ++row) {
      load_tile<kDType>(what.rows[what.b + row], at, count, tiles[num_a + row]);
    }
    for (int a = 0; a < num_a; a += kSide) {
      const int rows_a = num_a - a < kSide ? num_a - a : kSide;
      for (int b = what.is_same() ? a : 0; b < num_b; b += kSide) {
        const int rows_b = num_b - b < kSide ? num_b - b : kSide;
        const bool is_same = what.is_same() && a == b;
        add_pairs_for<T>(rows_a, rows_b, is_same)(tiles + a, b_tiles + b,
                                                  lanes + RowRanges::place(a, b));
      }
    }
  }
  for (int pair = 0; pair < kGroupRows * kGroupRows; ++pair) {
    found[pair] = 0;
    for (double lane : lanes[pair]) found[pair] += lane;
  }
}

}  // namespace

void distances(DType dtype, const RowRanges& what, double* found) {
  switch (dtype) {
    case DType::kFloat64: return distances_of<DType::kFloat64>(what, found);
    case DType::kFloat32: return distances_of<DType::kFloat32>(what, found);
    case DType::kFloat16: return distances_of<DType::kFloat16>(what, found);
    case DType::kBFloat16: return distances_of<DType::kBFloat16>(what, found);
  }
}

}  // namespace loft::LOFT_ISA
