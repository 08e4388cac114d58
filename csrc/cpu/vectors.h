// Layer 0. Vectors of one instruction set: types, loads, compare-exchange.
//
// A file that includes this one is compiled once a level. LOFT_ISA names the level and its
// namespace, so that two levels never share a symbol: the linker would keep one copy of a shared
// template, and might keep the one with instructions that the machine does not have.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "keys.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LOFT_ISA
#define LOFT_ISA baseline
#endif

namespace loft::LOFT_ISA {

// Bytes of a vector and vector registers, by the instruction set's definition.
#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif
constexpr int kLineBytes = 64;  // of the L1 cache, on every machine that we know of
// Bytes of a row prefetched ahead. Measured (commit 67ddfee): 1024 cost 16 and 32 rows up to 30 %.
constexpr int64_t kAhead = 512;
// Most rows whose prefetched lines go to the L1 cache; those of more go to the L2 cache. Bound from
// the L1 cache: 512 bytes ahead of 16 rows are 8 KiB. Measured (commit a200ef1): 24 and more rows
// lose their lines again before they are used, which makes the median of 32 rows 1.6 times slower.
constexpr int kNearRows = 16;

template <typename T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, int kBytes = kVectorBytes>
using Vector = typename VectorOf<T, kBytes>::type;
template <typename V>
using Lane = std::remove_cv_t<std::remove_reference_t<decltype(V{}[0])>>;

template <typename V>
LOFT_INLINE V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V>
LOFT_INLINE void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// The smaller and the larger value of each lane, `b` where neither is (NaN, +0 and -0). GCC finds
// the one instruction for these forms where there is one.
template <typename V>
LOFT_INLINE V smaller(V a, V b) {
  return a < b ? a : b;
}
template <typename V>
LOFT_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

// The same instruction by its name. Hundreds of networks compile several times faster with one
// statement a minimum than with a comparison and a choice (measured, commit ac48e4a).
#define LOFT_NAMED(T, Register, prefix, suffix)                                               \
  LOFT_INLINE Vector<T> smaller(Vector<T> a, Vector<T> b) {                                   \
    return reinterpret_cast<Vector<T>>(                                                       \
        prefix##_min_##suffix(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b))); \
  }                                                                                           \
  LOFT_INLINE Vector<T> larger(Vector<T> a, Vector<T> b) {                                    \
    return reinterpret_cast<Vector<T>>(                                                       \
        prefix##_max_##suffix(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b))); \
  }
#if defined(__AVX512BW__)
LOFT_NAMED(int16_t, __m512i, _mm512, epi16)
LOFT_NAMED(int32_t, __m512i, _mm512, epi32)
LOFT_NAMED(int64_t, __m512i, _mm512, epi64)
LOFT_NAMED(float, __m512, _mm512, ps)
#elif defined(__AVX2__)
LOFT_NAMED(int16_t, __m256i, _mm256, epi16)
LOFT_NAMED(int32_t, __m256i, _mm256, epi32)
LOFT_NAMED(float, __m256, _mm256, ps)
#elif defined(__SSE2__)
LOFT_NAMED(int16_t, __m128i, _mm, epi16)
LOFT_NAMED(float, __m128, _mm, ps)
#endif
#undef LOFT_NAMED

// What the generated networks call.
template <typename E>
LOFT_INLINE void exchange(E& a, E& b) {
  const E low = smaller(a, b);
  b = larger(a, b);
  a = low;
}
template <typename E>
LOFT_INLINE void keep_min(E& a, E& b) {
  a = smaller(a, b);
}
template <typename E>
LOFT_INLINE void keep_max(E& a, E& b) {
  b = larger(a, b);
}

// Whether any lane of a comparison's result (0 or -1) is set.
template <typename M>
LOFT_INLINE bool any_lane(M mask) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(M) == 64) {
    return _mm512_movepi8_mask(bit_cast<__m512i>(mask)) != 0;
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(M) == 32) {
    return _mm256_movemask_epi8(bit_cast<__m256i>(mask)) != 0;
  }
#endif
  uint64_t words[sizeof(M) / 8];
  std::memcpy(words, &mask, sizeof(M));
  uint64_t all = 0;
  for (uint64_t word : words) all |= word;
  return all != 0;
}

// Fetch the line `ahead` bytes behind `from` into the L1 cache (kNear) or the L2 cache. The address
// may lie beyond the row: a prefetch never faults.
template <bool kNear>
LOFT_INLINE void prefetch(const char* from, int64_t ahead = kAhead) {
  const void* line = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead);
  __builtin_prefetch(line, 0, kNear ? 3 : 2);
}

template <typename Make, int... kIndex>
constexpr auto table_from(const Make& make, std::integer_sequence<int, kIndex...>) {
  return std::array{make(std::integral_constant<int, kIndex>{})...};
}

// The array of make(0) .. make(kCount - 1), each index known when it is compiled: how a number that
// is known only when a job runs chooses among templates. For a network of each number of rows:
//   constexpr auto table = table_of<32>([](auto row) -> Run { return run_sorted<row + 1>; });
//   const Run run = table[num_rows - 1];  // run_sorted<num_rows>
template <int kCount, typename Make>
constexpr auto table_of(const Make& make) {
  return table_from(make, std::make_integer_sequence<int, kCount>{});
}

}  // namespace loft::LOFT_ISA
