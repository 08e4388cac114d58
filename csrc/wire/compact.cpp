// Layer 2. Floats in fewer bytes and back, bit for bit, for links slower than memory.
//
// Signs and mantissas of a gradient's values look random, but exponents lie close together: three
// of four normal values have one of three exponents. So a block of 512 says one exponent, `top`,
// and for each value how far below it lies, in 3 or 4 bits. What does not fit in there is an
// exception, and written after these. float32 takes 27.3 of 32 bits then, bfloat16 11.3 and
// float16 14.3 of 16 (normal values). The entropy of exponents is 0.7 bits less, which only a code
// whose words have different lengths reaches.
//
// What is written, numbers in this machine's byte order:
//   block by block, of 512 values:
//     BlockHead               4 bytes
//     exponents               0, 192 or 256 bytes, by BlockHead::bits
//     exceptions              BlockHead::exceptions bytes
//     signs and mantissas     Split<kDType>::kRestBytes
//   or, after a BlockHead, where that is shorter: the values as they are
//   values that are left      as they are
//
// 3 and 4 bits of 512 values are laid out so that loops over 64 lanes are whole vectors: lane j of
// byte group g has those of values j, 64 + j, 128 + j ..., from the lowest bit on.
//
// Where a block travels in a packet of its own it has as many values as fit there, and other
// widths.
//
// Plain loops, which compilers turn into vectors of this instruction set; but exceptions are found
// by masks: one in forty values is one.

#include "wire/compact.h"

#include <cstdint>
#include <cstring>

#include "cpu/vectors.h"

namespace loft::LOFT_ISA {
namespace {

constexpr int kTurns = 8;  // a block has so many times its width

struct BlockHead {
  uint8_t bits;  // of an exponent: 0 where all are `top`, 3 or 4; or kAsTheyAre
  uint8_t top;
  uint16_t exceptions;
};
static_assert(sizeof(BlockHead) == kCompactHeadBytes, "compact_room counts them");

// An exponent that is `below` a block's top, in 3 bits: 0 to 6 as it is, 7 for an exception; in 4:
// 0 to 13 as it is, 14 for exponent 0, as zeros have it, 15 for an exception.
constexpr int kMost3 = 6, kOther3 = 7, kMost4 = 13, kZero4 = 14, kOther4 = 15;
constexpr uint8_t kAsTheyAre = 255;
constexpr int kTops = 3;  // of the largest exponents, which are tried as a block's top; a choice

// --- eight times kWidth numbers of 3 and 4 bits

template <int kWidth>
void put3(const uint8_t* from, uint8_t* to) {
  for (int j = 0; j < kWidth; ++j) {
    const uint8_t* c = from + j;
    const unsigned c2 = c[2 * kWidth], c5 = c[5 * kWidth];
    to[j] = static_cast<uint8_t>(c[0] | c[kWidth] << 3 | c2 << 6);
    to[j + kWidth] =
        static_cast<uint8_t>(c2 >> 2 | c[3 * kWidth] << 1 | c[4 * kWidth] << 4 | c5 << 7);
    to[j + 2 * kWidth] = static_cast<uint8_t>(c5 >> 1 | c[6 * kWidth] << 2 | c[7 * kWidth] << 5);
  }
}

template <int kWidth>
void get3(const uint8_t* from, uint8_t* to) {
  for (int j = 0; j < kWidth; ++j) {
    const unsigned a = from[j], b = from[j + kWidth], c = from[j + 2 * kWidth];
    const unsigned of[kTurns] = {a,      a >> 3,          a >> 6 | b << 2, b >> 1,
                                 b >> 4, b >> 7 | c << 1, c >> 2,          c >> 5};
    for (int turn = 0; turn < kTurns; ++turn) {
      to[j + turn * kWidth] = static_cast<uint8_t>(of[turn] & 7);
    }
  }
}

template <int kWidth>
void put4(const uint8_t* from, uint8_t* to) {
  for (int pair = 0; pair < kTurns / 2; ++pair, from += 2 * kWidth, to += kWidth) {
    for (int j = 0; j < kWidth; ++j) to[j] = static_cast<uint8_t>(from[j] | from[j + kWidth] << 4);
  }
}

template <int kWidth>
void get4(const uint8_t* from, uint8_t* to) {
  for (int pair = 0; pair < kTurns / 2; ++pair, from += kWidth, to += 2 * kWidth) {
    for (int j = 0; j < kWidth; ++j) {
      to[j] = from[j] & 15;
      to[j + kWidth] = from[j] >> 4;
    }
  }
}

// --- exceptions

// Which of 64 codes are `wanted`, the first in the lowest bit.
uint64_t mask_of(const uint8_t* codes, uint8_t wanted) {
#if defined(__AVX512BW__)
  return _mm512_cmpeq_epi8_mask(load<__m512i>(codes), _mm512_set1_epi8(static_cast<char>(wanted)));
#elif defined(__AVX2__)
  const __m256i all = _mm256_set1_epi8(static_cast<char>(wanted));
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += 32) {
    const __m256i is_equal = _mm256_cmpeq_epi8(load<__m256i>(codes + at), all);
    mask |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(is_equal))} << at;
  }
  return mask;
#elif defined(__SSE2__)
  const __m128i all = _mm_set1_epi8(static_cast<char>(wanted));
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += 16) {
    const __m128i is_equal = _mm_cmpeq_epi8(load<__m128i>(codes + at), all);
    mask |= uint64_t{static_cast<uint32_t>(_mm_movemask_epi8(is_equal))} << at;
  }
  return mask;
#else
  uint64_t mask = 0;
  for (int at = 0; at < 64; ++at) mask |= uint64_t{codes[at] == wanted} << at;
  return mask;
#endif
}

// Calls body(i) for every value whose code is `wanted`, in their order.
template <int kValues, typename Body>
void for_code(const uint8_t* codes, uint8_t wanted, const Body& body) {
  static_assert(kValues % 64 == 0, "masks are whole");
  for (int first = 0; first < kValues; first += 64) {
    for (uint64_t mask = mask_of(codes + first, wanted); mask != 0; mask &= mask - 1) {
      body(first + __builtin_ctzll(mask));
    }
  }
}

// --- values, as exponents and the rest

template <DType kDType, int kWidth>
struct Split;

template <int kWidth>
struct Split<DType::kFloat32, kWidth> {
  using Bits = uint32_t;
  static constexpr int kValues = kTurns * kWidth;
  static constexpr int kRestBytes = 3 * kValues;
  static void apart(const Bits* from, uint8_t* exponents, uint8_t* rest) {
    uint16_t low[kValues];
    uint8_t* high = rest + 2 * kValues;
    for (int i = 0; i < kValues; ++i) {
      low[i] = static_cast<uint16_t>(from[i]);
      high[i] = static_cast<uint8_t>((from[i] >> 16 & 0x7f) | (from[i] >> 24 & 0x80));
      exponents[i] = static_cast<uint8_t>(from[i] >> 23);
    }
    std::memcpy(rest, low, sizeof(low));
  }
  static void join(const uint8_t* exponents, const uint8_t* rest, Bits* to) {
    uint16_t low[kValues];
    std::memcpy(low, rest, sizeof(low));
    const uint8_t* high = rest + 2 * kValues;
    for (int i = 0; i < kValues; ++i) {
      const Bits h = high[i], e = exponents[i];
      to[i] = low[i] | (h & 0x7f) << 16 | (h & 0x80) << 24 | e << 23;
    }
  }
};

template <int kWidth>
struct Split<DType::kBFloat16, kWidth> {
  using Bits = uint16_t;
  static constexpr int kValues = kTurns * kWidth;
  static constexpr int kRestBytes = kValues;
  static void apart(const Bits* from, uint8_t* exponents, uint8_t* rest) {
    for (int i = 0; i < kValues; ++i) {
      rest[i] = static_cast<uint8_t>((from[i] & 0x7f) | (from[i] >> 8 & 0x80));
      exponents[i] = static_cast<uint8_t>(from[i] >> 7);
    }
  }
  static void join(const uint8_t* exponents, const uint8_t* rest, Bits* to) {
    for (int i = 0; i < kValues; ++i) {
      to[i] = static_cast<Bits>((rest[i] & 0x7f) | (rest[i] & 0x80) << 8 | exponents[i] << 7);
    }
  }
};

template <int kWidth>
struct Split<DType::kFloat16, kWidth> {
  using Bits = uint16_t;
  static constexpr int kValues = kTurns * kWidth;
  static constexpr int kRestBytes = kValues + 3 * kWidth;
  static void apart(const Bits* from, uint8_t* exponents, uint8_t* rest) {
    uint8_t high[kValues];  // two bits of the mantissa, and the sign
    for (int i = 0; i < kValues; ++i) {
      rest[i] = static_cast<uint8_t>(from[i]);
      high[i] = static_cast<uint8_t>((from[i] >> 8 & 3) | (from[i] >> 13 & 4));
      exponents[i] = static_cast<uint8_t>(from[i] >> 10 & 0x1f);
    }
    put3<kWidth>(high, rest + kValues);
  }
  static void join(const uint8_t* exponents, const uint8_t* rest, Bits* to) {
    uint8_t high[kValues];
    get3<kWidth>(rest + kValues, high);
    for (int i = 0; i < kValues; ++i) {
      to[i] = static_cast<Bits>(rest[i] | (high[i] & 3) << 8 | (high[i] & 4) << 13 |
                                exponents[i] << 10);
    }
  }
};

// --- a block

// How many exponents are not in [top - most, top]; of those `kKeepsZero` lets 0 pass.
template <int kWidth, bool kKeepsZero>
int count_outside(const uint8_t* exponents, int top, int most) {
  uint8_t lanes[kWidth] = {};
  for (int turn = 0; turn < kTurns; ++turn, exponents += kWidth) {
    for (int j = 0; j < kWidth; ++j) {
      const bool is_out = static_cast<uint8_t>(top - exponents[j]) > most;
      lanes[j] = static_cast<uint8_t>(lanes[j] + (is_out & !(kKeepsZero && exponents[j] == 0)));
    }
  }
  int sum = 0;
  for (int j = 0; j < kWidth; ++j) sum += lanes[j];
  return sum;
}

// The head that takes the fewest bytes, fewer than `best_bytes` for exponents and exceptions.
template <int kWidth>
BlockHead head_for(const uint8_t* exponents, int best_bytes) {
  constexpr int kValues = kTurns * kWidth, kBytes3 = 3 * kWidth, kBytes4 = 4 * kWidth;
  uint8_t most = 0, least = 255;
  for (int i = 0; i < kValues; ++i) {
    most = exponents[i] > most ? exponents[i] : most;
    least = exponents[i] < least ? exponents[i] : least;
  }
  if (most == least) return {0, most, 0};
  BlockHead best{kAsTheyAre, 0, 0};
  for (int top = most; top > most - kTops && top > 0; --top) {
    const int out3 = count_outside<kWidth, false>(exponents, top, kMost3);
    if (kBytes3 + out3 < best_bytes) {
      best_bytes = kBytes3 + out3;
      best = {3, static_cast<uint8_t>(top), static_cast<uint16_t>(out3)};
    }
    if (kBytes4 >= best_bytes) continue;
    const int out4 = count_outside<kWidth, true>(exponents, top, kMost4);
    if (kBytes4 + out4 < best_bytes) {
      best_bytes = kBytes4 + out4;
      best = {4, static_cast<uint8_t>(top), static_cast<uint16_t>(out4)};
    }
  }
  return best;
}

// Writes exponents and exceptions by a head; returns how many bytes.
template <int kWidth>
int put_exponents(const BlockHead& head, const uint8_t* exponents, uint8_t* to) {
  constexpr int kValues = kTurns * kWidth;
  if (head.bits == 0) return 0;
  uint8_t codes[kValues];
  const bool is3 = head.bits == 3;
  const uint8_t other = is3 ? kOther3 : kOther4;
  if (is3) {
    for (int i = 0; i < kValues; ++i) {
      const auto below = static_cast<uint8_t>(head.top - exponents[i]);
      codes[i] = below > kMost3 ? kOther3 : below;
    }
    put3<kWidth>(codes, to);
  } else {
    for (int i = 0; i < kValues; ++i) {
      const auto below = static_cast<uint8_t>(head.top - exponents[i]);
      const uint8_t code = below > kMost4 ? kOther4 : below;
      codes[i] = exponents[i] == 0 ? kZero4 : code;
    }
    put4<kWidth>(codes, to);
  }
  const int bytes = (is3 ? 3 : 4) * kWidth;
  if (head.exceptions == 0) return bytes;
  uint8_t* next = to + bytes;
  for_code<kValues>(codes, other, [&](int i) { *next++ = exponents[i]; });
  return static_cast<int>(next - to);
}

// Reads what put_exponents has written; false where that cannot be.
template <int kWidth>
bool get_exponents(const BlockHead& head, const uint8_t* from, uint8_t* exponents) {
  constexpr int kValues = kTurns * kWidth;
  if (head.bits == 0) {
    std::memset(exponents, head.top, kValues);
    return true;
  }
  uint8_t codes[kValues];
  const bool is3 = head.bits == 3;
  const uint8_t other = is3 ? kOther3 : kOther4;
  is3 ? get3<kWidth>(from, codes) : get4<kWidth>(from, codes);
  for (int i = 0; i < kValues; ++i) exponents[i] = static_cast<uint8_t>(head.top - codes[i]);
  if (!is3) {
    for (int i = 0; i < kValues; ++i) exponents[i] = codes[i] == kZero4 ? 0 : exponents[i];
  }
  // Whatever a peer has sent: no more exceptions are read than it says that there are.
  const uint8_t* next = from + (is3 ? 3 : 4) * kWidth;
  const uint8_t* end = next + head.exceptions;
  bool is_short = false;
  for_code<kValues>(codes, other, [&](int i) {
    if (next == end) {
      is_short = true;
    } else {
      exponents[i] = *next++;
    }
  });
  return next == end && !is_short;
}

template <DType kDType, int kWidth>
int64_t compact_as(const char* values, int64_t count, char* out) {
  using S = Split<kDType, kWidth>;
  constexpr int kValues = S::kValues;
  typename S::Bits bits[kValues];
  uint8_t exponents[kValues], rest[S::kRestBytes];
  char* to = out;
  for (; count >= kValues; count -= kValues, values += sizeof(bits)) {
    std::memcpy(bits, values, sizeof(bits));  // rows need not be aligned
    S::apart(bits, exponents, rest);
    const BlockHead head =
        head_for<kWidth>(exponents, static_cast<int>(sizeof(bits)) - S::kRestBytes);
    std::memcpy(to, &head, sizeof(head));
    to += sizeof(head);
    if (head.bits == kAsTheyAre) {
      std::memcpy(to, bits, sizeof(bits));
      to += sizeof(bits);
      continue;
    }
    to += put_exponents<kWidth>(head, exponents, reinterpret_cast<uint8_t*>(to));
    std::memcpy(to, rest, sizeof(rest));
    to += sizeof(rest);
  }
  const auto left = static_cast<size_t>(count) * sizeof(typename S::Bits);
  if (left > 0) std::memcpy(to, values, left);
  return to + left - out;
}

template <DType kDType, int kWidth>
bool expand_as(const char* from, int64_t bytes, char* values, int64_t count) {
  using S = Split<kDType, kWidth>;
  constexpr int kValues = S::kValues;
  typename S::Bits bits[kValues];
  constexpr int64_t kBytes = sizeof(bits);
  uint8_t exponents[kValues];
  const char* end = from + bytes;
  for (; count >= kValues; count -= kValues, values += kBytes) {
    BlockHead head;
    if (end - from < static_cast<int64_t>(sizeof(head))) return false;
    std::memcpy(&head, from, sizeof(head));
    from += sizeof(head);
    if (head.bits == kAsTheyAre) {
      if (end - from < kBytes) return false;
      std::memcpy(values, from, kBytes);
      from += kBytes;
      continue;
    }
    const bool is_coded = head.bits == 3 || head.bits == 4;
    if (!is_coded && head.bits != 0) return false;
    if (head.exceptions > (is_coded ? kValues : 0)) return false;
    const int exponent_bytes = head.bits * kWidth + head.exceptions;
    if (end - from < exponent_bytes + S::kRestBytes) return false;
    if (!get_exponents<kWidth>(head, reinterpret_cast<const uint8_t*>(from), exponents))
      return false;
    S::join(exponents, reinterpret_cast<const uint8_t*>(from + exponent_bytes), bits);
    from += exponent_bytes + S::kRestBytes;
    std::memcpy(values, bits, sizeof(bits));
  }
  const int64_t left = count * static_cast<int64_t>(sizeof(typename S::Bits));
  if (end - from != left) return false;
  if (left > 0) std::memcpy(values, from, static_cast<size_t>(left));
  return true;
}

constexpr int kBlockWidth = kCompactValues / kTurns;
// What has the bytes of a packet's values is a block of so many values.
constexpr int kPacketWidth = kPacketBlockBytes / 4 / kTurns;

template <int kWidth, int kWidth16>
int64_t compact(DType dtype, const char* values, int64_t count, char* out) {
  switch (dtype) {
    case DType::kFloat32: return compact_as<DType::kFloat32, kWidth>(values, count, out);
    case DType::kFloat16: return compact_as<DType::kFloat16, kWidth16>(values, count, out);
    case DType::kBFloat16: return compact_as<DType::kBFloat16, kWidth16>(values, count, out);
    case DType::kFloat64: break;  // refused before
  }
  return 0;
}

template <int kWidth, int kWidth16>
bool expand(DType dtype, const char* from, int64_t bytes, char* values, int64_t count) {
  switch (dtype) {
    case DType::kFloat32: return expand_as<DType::kFloat32, kWidth>(from, bytes, values, count);
    case DType::kFloat16: return expand_as<DType::kFloat16, kWidth16>(from, bytes, values, count);
    case DType::kBFloat16: return expand_as<DType::kBFloat16, kWidth16>(from, bytes, values, count);
    case DType::kFloat64: break;
  }
  return false;
}

int compact_packet(int dtype, const char* values, char* out) {
  const auto kind = static_cast<DType>(dtype);
  const int64_t count = kPacketBlockBytes / size_of(kind);
  return static_cast<int>(compact<kPacketWidth, 2 * kPacketWidth>(kind, values, count, out));
}

bool expand_packet(int dtype, const char* from, int bytes, char* values) {
  const auto kind = static_cast<DType>(dtype);
  const int64_t count = kPacketBlockBytes / size_of(kind);
  return expand<kPacketWidth, 2 * kPacketWidth>(kind, from, bytes, values, count);
}

}  // namespace

const BlockCodec& codec() {
  static const BlockCodec both{compact<kBlockWidth, kBlockWidth>,
                               expand<kBlockWidth, kBlockWidth>,
                               {compact_packet, expand_packet}};
  return both;
}

}  // namespace loft::LOFT_ISA
