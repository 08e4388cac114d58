// Layer 2. Squared distances between rows, on the vectors of one instruction set.
//
// Lane l of kSumLanes adds the squares of coordinates l, l + 16, ... of a tile in the type of the
// arithmetic; the lanes of a block's tiles are added in double, and then the lanes in their order
// (loft_hvd/aggregation/distances.py is the definition). No vector is wider than the lanes, so
// every level gives the same bits.
//
// Pairs are summed in registers, kLeft rows with up to kRight others at a time, or up to kSide rows
// among each other: each value that is loaded serves several pairs. Arithmetic of a pair: subtract,
// multiply, add, 3 of the some 3.7 instructions that a vector of it takes.

#include <algorithm>

#include "cpu/tiles.h"

namespace loft::LOFT_ISA {
namespace {

// Bound from the registers: 4 x 4 sums and 5 rows of 32; 2 x 6 sums and 3 rows of 16.
constexpr int kLeft = kRegisters == 32 ? 4 : 2, kRight = kRegisters == 32 ? 4 : 6;
constexpr int kSide = 4;  // 10 sums and 4 rows

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

// Half a register of floats as doubles, by the instruction's name: GCC 12 goes through memory.
using HalfFloats = Vector<float, kVectorBytes / 2>;
LOFT_INLINE Vector<double> widened(HalfFloats values) {
#if defined(__AVX512BW__)
  return bit_cast<Vector<double>>(_mm512_cvtps_pd(bit_cast<__m256>(values)));
#elif defined(__AVX2__)
  return bit_cast<Vector<double>>(_mm256_cvtps_pd(bit_cast<__m128>(values)));
#else
  return __builtin_convertvector(values, Vector<double>);
#endif
}

// Adds a register's lanes, from `lanes` on, to those of a pair.
template <typename V>
LOFT_INLINE void add_lanes(double* lanes, V sum) {
  using Wide = Vector<double>;
  if constexpr (sizeof(Lane<V>) == sizeof(double)) {
    store(lanes, load<Wide>(lanes) + sum);
  } else {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, lanes += kVectorBytes / 8) {
      store(lanes, load<Wide>(lanes) + widened(half_of<HalfFloats>(sum, half)));
    }
  }
}

// One tile of kA rows and kB others.
template <typename T, int kA, int kB>
void add_apart(const Tile<T>* a, const Tile<T>* b, Lanes* lanes) {
  using V = Vector<T>;
  constexpr int kWide = kVectorBytes / sizeof(T);
  for (int lane = 0; lane < kSumLanes; lane += kWide) {  // independent sums of each register
    V sums[kA][kB] = {};
#pragma GCC unroll 2
    for (int i = lane; i < kSumTile; i += kSumLanes) {
      V left[kA];
#pragma GCC unroll 4
      for (int p = 0; p < kA; ++p) left[p] = load<V>(a[p] + i);
#pragma GCC unroll 6
      for (int q = 0; q < kB; ++q) {
        const V right = load<V>(b[q] + i);
#pragma GCC unroll 4
        for (int p = 0; p < kA; ++p) {
          const V away = difference(right, left[p], (p + q) % 2);
          sums[p][q] += away * away;
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kA; ++p) {
#pragma GCC unroll 6
      for (int q = 0; q < kB; ++q) add_lanes(lanes[p * kGroupRows + q] + lane, sums[p][q]);
    }
  }
}

// One tile of kA rows among each other, and their squares. The rows are read where they lie, from
// byte `at` on, and copied to `tiles` as they come: stores that no sum waits for cost nothing.
template <DType kDType, int kA>
void add_same(const char* const* rows, int64_t at, Tile<Value<kDType>>* tiles, Lanes* lanes) {
  using T = Value<kDType>;
  using V = Vector<T>;
  constexpr int kWide = kVectorBytes / sizeof(T);
  for (int lane = 0; lane < kSumLanes; lane += kWide) {
    V sums[kA][kA] = {};
#pragma GCC unroll 2
    for (int i = lane; i < kSumTile; i += kSumLanes) {
      V values[kA];
#pragma GCC unroll 4
      for (int p = 0; p < kA; ++p) {
        values[p] = load_wide<kDType>(rows[p] + at, i);
        store(tiles[p] + i, values[p]);
      }
#pragma GCC unroll 4
      for (int p = 0; p < kA; ++p) {
#pragma GCC unroll 4
        for (int q = p; q < kA; ++q) {
          const V away = p == q ? values[p] : difference(values[q], values[p], (p + q) % 2);
          sums[p][q] += away * away;
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kA; ++p) {
#pragma GCC unroll 4
      for (int q = p; q < kA; ++q) add_lanes(lanes[p * kGroupRows + q] + lane, sums[p][q]);
    }
  }
}

// The function for so many rows and others.
template <typename T>
using AddApart = void (*)(const Tile<T>*, const Tile<T>*, Lanes*);
template <typename T>
AddApart<T> add_apart_for(int num_a, int num_b) {
  constexpr auto table = table_of<kLeft * kRight>(
      [](auto at) -> AddApart<T> { return add_apart<T, at / kRight + 1, at % kRight + 1>; });
  return table[(num_a - 1) * kRight + num_b - 1];
}
template <DType kDType>
using AddSame = void (*)(const char* const*, int64_t, Tile<Value<kDType>>*, Lanes*);
template <DType kDType>
AddSame<kDType> add_same_for(int num_rows) {
  constexpr auto table =
      table_of<kSide>([](auto rows) -> AddSame<kDType> { return add_same<kDType, rows + 1>; });
  return table[num_rows - 1];
}

// The steps of a tile: calls same(row, count) and then apart(row, count, other, count) so that each
// pair has its turn. Others are shared out evenly: of 8 by up to 6, 4 and 4.
template <typename Same, typename Apart>
LOFT_INLINE void for_steps(const RowRanges& what, const Same& same, const Apart& apart) {
  const int num_a = what.a_end - what.a, num_b = what.b_end - what.b;
  const int side = what.is_same() ? kSide : kLeft;
  for (int row = 0; what.is_same() && row < num_a; row += side) {
    same(row, num_a - row < side ? num_a - row : side);
  }
  for (int row = 0; row < num_a; row += side) {
    const int count = num_a - row < side ? num_a - row : side;
    const int first = what.is_same() ? row + count : 0, others = num_b - first;
    const int parts = (others + kRight - 1) / kRight;
    for (int left = row; left < row + count; left += kLeft) {
      const int rows = row + count - left < kLeft ? row + count - left : kLeft;
      for (int part = 0, other = first; part < parts; ++part) {
        const int end = first + others * (part + 1) / parts;
        apart(left, rows, other, end - other);
        other = end;
      }
    }
  }
}

template <DType kDType>
void distances_of(const RowRanges& what, double* found) {
  using T = Value<kDType>;
  using Bits = typename Stored<kDType>::Bits;
  alignas(64) Tile<T> tiles[2 * kGroupRows];
  alignas(64) Lanes lanes[kGroupRows * kGroupRows] = {};
  const int num_a = what.a_end - what.a, num_b = what.b_end - what.b;
  const int own = what.is_same() ? 0 : num_a;  // where the tiles of b begin
  const Tile<T>* others = tiles + own;
  const int num_rows = own + num_b;
  const char* rows[2 * kGroupRows];
  std::copy(what.rows + what.a, what.rows + what.a_end, rows);
  std::copy(what.rows + what.b, what.rows + what.b_end, rows + own);
  int steps = 0;
  for_steps(what, [&](int, int) { ++steps; }, [&](int, int, int, int) { ++steps; });
  ComingTile<kDType> coming(rows, num_rows, steps);
  Bits ends[2 * kGroupRows][kSumTile];  // the last values of each row, with zeros behind them
  for (int64_t at = what.begin; at < what.end; at += kSumTile) {
    int64_t byte = at * static_cast<int64_t>(sizeof(Bits));
    if (const int64_t count = what.end - at; count < kSumTile) {
      for (int row = 0; row < num_rows; ++row) {
        std::memset(ends[row], 0, sizeof(ends[row]));
        std::memcpy(ends[row], rows[row] + byte, static_cast<size_t>(count) * sizeof(Bits));
        rows[row] = reinterpret_cast<const char*>(ends[row]);
      }
      byte = 0;
    }
    if (!what.is_same()) {
      for (int row = 0; row < num_rows; ++row) load_tile<kDType>(rows[row] + byte, tiles[row]);
    }
    coming.start(at);
    for_steps(
        what,
        [&](int row, int count_a) {
          coming.fetch();
          add_same_for<kDType>(count_a)(rows + row, byte, tiles + row,
                                        lanes + RowRanges::place(row, row));
        },
        [&](int row, int count_a, int other, int count_b) {
          coming.fetch();
          add_apart_for<T>(count_a, count_b)(tiles + row, others + other,
                                             lanes + RowRanges::place(row, other));
        });
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
