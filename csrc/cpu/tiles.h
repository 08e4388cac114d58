// Layer 2. Tiles of rows in the type of the arithmetic, for kernels that read a row many times.
//
// A copy lies in the L1 cache whatever the distance between rows: rows a power of two apart would
// push each other out of it. It also widens 16-bit values once, and scales.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/formats.h"
#include "cpu/rows.h"

namespace loft::LOFT_ISA {

template <DType kDType>
using Value = typename Stored<kDType>::Value;

// Copies `count` values from coordinate `at` on; the rest of the tile's kSumTile are zeros. The
// row's next tile is fetched: there is the time of a whole tile until it is needed.
template <DType kDType>
LOFT_INLINE void load_tile(const char* row, int64_t at, int count, Value<kDType>* to) {
  using V = Vector<Value<kDType>>;
  using Bits = typename Stored<kDType>::Bits;
  constexpr int kLanes = kVectorBytes / sizeof(Value<kDType>);
  const char* from = row + at * sizeof(Bits);
  if (__builtin_expect(count < kSumTile, 0)) {
    for (int i = 0; i < kSumTile; ++i) {
      Bits bits{};
      if (i < count) std::memcpy(&bits, from + i * sizeof(Bits), sizeof(Bits));
      to[i] = i < count ? value_of<kDType>(bits) : 0;
    }
    return;
  }
  constexpr int kTileBytes = kSumTile * sizeof(Bits);
  for (int byte = 0; byte < kTileBytes; byte += kLineBytes)
    prefetch<false>(from + byte, kTileBytes);
#pragma GCC unroll 4
  for (int i = 0; i < kSumTile; i += kLanes) {
    if constexpr (sizeof(Bits) == sizeof(Value<kDType>)) {
      store(to + i, load<V>(from + i * sizeof(Bits)));
    } else {
      using F = Half<kDType == DType::kBFloat16>;
      store(to + i, F::widen(load<typename F::Part>(from + i * sizeof(Bits))));
    }
  }
}

}  // namespace loft::LOFT_ISA
