// Layer 2. Rows mixed by weights and aggregated, some coordinates at a time, on the vectors of one
// instruction set: what is mixed stays in a cache until the rule's own kernel has taken it.
// Traffic (rows + 1) * numel * sizeof(value).
//
// A mixed row adds its products in the order of the rows, in the type of the arithmetic. Rows that
// it does not name are in no sum: they may hold anything.
//
// A core loads a value in the time of two additions. So several mixed rows are added up together in
// registers, and each value is loaded once for all of them.

#include <algorithm>
#include <array>
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

// Values of a tile, whole strips of at most 512 bytes: of so many coordinates of all rows one mix
// is made after the other, and then the rule is called. Measured on 16 and 32 rows: half of it
// takes 1.03 times as long; on 512 rows by AVX2, a strip takes 2.2 times.
constexpr int kTileBytes = 512;
static_assert(kTileBytes >= kTogether * kVectorBytes);
template <typename T>
constexpr int kTile = kTileBytes / (kTogether * kVectorBytes) * kStrip<T>;

// How far beyond a tile rows are fetched, into the L2 cache. Measured on 16 rows: 2048 are as good,
// and into the L1 cache takes 1.1 times as long.
constexpr int64_t kFetchAheadBytes = 1024;

// Groups from which on tiles are copied where they would push each other out of the L1 cache: what
// more groups read where it lies is lost between two of them. Measured on rows that begin at equal
// places of their pages: of 16 rows by AVX2, four groups, copies take 0.7 of the time; of 8 rows,
// two groups, 1.2, and of 16 rows by AVX-512, two groups too, 1.09.
constexpr int kCopiedGroups = 3;

// Of the L1 data caches of x86: 64 sets of 8 ways or more. 64 lines are as long as a page, so that
// virtual addresses tell the set. On other machines it is a guess, which costs time only.
constexpr int kCacheSets = 64, kCacheWays = 8;

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

// The rows that some group has a term of, rising.
template <typename T>
std::vector<int> rows_named(const std::vector<MixGroup<T>>& common,
                            const std::vector<MixGroup<T>>& others, int num_rows) {
  std::vector<bool> is_named(num_rows);
  for (const auto* groups : {&common, &others}) {
    for (const MixGroup<T>& group : *groups) {
      for (const auto& term : group.terms) is_named[term.row] = true;
    }
  }
  std::vector<int> rows;
  for (int row = 0; row < num_rows; ++row) {
    if (is_named[row]) rows.push_back(row);
  }
  return rows;
}

// Whether tiles of rows, read where they lie, stay in the L1 cache beside those of mixed ones. All
// tiles shift alike, so the first ones tell for all. Counted on the safe side: a tile is shorter
// than kTileBytes, and rows that are copied anyway, as they need a scale, are counted as well.
// Mixed alone without copies, of the time with them (rows of 10 million float32 apart, 2560 bytes
// and whole pages): AVX2, 16 rows 0.9, 32 rows 0.93, AVX-512, 32 rows 0.92. Of rows that fill 8
// ways by themselves, beside which 32 mixed ones have no room: AVX2, 32 rows 1.4.
bool stay_in_cache(const MixedRows& mixed, const std::vector<int>& named) {
  constexpr int kSetBytes = kCacheSets * kLineBytes;
  std::array<int, kCacheSets> lines{};
  for (int row : named) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(mixed.rows[row]);
    const uintptr_t end = begin + kTileBytes;
    for (uintptr_t line = begin / kLineBytes; line * kLineBytes < end; ++line) {
      ++lines[line % kCacheSets];
    }
  }
  const int mixed_lines = (mixed.num_each * kTileBytes + kSetBytes - 1) / kSetBytes;
  return *std::max_element(lines.begin(), lines.end()) + mixed_lines <= kCacheWays;
}

// Fetches the lines that begin in `bytes` of a row at `from`, kFetchAheadBytes further on.
LOFT_INLINE void fetch_ahead(const char* from, int bytes) {
  const int first = -reinterpret_cast<uintptr_t>(from) % kLineBytes;
  for (int at = first; at < bytes; at += kLineBytes) prefetch<false>(from + at, kFetchAheadBytes);
}

// The first `length` values of the tile of each mixed row of a group, to `out`, from those of rows;
// whole strips.
template <DType kDType, bool kIsCommon>
void mix_group(const MixGroup<Value<kDType>>& group, const Value<kDType>* const* tiles, int length,
               Value<kDType>* out) {
  using T = Value<kDType>;
  using V = Vector<T>;
  constexpr int kLanes = kVectorBytes / sizeof(T);
  for (int i = 0; i < length; i += kStrip<T>) {
    // The compiler must not know it, or it keeps it in a register: there are 16 on AVX2, and then
    // two sums lie in memory.
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
      T* to = out + group.each[m] * kTile<T> + i;
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
  constexpr int kLineValues = kLineBytes / static_cast<int>(sizeof(T));
  struct alignas(kLineBytes) Line {
    T values[kLineValues];
  };
  // Tiles of rows that are copied, of mixed ones, those of no terms being zeros, and of results.
  const size_t num_tiles = mixed.num_rows + mixed.num_each + 1;
  std::vector<Line> room(num_tiles * kTile<T> / kLineValues + 1);
  T* const copies = reinterpret_cast<T*>(room.data());
  T* const out = copies + mixed.num_rows * kTile<T>;
  T* const results = out + mixed.num_each * kTile<T>;
  std::vector<const T*> tiles(mixed.num_rows);
  std::vector<const char*> rows;
  for (int row = 0; row < mixed.num_mixed; ++row) {
    rows.push_back(reinterpret_cast<const char*>(out + mixed.which[row] * kTile<T>));
  }
  const auto common = groups_of<T>(mixed, true), others = groups_of<T>(mixed, false);
  const int num_groups = static_cast<int>(common.size() + others.size());
  const std::vector<int> named = rows_named<T>(common, others, mixed.num_rows);
  const bool are_copied = num_groups >= kCopiedGroups && !stay_in_cache(mixed, named);
  const int num_named = static_cast<int>(named.size());
  Work part = work;
  part.rows = rows.data();
  for (int64_t at = begin; at < end; at += kTile<T>) {
    const int count = static_cast<int>(end - at < kTile<T> ? end - at : kTile<T>);
    const int length = (count + kStrip<T> - 1) / kStrip<T> * kStrip<T>;
    const int64_t byte = at * static_cast<int64_t>(sizeof(Bits));
    for (int row : named) {
      const T scale = static_cast<T>(mixed.scales[row]);
      tiles[row] = tile_of<kDType>(mixed.rows[row], at, count, length, scale, are_copied,
                                   copies + row * kTile<T>);
    }
    // Each of the groups first fetches its part of what comes.
    int number = 0, fetched = 0;
    const auto fetch_part = [&] {
      for (const int end_row = ++number * num_named / num_groups; fetched < end_row; ++fetched) {
        fetch_ahead(mixed.rows[named[fetched]] + byte, count * static_cast<int>(sizeof(Bits)));
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
