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

// Lanes from value `i` on, as a vector of the arithmetic.
template <DType kDType>
LOFT_INLINE Vector<Value<kDType>> load_wide(const char* from, int i) {
  using Bits = typename Stored<kDType>::Bits;
  if constexpr (sizeof(Bits) == sizeof(Value<kDType>)) {
    return load<Vector<Value<kDType>>>(from + i * sizeof(Bits));
  } else {
    using F = Half<kDType == DType::kBFloat16>;
    return F::widen(load<typename F::Part>(from + i * sizeof(Bits)));
  }
}

// Copies `count` values, and zeros up to `room`.
template <DType kDType>
void load_few(const char* from, int count, int room, Value<kDType>* to) {
  using Bits = typename Stored<kDType>::Bits;
  for (int i = 0; i < room; ++i) {
    Bits bits{};
    if (i < count) std::memcpy(&bits, from + i * sizeof(Bits), sizeof(Bits));
    to[i] = i < count ? value_of<kDType>(bits) : 0;
  }
}

// Copies a tile.
template <DType kDType>
LOFT_INLINE void load_tile(const char* from, Value<kDType>* to) {
  constexpr int kLanes = kVectorBytes / sizeof(Value<kDType>);
#pragma GCC unroll 8
  for (int i = 0; i < kSumTile; i += kLanes) store(to + i, load_wide<kDType>(from, i));
}

// Fetches the tile after the next of all rows, bit by bit while this one is worked on: a core has
// room for some tens of lines on their way, and of 16 rows a tile has 256, for which it would wait.
// Lines of the next tile that are fetched last would come too late.
template <DType kDType>
class ComingTile {
 public:
  // Fetches are spread over `steps` calls of `fetch` a tile.
  ComingTile(const char* const* rows, int num_rows, int steps)
      : rows_(rows), end_(num_rows * kParts), batch_((end_ + steps - 1) / steps) {}

  // Begins at the first line of that tile; this one begins at coordinate `at`.
  void start(int64_t at) {
    ahead_ = (at + 2 * kSumTile) * static_cast<int64_t>(sizeof(typename Stored<kDType>::Bits));
    part_ = 0;
  }

  // The next lines of the tile, if any are left.
  LOFT_INLINE void fetch() {
    const unsigned end = part_ + batch_ < end_ ? part_ + batch_ : end_;
    for (; part_ < end; ++part_) {
      const char* from = rows_[part_ / kParts] + part_ % kParts * (kLines * kLineBytes);
#pragma GCC unroll 4
      for (int line = 0; line < kLines; ++line) prefetch<false>(from + line * kLineBytes, ahead_);
    }
  }

 private:
  static constexpr int kLines = 4;  // together, for fewer instructions
  static constexpr unsigned kParts =
      kSumTile * sizeof(typename Stored<kDType>::Bits) / (kLines * kLineBytes);  // a row
  const char* const* const rows_;
  const unsigned end_, batch_;
  int64_t ahead_ = 0;
  unsigned part_ = 0;
};

}  // namespace loft::LOFT_ISA
