// Layer 0. Values of a packet in fewer bytes: what the extension of datagrams takes of the other
// one, where the loops are that each instruction set has.
#pragma once

namespace loft {

constexpr int kPacketBlockBytes = 1280;  // of values in a packet; whole ones of every dtype

// `dtype` is a code of rules.h that has messages: float32, float16 or bfloat16.
struct PacketCodec {
  // Writes kPacketBlockBytes of values in fewer bytes, or 4 more; returns how many.
  int (*compact)(int dtype, const char* values, char* out);
  // Reads so many bytes as so many values; false where they cannot be read.
  bool (*expand)(int dtype, const char* from, int bytes, char* values);
};

constexpr const char* kPacketCodecName = "loft.PacketCodec";

}  // namespace loft
