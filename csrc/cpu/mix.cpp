// Layer 2. Rows mixed by weights and aggregated, a tile at a time, on the vectors of one
// instruction set: a tile of every row is read once, and what is mixed of it stays in the caches
// until the rule's own kernel has taken it. Traffic (rows + 1) * numel * sizeof(value).
//
// A mixed row adds its products in the order of the rows, in the type of the arithmetic. Rows that
// it does not name are in no sum: they may hold anything. Sums that begin alike are added once.
//
// A tile is mixed in strips of some vectors: strips of 16 rows, of as many mixed ones and of what
// is saved are 12 KiB and stay in the L1 cache, where tiles would not.

#include <algorithm>
#include <vector>

#include "cpu/tiles.h"

namespace loft::LOFT_ISA {
namespace {

// Vectors of a strip: so many registers are summed at a time, so that a weight is loaded once for
// all and no sum waits for the one before. Bound from the registers.
constexpr int kTogether = 8;
template <typename T>
constexpr int kStrip = kTogether * kVectorBytes / static_cast<int>(sizeof(T));

// sum + value. Of two neighbours one goes to the units that multiply: value * 1 is exact.
template <typename V>
LOFT_INLINE V plus(V sum, V value, [[maybe_unused]] bool by_product) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Lane<V>) == 4) {
    if (by_product) return bit_cast<V>(_mm512_fmadd_ps(value, V{} + 1.0f, sum));
  }
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(Lane<V>) == 4) {
    if (by_product) return bit_cast<V>(_mm256_fmadd_ps(value, V{} + 1.0f, sum));
  }
#endif
  return sum + value;
}

// The terms of all mixed rows: where the strips of their rows lie, and their weights.
template <typename T>
struct Terms {
  std::vector<const T*> strips;
  std::vector<T> by;
};

// One mixed row's strip. kIsCommon: its weights are all the same, so there is one product a sum.
template <typename T, bool kIsCommon>
LOFT_INLINE void mix_strip(const MixStep& step, const int* saves, const Terms<T>& terms, T* saved,
                           T* out) {
  using V = Vector<T>;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  const T* const* strips = terms.strips.data() + step.first;
  const T* by = terms.by.data() + step.first;
  V sums[kTogether];
  const auto add = [&](int k) LOFT_INLINE_LAMBDA {
    const T* strip = strips[k];
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) {
      const V value = load<V>(strip + v * kLanes);
      sums[v] = kIsCommon ? plus(sums[v], value, v % 2) : sums[v] + value * by[k];
    }
  };
  int k = step.resume;
  if (k > 0) {
    const T* from = saved + k * kStrip<T>;
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) sums[v] = load<V>(from + v * kLanes);
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) {
      const V value = load<V>(strips[0] + v * kLanes);
      sums[v] = kIsCommon ? value : value * by[0];
    }
    k = 1;
  }
  for (int save = step.first_saved; save < step.after_saved; ++save) {
    for (; k < saves[save]; ++k) add(k);
#pragma GCC unroll 8
    for (int v = 0; v < kTogether; ++v) store(saved + k * kStrip<T> + v * kLanes, sums[v]);
  }
  for (; k < step.count; ++k) add(k);
  const T common = static_cast<T>(step.common);
#pragma GCC unroll 8
  for (int v = 0; v < kTogether; ++v) {
    store(out + v * kLanes, kIsCommon ? sums[v] * common : sums[v]);
  }
}

// All mixed rows' strips, each into its tile of `out`.
template <typename T>
void mix_strips(const MixedRows& mixed, const Terms<T>& terms, T* saved, T (*out)[kSumTile],
                int at) {
  for (int number = 0; number < mixed.num_mixed; ++number) {
    const MixStep& step = mixed.steps[number];
    T* to = out[step.row] + at;
    if (step.count == 0) {
      std::fill_n(to, kStrip<T>, T{0});
    } else if (step.common != 0) {
      mix_strip<T, true>(step, mixed.saves, terms, saved, to);
    } else {
      mix_strip<T, false>(step, mixed.saves, terms, saved, to);
    }
  }
}

// A strip of a row, scaled: `count` values from coordinate `at` on, and zeros behind them. What
// lies a tile ahead is fetched.
template <DType kDType>
LOFT_INLINE void load_strip(const char* row, int64_t at, int64_t count, Value<kDType> scale,
                            Value<kDType>* to) {
  using T = Value<kDType>;
  using V = Vector<T>;
  using Bits = typename Stored<kDType>::Bits;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  constexpr int64_t kBytes = kStrip<T> * sizeof(Bits), kTileBytes = kSumTile * sizeof(Bits);
  const char* from = row + at * static_cast<int64_t>(sizeof(Bits));
  if (__builtin_expect(count < kStrip<T>, 0)) {
    load_few<kDType>(from, static_cast<int>(count), kStrip<T>, to);
  } else {
#pragma GCC unroll 8
    for (int64_t byte = 0; byte < kBytes; byte += kLineBytes) {
      prefetch<false>(from + byte, kTileBytes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStrip<T>; i += kLanes) store(to + i, load_wide<kDType>(from, i));
  }
  if (scale == 1) return;
  for (int i = 0; i < kStrip<T>; i += kLanes) store(to + i, load<V>(to + i) * scale);
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
  static_assert(kSumTile % kStrip<T> == 0, "a tile is whole strips");
  struct alignas(64) Strip {
    T values[kStrip<T>];
  };
  constexpr int kStrips = kSumTile / kStrip<T>;  // of a tile
  const int num_rows = mixed.num_rows, num_saved = mixed.most_saved + 1;
  std::vector<Strip> room(num_rows + num_saved + static_cast<size_t>(mixed.num_mixed) * kStrips);
  T* const strips = room[0].values;
  T* const saved = room[num_rows].values;
  auto* const out = reinterpret_cast<T(*)[kSumTile]>(room[num_rows + num_saved].values);
  std::vector<const char*> rows;
  for (int row = 0; row < mixed.num_mixed; ++row) {
    rows.push_back(reinterpret_cast<const char*>(out[row]));
  }
  Terms<T> terms;
  for (int k = 0; k < mixed.num_terms; ++k) {
    terms.strips.push_back(strips + mixed.from[k] * kStrip<T>);
    terms.by.push_back(static_cast<T>(mixed.by[k]));
  }
  alignas(64) T results[kSumTile];
  Work part = work;
  part.rows = rows.data();
  for (int64_t at = begin; at < end; at += kSumTile) {
    const int count = static_cast<int>(end - at < kSumTile ? end - at : kSumTile);
    for (int strip = 0; strip < count; strip += kStrip<T>) {
      for (int row = 0; row < num_rows; ++row) {
        load_strip<kDType>(mixed.rows[row], at + strip, count - strip,
                           static_cast<T>(mixed.scales[row]), strips + row * kStrip<T>);
      }
      mix_strips<T>(mixed, terms, saved, out, strip);
    }
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
