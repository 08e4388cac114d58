// Layer 3. Messages of compact floats: checks, their length, the best instruction set.

#include "wire/messages.h"

#include <cstring>
#include <limits>
#include <stdexcept>

#include "levels.h"
#include "wire/compact.h"

namespace loft {
namespace {

constexpr int64_t kLengthBytes = sizeof(int64_t);  // at the beginning of a message
constexpr int64_t kMostValues = std::numeric_limits<int64_t>::max() / 8;  // rooms fit an int64

void check_kind(int64_t count, DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    throw std::invalid_argument("dtype=" + std::to_string(static_cast<int>(dtype)) +
                                " has no messages: float32, float16 and bfloat16 have");
  }
  if (count < 0 || count > kMostValues) {
    throw std::invalid_argument("count=" + std::to_string(count) + " must be from 0 to " +
                                std::to_string(kMostValues));
  }
}

void check_places(const void* values, int64_t count, const void* message) {
  if ((values || count == 0) && message) return;
  throw std::invalid_argument("values or their message lie nowhere");
}

}  // namespace

int64_t compact_room(int64_t count, DType dtype) {
  check_kind(count, dtype);
  return kLengthBytes + count * size_of(dtype) + count / kCompactValues * kCompactHeadBytes;
}

int64_t compact_cpu(const void* values, int64_t count, DType dtype, void* out,
                    const std::string& isa) {
  check_kind(count, dtype);
  check_places(values, count, out);
  char* body = static_cast<char*>(out) + kLengthBytes;
  const int64_t length = kLengthBytes + level_for(isa).codec().compact(
                                            dtype, static_cast<const char*>(values), count, body);
  std::memcpy(out, &length, kLengthBytes);
  return length;
}

bool expand_cpu(const void* from, int64_t room, void* values, int64_t count, DType dtype,
                const std::string& isa) {
  check_kind(count, dtype);
  check_places(values, count, from);
  const BlockCodec& codec = level_for(isa).codec();
  int64_t length = 0;
  if (room >= kLengthBytes) std::memcpy(&length, from, kLengthBytes);
  if (length < kLengthBytes || length > room) return false;
  const char* body = static_cast<const char*>(from) + kLengthBytes;
  return codec.expand(dtype, body, length - kLengthBytes, static_cast<char*>(values), count);
}

}  // namespace loft
