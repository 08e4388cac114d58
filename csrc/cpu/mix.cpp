// Layer 2. Rows mixed by weights and aggregated, some coordinates at a time, on the vectors of one
// instruction set: what is mixed stays in the L1 cache until the rule's own kernel has taken it.
// Traffic (rows + 1) * numel * sizeof(value).
//
// A mixed row adds its products in the order of the rows, in the type of the arithmetic. Rows that
// it does not name are in no sum: they may hold anything.
//
// A core loads a value in the time of two additions. So several mixed rows are added up together in
// registers, and each value is loaded once for all of them.

#include <algorithm>
#include <vector>

#include "cpu/tiles.h"

namespace loft::LOFT_ISA {
namespace {

// Mixed rows that are added up together, and vectors of each. Bound from the registers: 24 sums and
// 3 values of 32, or 12 sums, 3 values and the 1 of `plus` of 16. Measured on AVX-512, 16 rows in
// the L2 cache: 4 mixed rows of 4 vectors take 1.24 times as long.
constexpr int kGroupMixed = kRegisters == 32 ? 8 : 4, kTogether = 3;
template <typename T>
constexpr int kStrip = kTogether * kVectorBytes / static_cast<int>(sizeof(T));

// Bytes of a tile of a row: of so many coordinates of all rows one mix is made after the other, and
// then the rule is called. Measured on 16 and 32 rows: half of it takes 1.03 times as long.
constexpr int kTileBytes = 512;

// How far ahead of a tile rows are fetched, into the L2 cache. Measured on 16 rows: 2048 are as
// good, and into the L1 cache takes 1.1 times as long.
constexpr int64_t kTilesAhead = 1024;

// Groups from which on tiles are copied: a tile that more groups read where it lies is lost between
// two of them. Measured on AVX2: copies of 16 rows, four groups, take 0.7 of the time, and of 8
// rows, two groups, 1.2.
constexpr int kCopiedGroups = 3;

// What a sum starts with: -0 + x is x, also where x is -0.
template <typename V>
constexpr V kNothing = -V{};

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

// Mixed rows that are added up together, all of them with one weight for all terms, or none.
template <typename T>
struct MixGroup {
  struct Term {
    int row;
    unsigned named;  // bit m: a term of the group's mixed row m
    T by[kGroupMixed];
  };
  int count = 0;
  int each[kGroupMixed];
  T common[kGroupMixed];
  std::vector<Term> terms;  // in the order of the rows
};

// Of mixed rows that have a common weight, or of the others. One without terms is in no group.
template <typename T>
std::vector<MixGroup<T>> groups_of(const MixedRows& mixed, bool is_common) {
  std::vector<MixGroup<T>> groups;
  for (int each = 0; each < mixed.num_each; ++each) {
    const MixedRow& row = mixed.each[each];
    if (row.count == 0 || (row.common != 0) != is_common) continue;
    if (groups.empty() || groups.back().count == kGroupMixed) groups.emplace_back();
    MixGroup<T>& group = groups.back();
    group.each[group.count] = each;
    group.common[group.count++] = static_cast<T>(row.common);
  }
  for (MixGroup<T>& group : groups) {
    int next[kGroupMixed];  // term of each of them
    for (int m = 0; m < group.count; ++m) next[m] = mixed.each[group.each[m]].first;
    for (int row = 0; row < mixed.num_rows; ++row) {
      typename MixGroup<T>::Term term{row, 0, {}};
      for (int m = 0; m < group.count; ++m) {
        const MixedRow& each = mixed.each[group.each[m]];
        if (next[m] == each.first + each.count || mixed.from[next[m]] != row) continue;
        term.named |= 1u << m;
        term.by[m] = static_cast<T>(mixed.by[next[m]++]);
      }
      if (term.named) group.terms.push_back(term);
    }
  }
  return groups;
}

// Fetches what is read soon after `bytes` of a row at `from`.
LOFT_INLINE void fetch_ahead(const char* from, int bytes) {
  const int first = -reinterpret_cast<uintptr_t>(from) % kLineBytes;
  for (int at = first; at < bytes; at += kLineBytes) prefetch<false>(from + at, kTilesAhead);
}

// A tile of `length` values of each mixed row of a group, to `out`, from `tiles` of the rows.
template <DType kDType, bool kIsCommon>
void mix_group(const MixGroup<Value<kDType>>& group, const Value<kDType>* const* tiles, int length,
               Value<kDType>* out) {
  using T = Value<kDType>;
  using V = Vector<T>;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  for (int i = 0; i < length; i += kStrip<T>) {
    // Loaded for each strip: kept in a register, it takes one of 16 from the sums.
    V nothing = kNothing<V>;
    asm volatile("" : "+m"(nothing));
    V sums[kGroupMixed][kTogether];
#pragma GCC unroll 8
    for (auto& sum : sums) {
#pragma GCC unroll 8
      for (V& part : sum) part = nothing;
    }
    for (const auto& term : group.terms) {
      V values[kTogether];
#pragma GCC unroll 8
      for (int v = 0; v < kTogether; ++v) values[v] = load<V>(tiles[term.row] + i + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kGroupMixed; ++m) {
        if (!(term.named >> m & 1)) continue;
#pragma GCC unroll 8
        for (int v = 0; v < kTogether; ++v) {
          sums[m][v] = kIsCommon ? plus(sums[m][v], values[v], (v + m) % 2)
                                 : sums[m][v] + values[v] * term.by[m];
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kGroupMixed; ++m) {
      if (m >= group.count) break;
      T* to = out + group.each[m] * length + i;
#pragma GCC unroll 8
      for (int v = 0; v < kTogether; ++v) {
        store(to + v * kLanes, kIsCommon ? sums[m][v] * group.common[m] : sums[m][v]);
      }
    }
  }
}

// A tile of a row: where the row lies, if it shall not be copied and its values can be read from
// there as they are; else a copy, widened, scaled, and with zeros behind its last value.
template <DType kDType>
LOFT_INLINE const Value<kDType>* tile_of(const char* row, int64_t at, int count, int length,
                                         Value<kDType> scale, bool is_copied, Value<kDType>* room) {
  using T = Value<kDType>;
  using V = Vector<T>;
  using Bits = typename Stored<kDType>::Bits;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  const char* from = row + at * static_cast<int64_t>(sizeof(Bits));
  // A vector across two lines is loaded in the time of two, and each value more than once.
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % kVectorBytes == 0;
  if (count < length) {
    load_few<kDType>(from, count, length, room);
  } else if (sizeof(Bits) == sizeof(T) && scale == 1 && !is_copied && is_aligned) {
    return reinterpret_cast<const T*>(from);
  } else {
    for (int i = 0; i < length; i += kLanes) store(room + i, load_wide<kDType>(from, i));
  }
  if (scale == 1) return room;
  for (int i = 0; i < length; i += kLanes) store(room + i, load<V>(room + i) * scale);
  return room;
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
  constexpr int kStripBytes = kStrip<T> * static_cast<int>(sizeof(T));
  constexpr int length = kTileBytes / kStripBytes * kStrip<T>;
  constexpr int kLineValues = kLineBytes / static_cast<int>(sizeof(T));
  struct alignas(kLineBytes) Line {
    T values[kLineValues];
  };
  // Tiles of rows that are copied, of mixed ones, those of no terms being zeros, and of results.
  const size_t num_tiles = mixed.num_rows + mixed.num_each + 1;
  std::vector<Line> room(num_tiles * length / kLineValues + 1);
  T* const copies = room[0].values;
  T* const out = copies + mixed.num_rows * length;
  T* const results = out + mixed.num_each * length;
  std::vector<const T*> tiles(mixed.num_rows);
  std::vector<const char*> rows;
  for (int row = 0; row < mixed.num_mixed; ++row) {
    rows.push_back(reinterpret_cast<const char*>(out + mixed.which[row] * length));
  }
  const auto common = groups_of<T>(mixed, true), others = groups_of<T>(mixed, false);
  const int num_groups = static_cast<int>(common.size() + others.size());
  const bool are_copied = num_groups >= kCopiedGroups;
  Work part = work;
  part.rows = rows.data();
  for (int64_t at = begin; at < end; at += length) {
    const int count = static_cast<int>(end - at < length ? end - at : length);
    const int64_t byte = at * static_cast<int64_t>(sizeof(Bits));
    for (int row = 0; row < mixed.num_rows; ++row) {
      const T scale = static_cast<T>(mixed.scales[row]);
      tiles[row] = tile_of<kDType>(mixed.rows[row], at, count, length, scale, are_copied,
                                   copies + row * length);
    }
    int fetched = 0;  // rows: each of the groups begins with its part of them
    const auto fetch_part = [&] {
      const int end = std::min(fetched + mixed.num_rows / num_groups + 1, mixed.num_rows);
      for (; fetched < end; ++fetched) {
        fetch_ahead(mixed.rows[fetched] + byte, length * sizeof(Bits));
      }
    };
    for (const auto& group : common) {
      fetch_part();
      mix_group<kDType, true>(group, tiles.data(), length, out);
    }
    for (const auto& group : others) {
      fetch_part();
      mix_group<kDType, false>(group, tiles.data(), length, out);
    }
    part.out = kIsNarrow ? reinterpret_cast<char*>(results) : work.out + byte;
    kernel(part, 0, count);
    if constexpr (kIsNarrow) narrow<kDType>(results, count, work.out + byte);
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
