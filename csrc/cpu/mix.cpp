// Layer 2. Rows mixed by weights and aggregated, a tile at a time, on the vectors of one
// instruction set: a tile of every row is read once, and what is mixed of it stays in the caches
// until the rule's own kernel has taken it. Traffic (rows + 1) * numel * sizeof(value).
//
// A mixed row adds its products in the order of the rows, in the type of the arithmetic. Rows that
// it does not name are in no sum: they may hold anything.

#include <algorithm>
#include <vector>

#include "cpu/tiles.h"

namespace loft::LOFT_ISA {
namespace {

// Registers of one mixed row that are summed at a time, so that its weights are loaded once for all
// and no sum waits for the one before. Bound from the registers.
constexpr int kTogether = 8;

// One mixed row's tile. kIsCommon: its weights are all the same, so there is one product a sum.
template <typename T, bool kIsCommon>
LOFT_INLINE void mix_row(const T (*tiles)[kSumTile], const int* from, const T* by, int count,
                         T common, T* out) {
  using V = Vector<T>;
  constexpr int kLanes = kVectorBytes / sizeof(T), kStep = kTogether * kLanes;
  static_assert(kSumTile % kStep == 0, "a tile is whole steps");
  for (int at = 0; at < kSumTile; at += kStep) {
    const auto term = [&](int k, int v) LOFT_INLINE_LAMBDA {
      const V value = load<V>(tiles[from[k]] + at + v * kLanes);
      return kIsCommon ? value : value * by[k];
    };
    V sums[kTogether];
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) sums[v] = term(0, v);
    for (int k = 1; k < count; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kTogether; ++v) sums[v] += term(k, v);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) {
      store(out + at + v * kLanes, kIsCommon ? sums[v] * common : sums[v]);
    }
  }
}

template <typename T>
void mix_tile(const MixedRows& mixed, const T (*tiles)[kSumTile], const T* by, const T* common,
              T (*out)[kSumTile]) {
  for (int row = 0; row < mixed.num_mixed; ++row) {
    const int first = mixed.starts[row], count = mixed.starts[row + 1] - first;
    const int* from = mixed.from + first;
    if (count == 0) {
      std::fill_n(out[row], kSumTile, T{0});
    } else if (common[row] != 0) {
      mix_row<T, true>(tiles, from, by + first, count, common[row], out[row]);
    } else {
      mix_row<T, false>(tiles, from, by + first, count, T{0}, out[row]);
    }
  }
}

// Multiplies a tile where its row has a scale.
template <typename T>
LOFT_INLINE void scale_tile(T* tile, T scale) {
  using V = Vector<T>;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  if (scale == 1) return;
  for (int i = 0; i < kSumTile; i += kLanes) store(tile + i, load<V>(tile + i) * scale);
}

// Results in the type of the arithmetic, with no -0 and no NaN but one, to 16 bits.
template <DType kDType>
void narrow(const Value<kDType>* from, int count, char* to) {
  using Bits = typename Stored<kDType>::Bits;
  for (int i = 0; i < count; ++i) {
    const Bits bits = result_bits<kDType>(from[i]);
    std::memcpy(to + i * sizeof(Bits), &bits, sizeof(Bits));
  }
}

template <DType kDType>
void mix_of(const MixedRows& mixed, const Work& work, Kernel kernel, int64_t begin, int64_t end) {
  using T = Value<kDType>;
  using Bits = typename Stored<kDType>::Bits;
  constexpr bool kIsNarrow = sizeof(Bits) < sizeof(T);
  struct alignas(64) Tile {
    T values[kSumTile];
  };
  std::vector<Tile> room(static_cast<size_t>(mixed.num_rows + mixed.num_mixed));
  auto* tiles = reinterpret_cast<T(*)[kSumTile]>(room.data());
  auto* out = tiles + mixed.num_rows;
  std::vector<const char*> rows;
  for (int row = 0; row < mixed.num_mixed; ++row) {
    rows.push_back(reinterpret_cast<const char*>(out[row]));
  }
  const std::vector<T> by(mixed.by, mixed.by + mixed.starts[mixed.num_mixed]);
  const std::vector<T> common(mixed.common, mixed.common + mixed.num_mixed);
  alignas(64) T results[kSumTile];
  Work part = work;
  part.rows = rows.data();
  for (int64_t at = begin; at < end; at += kSumTile) {
    const int count = static_cast<int>(end - at < kSumTile ? end - at : kSumTile);
    for (int row = 0; row < mixed.num_rows; ++row) {
      load_tile<kDType>(mixed.rows[row], at, count, tiles[row]);
      scale_tile<T>(tiles[row], static_cast<T>(mixed.scales[row]));
    }
    mix_tile<T>(mixed, tiles, by.data(), common.data(), out);
    char* to = work.out + at * static_cast<int64_t>(sizeof(Bits));
    part.out = kIsNarrow ? reinterpret_cast<char*>(results) : to;
    kernel(part, 0, count);
    if constexpr (kIsNarrow) narrow<kDType>(results, count, to);
  }
}

}  // namespace

void mix(DType dtype, const MixedRows& mixed, const Work& work, Kernel kernel, int64_t begin,
         int64_t end) {
  switch (dtype) {
    case DType::kFloat64: return mix_of<DType::kFloat64>(mixed, work, kernel, begin, end);
    case DType::kFloat32: return mix_of<DType::kFloat32>(mixed, work, kernel, begin, end);
    case DType::kFloat16: return mix_of<DType::kFloat16>(mixed, work, kernel, begin, end);
    case DType::kBFloat16: return mix_of<DType::kBFloat16>(mixed, work, kernel, begin, end);
  }
}

}  // namespace loft::LOFT_ISA
