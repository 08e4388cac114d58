// Layer 2. Rows into ranked entries: what a vector loads, the one loop over vectors, and the sort
// of any number of rows, in groups by networks in registers that are merged through the L1 cache.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/weighted.h"

namespace loft::LOFT_ISA {

#include "networks.h"

#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kHasCompare64 = true;
#else
constexpr bool kHasCompare64 = false;
#endif

// Where the rows of one call lie; `weights` is null without weights. `is_part`: they are a group of
// more rows, whose prefetched lines all together the L1 cache has no room for.
struct Source {
  const char* const* rows;
  const int32_t* weights;
  bool is_part = false;
};

template <typename F>
constexpr int64_t byte_of(int64_t coordinate) {
  return coordinate * static_cast<int64_t>(sizeof(typename F::Bits));
}
// Bytes a row. No function is called for it: GCC 13 would say that it is used before its
// definition.
template <typename F>
constexpr int kStep = F::kLanes * static_cast<int>(sizeof(typename F::Bits));
template <typename F>
constexpr int kVectorsALine = kLineBytes / kStep<F> > 1 ? kLineBytes / kStep<F> : 1;

// Rows that one straight-line network sorts. Bound from the registers, 32 or 16. Entries that are
// dear to exchange get short networks, which also keeps them quick to compile: weighted float64,
// and 64-bit keys where the machine cannot compare them.
template <typename F>
constexpr int kGroup = std::is_same_v<typename F::Entry, Beside<Float64>>                    ? 8
                       : (kIsWeighted<F> || sizeof(typename F::Bits) == 8) && !kHasCompare64 ? 8
                       : kIsWeighted<F> || kRegisters == 16                                  ? 16
                                                                                             : 32;

// Entries that a merge finishes in registers.
template <typename F>
constexpr int kClean = kGroup<F> < kRegisters ? kGroup<F> : kRegisters;

// Loops over rows are unrolled by order: left to itself GCC stops at 16 and puts the entries in
// memory (measured, commit a200ef1: sorting 32 rows took 381 cycles a vector instead of 206).

// Rows of one vector at byte `at`. Networks ask for a row where they first need it, so that few
// entries are alive at a time. Each line is prefetched once: kByRow, with the load of its row, else
// with the first vector of the line, all rows together.
template <typename F, int kRows, bool kByRow = kVectorsALine<F> == 1>
struct RowLoad {
  Source source;
  int64_t at;

  LOFT_INLINE void fetch(int vector) const {
    if (kByRow || vector % kVectorsALine<F> != 0) return;  // the line was fetched before
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

// One vector once more by the general kernel (general.h), which rescues sums that overflow.
template <typename F>
__attribute__((noinline, cold)) void redo(const Work& work, int64_t at, int64_t begin);

// What a kernel of kRows rows that stay in registers says of itself. It adds
//   using Network      orders a vector's rows, or brings the ranks it needs to their places
//   bool finish(work, entries, at, begin) const
//                      writes the results of the coordinates from `at` on; false where a sum was
//                      not finite. Windows go where `begin` is the first coordinate.
template <typename F, int kRows>
struct InRegisters {
  using Format = F;
  using Entries = typename F::Entry[kRows];
  using Load = RowLoad<F, kRows>;
  Source source;

  explicit InRegisters(const Work& work) : source{work.rows, work.weights} {}
};

// The loop of all kernels of that kind: load and order the rows of a vector, finish it, go on.
// Takes the whole vectors of coordinates [begin, end) and returns where it stopped; dispatch.cpp
// pads the tail. What the finish does not need falls away, and nothing passes through memory.
template <typename Kernel>
int64_t for_each_vector(const Work& work, int64_t begin, int64_t end) {
  using F = typename Kernel::Format;
  const Kernel kernel(work);
  int64_t at = begin;
  for (int vector = 0; at + F::kLanes <= end; ++vector, at += F::kLanes) {
    typename Kernel::Entries entries;
    const typename Kernel::Load load{kernel.source, byte_of<F>(at)};
    load.fetch(vector);
    Kernel::Network::apply(entries, load);
    if (__builtin_expect(!kernel.finish(work, entries, at, begin), 0)) redo<F>(work, at, begin);
  }
  return at;
}

// The same for kernels whose ranked rows pass through the L1 cache: calls body(at, vectors) for up
// to `most` neighbouring vectors at a time.
template <typename F, typename Body>
LOFT_INLINE int64_t for_each_batch(int64_t begin, int64_t end, int most, const Body& body) {
  int64_t at = begin;
  while (at + F::kLanes <= end) {
    const int64_t left = (end - at) / F::kLanes;
    const int vectors = left < most ? static_cast<int>(left) : most;
    body(at, vectors);  // `most`, but the last time what is left
    at += vectors * F::kLanes;
  }
  return at;
}

// Sort `vectors` neighbouring vectors of kRows rows, each into `to`, `stride` entries apart. By row
// only whole groups know that they are parts; the last rows, up to kNearRows, go to the L1 cache.
template <typename F, int kRows>
void sort_group(Source source, int64_t at, int vectors, typename F::Entry* to, int stride) {
  constexpr bool kIsByRow = kVectorsALine<F> == 1 && kGroup<F> > kNearRows;
  for (int vector = 0; vector < vectors; ++vector, at += kStep<F>, to += stride) {
    typename F::Entry entries[kRows];  // in registers, as far as there are any
    const RowLoad<F, kRows, kIsByRow> load{source, at};
    load.fetch(vector);
    SortNetwork<kRows>::apply(entries, load);
#pragma GCC unroll 32
    for (int row = 0; row < kRows; ++row) to[row] = entries[row];
  }
}

template <typename F>
using SortGroup = void (*)(Source, int64_t, int, typename F::Entry*, int);

template <typename F>
SortGroup<F> sort_group_for(int rows) {
  constexpr auto table =
      table_of<kGroup<F>>([](auto row) -> SortGroup<F> { return sort_group<F, row + 1>; });
  return table[rows - 1];
}

// Sort a bitonic run (it rises, then falls) of kCount entries in registers. Four entries, by
// distance 2, then 1:   3 8 7 1  ->  3 1 | 7 8  ->  1 3 7 8
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
//   2 5 8 9 | 1 3 4 7   pairs from both ends: (2 7) (5 4) (8 3) (9 1)
//   2 4 3 1 | 9 8 5 7   minima to the left, maxima to the right in reverse
template <int kCount, typename Entry>
void merge_two(Entry* run) {
  Entry low[kCount], high[kCount];  // the smaller and the larger half
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
  int distance = half / 2;  // between the entries that a step exchanges
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

// Makes an entry come after every row's.
template <typename E>
LOFT_INLINE void set_last(E& entry) {
  if constexpr (std::is_class_v<E>) {  // a key and a weight, or two registers of them
    auto& [first, second] = entry;
    set_last(first);
    set_last(second);
  } else {
    entry = E{} + std::numeric_limits<Lane<E>>::max();
  }
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
  const int padded_rows = padded<F>(rows);  // whole groups
  for (int first = 0; first < rows; first += kGroup<F>) {
    const int count = rows - first < kGroup<F> ? rows - first : kGroup<F>;
    const Source part{source.rows + first, source.weights ? source.weights + first : nullptr,
                      rows > kNearRows};
    sort_group_for<F>(count)(part, at, vectors, to + first, stride);
  }
  if (rows <= kGroup<F>) return;  // one group is ranked already
  for (int vector = 0; vector < vectors; ++vector, to += stride) {
    for (int i = rows; i < padded_rows; ++i) set_last(to[i]);    // padding
    for (int half = kGroup<F>; half < padded_rows; half *= 2) {  // runs of `half` by two
      const Wanted ranks = 2 * half < padded_rows ? Wanted{0, padded_rows} : wanted;
      for (int base = 0; base + half < padded_rows; base += 2 * half) {
        const int left = padded_rows - base;
        merge<F>(to + base, half, left < 2 * half ? left : 2 * half, ranks);
      }
    }
  }
}

}  // namespace loft::LOFT_ISA
