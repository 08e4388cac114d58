// Layer 2. Ranks of many rows on the CPU: groups sorted in registers, merged through the L1 cache.
#pragma once

#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/weighted.h"

namespace loft {
namespace LOFT_ISA {

#include "networks.h"

#if defined(__AVX512BW__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kHasCompare64 = true;
#else
constexpr bool kHasCompare64 = false;
#endif

// Where the rows of one call lie; `weights` is null without weights. `is_part`: they are a group of
// more rows, for whose fetched lines together the first cache has no room.
struct Source {
  const char* const* rows;
  const int32_t* weights;
  bool is_part = false;
};

template <typename F>
constexpr bool kIsWeighted = false;
template <typename Plain>
constexpr bool kIsWeighted<Weighted<Plain>> = true;

template <typename F>
constexpr int kStep = F::kLanes * static_cast<int>(sizeof(typename F::Bits));  // bytes a row

// Rows that one straight-line network sorts. Entries that are dear to exchange get short networks,
// which also keeps them quick to compile: weighted float64, and 64-bit keys where the machine
// cannot compare them.
template <typename F>
constexpr int kGroup = std::is_same_v<typename F::Entry, Pair>                               ? 8
                       : (kIsWeighted<F> || sizeof(typename F::Bits) == 8) && !kHasCompare64 ? 8
                       : kIsWeighted<F> || kRegisters == 16                                  ? 16
                                                                                             : 32;

// Entries that a merge finishes in registers.
template <typename F>
constexpr int kClean = kGroup<F> < kRegisters ? kGroup<F> : kRegisters;

// Loops over rows are unrolled by order: left to itself GCC stops at 16 and puts the entries in
// memory.

template <typename F>
constexpr int kVectorsALine = kLineBytes / kStep<F> > 1 ? kLineBytes / kStep<F> : 1;

// Rows of one vector at byte `at`. Networks ask for a row where they first need it, so that few
// entries are alive at a time. Each line is fetched ahead once: kByRow, with the load of its row,
// else with the first vector of the line, all rows together.
template <typename F, int kRows, bool kByRow = kVectorsALine<F> == 1>
struct RowLoad {
  Source source;
  int64_t at;

  LOFT_INLINE void fetch(int vector) const {
    if (kByRow || vector % kVectorsALine<F> != 0) return;
    if (kRows > kNearRows || source.is_part) {
      fetch_rows<false>();
    } else {
      fetch_rows<true>();
    }
  }
  template <bool kNear>
  LOFT_INLINE void fetch_rows() const {
#pragma GCC unroll 64
    for (int row = 0; row < kRows; ++row) prefetch<kNear>(source.rows[row] + at);
  }
  LOFT_INLINE typename F::Entry operator()(int row) const {
    const char* from = source.rows[row] + at;
    if (kByRow) prefetch<kRows <= kNearRows>(from);
    if constexpr (kIsWeighted<F>) {
      return F::load(from, source.weights[row]);
    } else {
      return F::load(from);
    }
  }
};

// Sort `vectors` neighbouring vectors of kRows rows, each into `to`, `stride` entries apart. By row
// only whole groups know that they are parts; the last rows, up to kNearRows, go to the first
// cache.
template <typename F, int kRows>
void sort_group(Source source, int64_t at, int vectors, typename F::Entry* to, int stride) {
  constexpr bool kIsByRow = kVectorsALine<F> == 1 && kGroup<F> > kNearRows;
  for (int vector = 0; vector < vectors; ++vector, at += kStep<F>, to += stride) {
    typename F::Entry entries[kRows];
    const RowLoad<F, kRows, kIsByRow> load{source, at};
    load.fetch(vector);
    SortNetwork<kRows>::apply(entries, load);
#pragma GCC unroll 32
    for (int row = 0; row < kRows; ++row) to[row] = entries[row];
  }
}

template <typename F>
using SortGroup = void (*)(Source, int64_t, int, typename F::Entry*, int);

template <typename F, int... kRows>
constexpr SortGroup<F> sort_group_for(int rows, std::integer_sequence<int, kRows...>) {
  constexpr SortGroup<F> table[] = {sort_group<F, kRows + 1>...};
  return table[rows - 1];
}

template <typename F>
SortGroup<F> sort_group_for(int rows) {
  return sort_group_for<F>(rows, std::make_integer_sequence<int, kGroup<F>>{});
}

// Sort a bitonic run of kCount entries in registers.
template <int kCount, typename Entry>
LOFT_INLINE void clean(Entry* v) {
#pragma GCC unroll 8
  for (int distance = kCount / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) {
      if (!(i & distance)) exchange(v[i], v[i + distance]);
    }
  }
}

template <int kCount, typename Entry>
LOFT_INLINE void clean_in_place(Entry* run) {
  Entry v[kCount];
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) v[i] = run[i];
  clean<kCount>(v);
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) run[i] = v[i];
}

// Merge two ascending runs of kCount entries each: one step makes two bitonic runs of them, of
// which the first holds the smaller half; each is then finished in registers.
template <int kCount, typename Entry>
void merge_two(Entry* run) {
  Entry low[kCount], high[kCount];
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) {
    low[i] = run[i];
    high[kCount - 1 - i] = run[2 * kCount - 1 - i];
    exchange(low[i], high[kCount - 1 - i]);
  }
  clean<kCount>(low);
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) run[i] = low[i];
  clean<kCount>(high);
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) run[kCount + i] = high[i];
}

// Ranks that are wanted of a merge, [begin, end): the others need not be put in order.
struct Wanted {
  int begin, end;
  bool touches(int from, int to) const { return begin < to && from < end; }
};

// The first two steps of a merge of two runs of `half` entries each, in one go. kIsMiddle: only the
// middle half of the ranks is wanted, so the outer ones of every four are not written.
template <bool kIsMiddle, typename Entry>
void merge_quarters(Entry* run, int half) {
  const int quarter = half / 2;
  for (int i = 0; i < quarter; ++i) {
    Entry *low = run + i, *high = run + 2 * half - 1 - i;
    Entry a = *low, b = low[quarter], c = *(high - quarter), d = *high;
    exchange(a, d);
    exchange(b, c);
    exchange(a, b);
    exchange(c, d);
    low[quarter] = b;
    *(high - quarter) = c;
    if constexpr (!kIsMiddle) *low = a, *high = d;
  }
}

// Merge two ascending runs, run[0, half) and run[half, length), half < length <= 2 * half; both are
// multiples of kGroup<F>. What lies beyond `length` counts as +inf and never moves.
template <typename F>
void merge(typename F::Entry* run, int half, int length, Wanted wanted) {
  if constexpr (kClean<F> == kGroup<F>) {
    if (half == kGroup<F> && length == 2 * half) return merge_two<kGroup<F>>(run);
  }
  int distance = half / 2;
  const bool is_middle = wanted.begin >= distance && wanted.end <= half + distance;
  if (length == 2 * half && distance >= kClean<F>) {
    is_middle ? merge_quarters<true>(run, half) : merge_quarters<false>(run, half);
    distance /= 2;
  } else {
    for (int i = 2 * half - length; i < half; ++i) exchange(run[i], run[2 * half - 1 - i]);
  }
  for (; distance >= kClean<F>; distance /= 2) {
    for (int base = 0; base < length; base += 2 * distance) {
      if (!wanted.touches(base, base + 2 * distance)) continue;
      const int end = base + 2 * distance < length ? base + distance : length - distance;
      for (int i = base; i < end; ++i) exchange(run[i], run[i + distance]);
    }
  }
  for (int base = 0; base < length; base += kClean<F>) {
    if (wanted.touches(base, base + kClean<F>)) clean_in_place<kClean<F>>(run + base);
  }
}

template <typename I>
LOFT_INLINE void set_last(I& entry) {
  entry = I{} + std::numeric_limits<Lane<I>>::max();
}
LOFT_INLINE void set_last(Pair& entry) {
  set_last(entry.key);
  set_last(entry.weight);
}
LOFT_INLINE void set_last(Twin& entry) {
  set_last(entry.first);
  set_last(entry.second);
}

// Entries that `rows` ranked rows take: above one group, whole groups.
template <typename F>
constexpr int padded(int rows) {
  return rows <= kGroup<F> ? rows : (rows + kGroup<F> - 1) / kGroup<F> * kGroup<F>;
}

// Rank `rows` rows, any number, into `to`, `stride` >= padded<F>(rows) entries a vector. Above one
// group only wanted ranks are where they belong.
template <typename F>
void rank_rows(Source source, int rows, int64_t at, int vectors, typename F::Entry* to, int stride,
               Wanted wanted) {
  const int padded_rows = padded<F>(rows);
  for (int first = 0; first < rows; first += kGroup<F>) {
    const int count = rows - first < kGroup<F> ? rows - first : kGroup<F>;
    const Source part{source.rows + first, source.weights ? source.weights + first : nullptr,
                      rows > kNearRows};
    sort_group_for<F>(count)(part, at, vectors, to + first, stride);
  }
  if (rows <= kGroup<F>) return;
  for (int vector = 0; vector < vectors; ++vector, to += stride) {
    for (int i = rows; i < padded_rows; ++i) set_last(to[i]);
    for (int half = kGroup<F>; half < padded_rows; half *= 2) {
      const Wanted ranks = 2 * half < padded_rows ? Wanted{0, padded_rows} : wanted;
      for (int base = 0; base + half < padded_rows; base += 2 * half) {
        const int left = padded_rows - base;
        merge<F>(to + base, half, left < 2 * half ? left : 2 * half, ranks);
      }
    }
  }
}

}  // namespace LOFT_ISA
}  // namespace loft
