// Layer 2. The codec of one instruction set for compact floats: all that messages.cpp sees of it.
#pragma once

#include <cstdint>

#include "packet_codec.h"
#include "rules.h"

namespace loft {

// A block has so many values, and a head of so many bytes.
constexpr int64_t kCompactValues = 512, kCompactHeadBytes = 4;

struct BlockCodec {
  // Writes values in fewer bytes; returns how many.
  int64_t (*compact)(DType dtype, const char* values, int64_t count, char* out);
  // Says whether so many bytes can be read as so many values, which it writes.
  bool (*expand)(DType dtype, const char* from, int64_t bytes, char* values, int64_t count);
  PacketCodec of_packets;
};

// Every level has one; levels.h finds it.
namespace baseline {
const BlockCodec& codec();
}
namespace avx2 {
const BlockCodec& codec();
}
namespace avx512 {
const BlockCodec& codec();
}

}  // namespace loft
