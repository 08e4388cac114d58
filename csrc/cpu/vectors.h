// Layer 0. Vectors of one instruction set: types, loads, compare-exchange. Compiled once a level;
// LOFT_ISA names the namespace, so that the levels' templates never share a symbol.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules.h"

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

namespace loft {
namespace LOFT_ISA {

#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLineBytes = 64;
constexpr int64_t kAhead = 512;  // bytes of each row fetched ahead of their use

template <typename T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, int kBytes = kVectorBytes>
using Vector = typename VectorOf<T, kBytes>::type;

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

template <typename To, typename From>
LOFT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// GCC turns these forms into one minimum and one maximum instruction where there is one.
template <typename E>
LOFT_INLINE void exchange(E& a, E& b) {
  const E low = a < b ? a : b;
  const E high = a > b ? a : b;
  a = low;
  b = high;
}
template <typename E>
LOFT_INLINE void keep_min(E& a, E& b) {
  a = a < b ? a : b;
}
template <typename E>
LOFT_INLINE void keep_max(E& a, E& b) {
  b = a > b ? a : b;
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

// Rows whose fetched lines the first cache has room for.
constexpr int kNearRows = 16;

// Fetch the line that lies `ahead` bytes beyond `from`, into the first cache or the second; never
// faults.
template <bool kNear>
LOFT_INLINE void prefetch(const char* from, int64_t ahead = kAhead) {
  const void* line = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead);
  __builtin_prefetch(line, 0, kNear ? 3 : 2);
}

}  // namespace LOFT_ISA
}  // namespace loft
