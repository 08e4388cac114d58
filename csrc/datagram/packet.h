// Layer 0. What travels in a datagram between two ranks: a header that is authenticated and can be
// read, what is sealed, and a tag.
#pragma once

#include <cstdint>

#include "packet_codec.h"

namespace loft::datagram {

using Nanos = int64_t;  // of a clock that never goes back
constexpr Nanos kMicro = 1000, kMilli = 1000 * kMicro, kSecond = 1000 * kMilli;

enum class Kind : uint8_t {
  kData = 1,   // a block of an operation's values
  kAck = 2,    // which packets have come; is not acknowledged itself
  kStart = 3,  // the sender has begun an operation: how many bytes its row has
  kEnd = 4,    // every block has been sent once
  kClose = 5,  // the owner waits for no more of a row
  kPing = 6,   // nothing: its acknowledgement tells which packets before it are lost
};

// Values in this machine's byte order, as the values of gradients are.
struct Header {
  uint8_t version;
  Kind kind;
  uint8_t flags;    // of data
  uint8_t source;   // low bits of the sender's rank: the key says who it is
  uint32_t world;   // of the job's ranks, by chance
  uint64_t number;  // of the packet on its way from this sender to this receiver: the nonce
  uint64_t operation;
  uint32_t block;
  uint32_t spare;  // 0
};
static_assert(sizeof(Header) == 32, "layout of the wire");

constexpr uint8_t kVersion = 1;
// Every block of the row has been sent at least once; values are in fewer bytes (packet_codec.h).
constexpr uint8_t kIsAllSent = 1, kIsCompact = 2;
// 1,280 bytes hold whole values of every dtype. With the IP and UDP headers of 28 (IPv6: 48) a
// packet has 1,356 (1,376): it fits Ethernet's 1,500, and a WireGuard tunnel in it.
constexpr int kHeaderBytes = sizeof(Header), kTagBytes = 16, kBlockBytes = kPacketBlockBytes;
constexpr int kPacketBytes = kHeaderBytes + kBlockBytes + kTagBytes;

// What an acknowledgement says: the highest number that has come, and which of those before it.
constexpr int kAckedPackets = 256;
struct Ack {
  uint64_t highest;
  uint32_t arrived_us;                  // when it came, by the receiver's clock
  uint32_t held_us;                     // how long it has waited for this acknowledgement
  uint64_t before[kAckedPackets / 64];  // bit i: number highest - 1 - i has come
};
static_assert(sizeof(Ack) == 48, "layout of the wire");

}  // namespace loft::datagram
