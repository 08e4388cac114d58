// Layer 3. See endpoint.h.

#include "datagram/endpoint.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "datagram/early_close.h"

namespace loft::datagram {
namespace {

// Operations that are over and still known, so that what comes late is not taken for early.
constexpr size_t kMostFinished = 8192;
// Data that has come before this rank has said where to write it to.
constexpr uint64_t kMostStashed = 32 << 20, kStashedBytes = 256;  // and of each packet's place
// Packets of one link that go one after the other: what goes in so long, up to what one call of the
// kernel takes (GSO: 64 KiB).
constexpr Nanos kTurn = 200 * kMicro;
constexpr Nanos kShortestRest = 50 * kMicro, kLongestRest = kMilli;
constexpr int kRests = 64;          // of a round trip,
constexpr double kRestPackets = 8;  // or what so many packets take, where that is longer
constexpr double kTurnBytes = 32 * kPacketBytes;
constexpr uint32_t kSmallBlocks = 4;
constexpr Nanos kShortLink = 5 * kMilli, kShortSlack = 30 * kMilli, kLongSlack = 100 * kMilli;
constexpr uint64_t kTellingBytes = 8 * kBlockBytes;  // fewer say what was sent, not what can be
constexpr double kShareOfWindows = 1.5;  // of links that have packets under way, for each other
constexpr double kNewest = 0.1;  // what one row counts for in the mean share of a link's rows

}  // namespace

Endpoint::Endpoint(int rank, int num_ranks, uint32_t world, double most_bytes_per_s)
    : rank_(rank),
      num_ranks_(num_ranks),
      world_(world),
      most_bytes_per_s_(most_bytes_per_s),
      turn_((rank + 1) % std::max(1, num_ranks)) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument("rank=" + std::to_string(rank) + " must be >= 0 and < " +
                                std::to_string(num_ranks));
  }
  for (int peer = 0; peer < num_ranks; ++peer) ways_.emplace_back();
}

// --- what this rank asks for

Endpoint::Operation& Endpoint::prepared(const Exchange& exchange) {
  if (exchange.rooms.size() != static_cast<size_t>(num_ranks_)) {
    throw std::invalid_argument("there is one room a rank");
  }
  auto& slot = operations_[exchange.operation];
  if (!slot) {
    slot = std::make_unique<Operation>();
    Operation& made = *slot;
    made.what = exchange;
    made.num_blocks = static_cast<uint32_t>((exchange.num_bytes + kBlockBytes - 1) / kBlockBytes);
    made.in.resize(num_ranks_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const bool takes_part = peer != rank_ && exchange.rooms[peer] && made.num_blocks > 0;
      made.in[peer].is_closed = !takes_part;
      if (takes_part) made.in[peer].has.assign(made.num_blocks, 0);
    }
  }
  if (slot->is_begun) throw std::invalid_argument("an exchange of that number is under way");
  return *slot;
}

void Endpoint::set_codec(const PacketCodec& codec, bool sends) {
  codec_ = codec;
  is_compact_ = sends;
}

void Endpoint::expect(Nanos now, const Exchange& exchange) {
  if (finished_.count(exchange.operation)) throw std::invalid_argument("that exchange is over");
  Exchange only_rooms;
  only_rooms.operation = exchange.operation;
  only_rooms.rooms = exchange.rooms;
  only_rooms.num_bytes = exchange.num_bytes;
  only_rooms.dtype = exchange.dtype;
  prepared(only_rooms);
  unstash(now, exchange.operation);
}

void Endpoint::begin(Nanos now, const Exchange& exchange) {
  if (finished_.count(exchange.operation)) throw std::invalid_argument("that exchange is over");
  if (exchange.sends.size() != static_cast<size_t>(num_ranks_)) {
    throw std::invalid_argument("there is one place to send from a rank");
  }
  const uint64_t num_blocks = (exchange.num_bytes + kBlockBytes - 1) / kBlockBytes;
  if ((!exchange.counts.empty() && exchange.counts.size() != exchange.rooms.size()) ||
      (!exchange.critical.empty() &&
       exchange.critical.size() != exchange.rooms.size() * num_blocks)) {
    throw std::invalid_argument("counts are by rank, and what is critical by rank and block");
  }
  Operation& operation = prepared(exchange);
  if (operation.what.num_bytes != exchange.num_bytes || operation.what.rooms != exchange.rooms) {
    throw std::invalid_argument("an exchange has other bytes or rooms than were expected");
  }
  operation.what = exchange;
  operation.is_begun = true;
  order_.push_back(exchange.operation);
  if (exchange.copies) {
    // What is sent is often the same for all, and copied once.
    std::vector<std::pair<const char*, uint64_t>> places;
    uint64_t total = 0;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_ || !exchange.rooms[peer]) continue;
      bool is_known = false;
      for (const auto& place : places) is_known |= place.first == exchange.sends[peer];
      if (is_known) continue;
      places.emplace_back(exchange.sends[peer], total);
      total += exchange.num_bytes;
    }
    operation.copy.reset(new char[std::max<uint64_t>(total, 1)]);
    for (const auto& [from, at] : places) {
      std::memcpy(operation.copy.get() + at, from, exchange.num_bytes);
      for (auto& each : operation.what.sends) {
        if (each == from) each = operation.copy.get() + at;
      }
    }
  }
  operation.out.resize(num_ranks_);
  operation.num_missing.assign(operation.num_blocks, 0);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    Outgoing& out = operation.out[peer];
    out.is_closed = peer == rank_ || !exchange.rooms[peer] || operation.num_blocks == 0;
    if (out.is_closed) continue;
    out.blocks.assign(operation.num_blocks, Block::kUnsent);
    out.num_unsent = out.num_left = operation.num_blocks;
    ways_[peer].controls.push_back({Kind::kStart, exchange.operation, exchange.num_bytes});
    Incoming& in = operation.in[peer];
    for (uint32_t block = 0; block < operation.num_blocks; ++block) {
      in.num_critical_left += is_critical(operation, rank_, block) && !in.has[block];
    }
  }
  unstash(now, exchange.operation);
  for (int peer = 0; peer < num_ranks_; ++peer) try_to_close(now, peer, operation);
  forget_if_over(exchange.operation);
}

void Endpoint::unstash(Nanos now, uint64_t number) {
  const auto found = stash_.find(number);
  if (found == stash_.end()) return;
  std::vector<Stashed> early = std::move(found->second);
  stash_.erase(found);
  Operation& operation = *operations_.at(number);
  for (Stashed& each : early) {
    stashed_bytes_ -= each.payload.size() + kStashedBytes;
    const int num_bytes = static_cast<int>(each.payload.size());
    if (each.header.kind == Kind::kData) {
      take_data(now, each.peer, operation, each.header, each.payload.data(), num_bytes);
    } else {
      take_control(now, each.peer, operation, each.header, each.payload.data(), num_bytes);
    }
  }
}

bool Endpoint::stash(int peer, const Header& header, const unsigned char* payload, int num_bytes) {
  const uint64_t bytes = static_cast<uint64_t>(num_bytes) + kStashedBytes;
  if (stashed_bytes_ + bytes > kMostStashed) return false;
  stashed_bytes_ += bytes;
  stash_[header.operation].push_back({peer, header, {payload, payload + num_bytes}});
  return true;
}

bool Endpoint::Operation::has_all_rows() const {
  return std::all_of(in.begin(), in.end(), [](const Incoming& row) { return row.is_closed; });
}

bool Endpoint::Operation::has_sent_all() const {
  return std::all_of(out.begin(), out.end(), [](const Outgoing& row) { return row.is_over(); });
}

bool Endpoint::is_done(uint64_t number) const {
  const auto found = operations_.find(number);
  if (found == operations_.end()) throw std::invalid_argument("no exchange of that number");
  const Operation& operation = *found->second;
  if (!operation.error.empty()) return true;
  const bool lingers = operation.what.lingers || operation.what.copies;
  return operation.is_begun && operation.has_all_rows() && (lingers || operation.has_sent_all());
}

Outcome Endpoint::take(uint64_t number) {
  Operation& operation = *operations_.at(number);
  Outcome outcome;
  outcome.error = operation.error;
  const bool has_holes = std::any_of(operation.num_missing.begin(), operation.num_missing.end(),
                                     [](uint16_t rows) { return rows > 0; });
  if (outcome.error.empty() && (has_holes || operation.what.counts.size())) {
    bool is_any = false;
    outcome.missing.assign(static_cast<size_t>(num_ranks_) * operation.num_blocks, 0);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const Incoming& in = operation.in[peer];
      if (in.has.empty()) continue;
      for (uint32_t block = 0; block < operation.num_blocks; ++block) {
        const uint8_t is_missing = !in.has[block];
        is_any |= is_missing;
        outcome.missing[static_cast<size_t>(peer) * operation.num_blocks + block] = is_missing;
      }
    }
    if (!is_any) outcome.missing.clear();
  }
  operation.is_taken = true;
  forget_if_over(number);
  return outcome;
}

std::vector<uint64_t> Endpoint::take_released() { return std::exchange(released_, {}); }

void Endpoint::forget_if_over(uint64_t number) {
  const auto found = operations_.find(number);
  if (found == operations_.end()) return;
  Operation& operation = *found->second;
  const bool is_over = operation.is_begun && operation.has_all_rows() && operation.has_sent_all();
  if (!is_over || !operation.is_taken) return;
  order_.remove(number);
  operations_.erase(found);
  released_.push_back(number);
  finished_.insert(number);
  finished_order_.push_back(number);
  if (finished_order_.size() > kMostFinished) {
    finished_.erase(finished_order_.front());
    finished_order_.pop_front();
  }
}

uint32_t Endpoint::bytes_of(const Operation& operation, uint32_t block) const {
  const uint64_t begin = static_cast<uint64_t>(block) * kBlockBytes;
  return static_cast<uint32_t>(std::min<uint64_t>(kBlockBytes, operation.what.num_bytes - begin));
}

bool Endpoint::is_critical(const Operation& operation, int owner, uint32_t block) const {
  if (!operation.what.is_tolerant) return true;
  const auto& critical = operation.what.critical;
  return !critical.empty() && critical[static_cast<size_t>(owner) * operation.num_blocks + block];
}

// --- what comes

bool Endpoint::received(Nanos now, int peer, const Header& header, const unsigned char* payload,
                        int num_bytes) {
  Way& way = ways_[peer];
  if (header.version != kVersion || header.world != world_ || !way.link.is_new(header.number)) {
    ++way.link.counts.packets_refused;
    return false;
  }
  if (header.kind == Kind::kAck) {
    if (num_bytes != sizeof(Ack)) return false;
    way.link.received(now, header.number, false);
    Ack ack;
    std::memcpy(&ack, payload, sizeof ack);
    way.link.time(now, ack);
    const Nanos of_all = queue_of_all(now),
                own = std::max<Nanos>(0, way.link.rate.queue() - of_all);
    way.link.acknowledged(
        now, ack, own, [&](const Flying& packet) { arrived(now, peer, packet, of_all); },
        [&](const Flying& packet) { lost(peer, packet); });
    return true;
  }
  const bool is_known_kind = header.kind == Kind::kData || header.kind == Kind::kStart ||
                             header.kind == Kind::kEnd || header.kind == Kind::kClose ||
                             header.kind == Kind::kPing;
  if (!is_known_kind) {
    ++way.link.counts.packets_refused;
    return false;
  }
  if (header.kind != Kind::kPing && !finished_.count(header.operation)) {
    const auto found = operations_.find(header.operation);
    const bool is_early = found == operations_.end();
    if (is_early) {
      // Not acknowledged where there is no room: its sender sends it again.
      if (!stash(peer, header, payload, num_bytes)) {
        way.link.answer(now);
        return false;
      }
    } else if (header.kind == Kind::kData) {
      take_data(now, peer, *found->second, header, payload, num_bytes);
      try_to_close(now, peer, *found->second);
      forget_if_over(header.operation);
    } else {
      take_control(now, peer, *found->second, header, payload, num_bytes);
      try_to_close(now, peer, *found->second);
      forget_if_over(header.operation);
    }
  }
  way.link.received(now, header.number, true);
  // A sender that has sent all may be waiting for nothing but this.
  if (header.kind == Kind::kEnd) way.link.hurry();
  return true;
}

void Endpoint::take_control(Nanos now, int peer, Operation& operation, const Header& header,
                            const unsigned char* payload, int num_bytes) {
  if (header.kind == Kind::kStart) {
    uint64_t theirs = 0;
    if (num_bytes != sizeof theirs) return;
    std::memcpy(&theirs, payload, sizeof theirs);
    if (theirs != operation.what.num_bytes && operation.error.empty()) {
      operation.error = "rank " + std::to_string(peer) + " sends rows of " +
                        std::to_string(theirs) + " bytes, this one of " +
                        std::to_string(operation.what.num_bytes);
    }
    start_row(now, peer, operation);
  } else if (header.kind == Kind::kEnd) {
    start_row(now, peer, operation);
    sent_all(now, peer, operation);
  } else if (header.kind == Kind::kClose && operation.is_begun) {  // else there is nothing to close
    Outgoing& out = operation.out[peer];
    out.is_closed = true;
    out.lost.clear();
  }
}

void Endpoint::measure_arrival(Nanos now, Way& way, int num_bytes) {
  const Nanos span = std::max(way.link.rate.shortest_trip(), 10 * kMilli);
  if (way.arrival_began_at == 0 || now - way.arrival_began_at > 4 * span) {
    way.arrival_began_at = now;
    way.arrived = 0;
    return;
  }
  way.arrived += static_cast<uint64_t>(num_bytes);
  if (now - way.arrival_began_at < span) return;
  const double rate = static_cast<double>(way.arrived) * kSecond / (now - way.arrival_began_at);
  if (way.arrived >= kTellingBytes) way.best_arrival = std::max(way.best_arrival, rate);
  way.arrival_began_at = now;
  way.arrived = 0;
}

void Endpoint::start_row(Nanos now, int peer, Operation& operation) {
  Incoming& in = operation.in[peer];
  if (in.started_at >= 0 || in.is_closed) return;
  Way& way = ways_[peer];
  in.started_at = now;
  way.bytes_due += operation.what.num_bytes;
  // All that is under way on this link, as it all takes its time.
  in.usual = usual_time(way.link.rate.shortest_trip(), static_cast<double>(way.bytes_due),
                        way.best_arrival);
}

void Endpoint::sent_all(Nanos now, int peer, Operation& operation) {
  Incoming& in = operation.in[peer];
  if (in.all_sent_at >= 0 || in.is_closed) return;
  in.all_sent_at = now;
  in.num_at_first = in.num_has;
}

void Endpoint::take_data(Nanos now, int peer, Operation& operation, const Header& header,
                         const unsigned char* payload, int num_bytes) {
  Incoming& in = operation.in[peer];
  measure_arrival(now, ways_[peer], num_bytes);
  if (in.is_closed || header.block >= operation.num_blocks) return;  // or takes no part
  const bool is_compact = header.flags & kIsCompact;
  const int due = static_cast<int>(bytes_of(operation, header.block));
  const bool is_readable = codec_.expand && operation.what.dtype >= 0 && due == kBlockBytes;
  if (is_compact ? !is_readable : num_bytes != due) return;
  start_row(now, peer, operation);
  if (!in.has[header.block]) {
    in.has[header.block] = 1;
    ++in.num_has;
    in.num_critical_left -= operation.is_begun && is_critical(operation, rank_, header.block);
    ways_[peer].bytes_due -= std::min<uint64_t>(ways_[peer].bytes_due, static_cast<uint64_t>(due));
    char* place = operation.what.rooms[peer] + static_cast<uint64_t>(header.block) * kBlockBytes;
    const auto* packed = reinterpret_cast<const char*>(payload);
    if (!is_compact) {
      std::memcpy(place, payload, static_cast<size_t>(num_bytes));
    } else if (!codec_.expand(operation.what.dtype, packed, num_bytes, place)) {
      std::memset(place, 0, static_cast<size_t>(due));  // a rank may send what it likes
    }
  }
  if (header.flags & kIsAllSent) sent_all(now, peer, operation);
}

Nanos Endpoint::deadline(const Operation& operation) const {
  Nanos longest = 0, trip = 0;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    if (operation.in[peer].started_at >= 0) {
      longest = std::max(longest, usual_end(peer, operation));
    }
    trip = std::max(trip, ways_[peer].link.rate.shortest_trip());
  }
  const Nanos slack = operation.what.slack >= 0 ? operation.what.slack
                      : trip < kShortLink       ? kShortSlack
                                                : kLongSlack;
  return longest + slack;
}

// The least time at which a row may be closed that nothing more comes of; kNever without.
Nanos Endpoint::close_at(int peer, const Operation& operation) const {
  const Incoming& in = operation.in[peer];
  const Way& way = ways_[peer];
  if (!operation.is_begun || !operation.what.is_tolerant || in.is_closed || in.all_sent_at < 0 ||
      way.waits || in.num_critical_left > 0) {
    return Link::kNever;
  }
  const double share = static_cast<double>(in.num_has) / operation.num_blocks;
  const Nanos usual = usual_end(peer, operation);
  if (share >= operation.what.enough) return in.started_at + usual;
  return in.started_at + std::max(usual, deadline(operation));
}

// When all of a row has usually come, from its start on.
Nanos Endpoint::usual_end(int peer, const Operation& operation) const {
  const Incoming& in = operation.in[peer];
  if (in.all_sent_at < 0) return in.usual;
  // What was sent before may still overtake what has come.
  return in.all_sent_at - in.started_at + ways_[peer].link.rate.shortest_trip() / 8;
}

// Asked for each packet that comes: one block that is needed says no until it is there.
bool Endpoint::may_give_up(Operation& operation, int peer) const {
  const Exchange& what = operation.what;
  if (!what.counts.empty() && !what.counts[peer]) return true;
  Incoming& in = operation.in[peer];
  const auto most_missing = static_cast<uint32_t>(std::max(0, what.most_missing));
  for (uint32_t looked = 0; looked < operation.num_blocks; ++looked) {
    if (!in.has[in.needed] && operation.num_missing[in.needed] >= most_missing) return false;
    in.needed = (in.needed + 1) % operation.num_blocks;
  }
  return true;
}

void Endpoint::try_to_close(Nanos now, int peer, Operation& operation) {
  Incoming& in = operation.in[peer];
  if (in.is_closed || !operation.is_begun) return;
  if (in.num_has == operation.num_blocks) return close_row(peer, operation);
  const Nanos at = close_at(peer, operation);
  if (at == Link::kNever || now < at) return;
  const double share = static_cast<double>(in.num_has) / operation.num_blocks;
  const ClosingTimes times{usual_end(peer, operation), deadline(operation)};
  if (!may_close(now - in.started_at, share, operation.what.enough, times)) return;
  if (may_give_up(operation, peer)) close_row(peer, operation);
}

void Endpoint::close_row(int peer, Operation& operation) {
  Incoming& in = operation.in[peer];
  Way& way = ways_[peer];
  in.is_closed = true;
  if (operation.what.is_tolerant) {
    // As it was once all had been sent: who waits for the rest shall not look like a good link.
    const uint32_t num_first = in.all_sent_at < 0 ? in.num_has : in.num_at_first;
    const double share = static_cast<double>(num_first) / operation.num_blocks;
    way.mean_share += kNewest * (share - way.mean_share);
    way.waits = way.mean_share < operation.what.enough;
  }
  if (in.num_has == operation.num_blocks) return;
  ++way.link.counts.rows_closed_early;
  const bool counts = operation.what.counts.empty() || operation.what.counts[peer];
  for (uint32_t block = 0; block < operation.num_blocks; ++block) {
    if (in.has[block]) continue;
    ++way.link.counts.blocks_missing;
    way.bytes_due -= std::min<uint64_t>(way.bytes_due, bytes_of(operation, block));
    if (counts) ++operation.num_missing[block];
  }
  way.controls.push_back({Kind::kClose, operation.what.operation, 0});
}

// --- what becomes of packets that were sent

// How long packets of all links wait, on their way out of this rank.
Nanos Endpoint::queue_of_all(Nanos now) const {
  Nanos least = Link::kNever;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const Rate& rate = ways_[peer].link.rate;
    if (peer != rank_ && rate.is_active(now)) least = std::min(least, rate.queue());
  }
  return least == Link::kNever ? 0 : least;
}

// What the window of one link may count on of the rate of all: windows of links that are used
// together hold what one way out carries, and not each of them all of it.
double Endpoint::share_of_window() const {
  const auto num_used = std::count_if(ways_.begin(), ways_.end(),
                                      [](const Way& way) { return way.link.in_flight() > 0; });
  return num_used > 1 ? std::min(1.0, kShareOfWindows / static_cast<double>(num_used)) : 1.0;
}

bool Endpoint::may_send(Nanos now, int peer) const {
  const Link& link = ways_[peer].link;
  return !ways_[peer].is_held && now >= link.next_at() &&
         link.has_window(all_.bytes_per_s(), share_of_window());
}

void Endpoint::arrived(Nanos now, int peer, const Flying& packet, Nanos queue) {
  if (!packet.is_lost) in_flight_ -= packet.bytes;
  const Nanos trip = ways_[peer].link.rate.shortest_trip();
  if (trip > 0) all_.round_trip(now, trip);
  if (!packet.is_lost) {
    all_.acknowledged(now, packet.sent_at, packet.bytes, packet.mark_of_all, queue);
  }
  if (packet.kind != Kind::kData) return;
  const auto found = operations_.find(packet.operation);
  if (found == operations_.end()) return;
  Outgoing& out = found->second->out[peer];
  Block& block = out.blocks[packet.block];
  if (block == Block::kArrived) return;
  block = Block::kArrived;
  --out.num_left;
  forget_if_over(packet.operation);
}

void Endpoint::lost(int peer, const Flying& packet) {
  in_flight_ -= packet.bytes;
  Way& way = ways_[peer];
  if (!way.link.was_cut(packet)) all_.lost(packet.bytes);
  const auto found = operations_.find(packet.operation);
  if (packet.kind == Kind::kData) {
    if (found == operations_.end()) return;
    Outgoing& out = found->second->out[peer];
    if (out.is_closed || out.blocks[packet.block] != Block::kFlying) return;
    out.blocks[packet.block] = Block::kLost;
    out.lost.push_back(packet.block);
    return;
  }
  if (packet.kind == Kind::kPing) return;
  // A start or an end is of no use once the row is over; a close always is, to its receiver.
  const bool is_of_row = packet.kind == Kind::kStart || packet.kind == Kind::kEnd;
  if (is_of_row && (found == operations_.end() || found->second->out[peer].is_over())) return;
  const uint64_t bytes = packet.kind == Kind::kStart ? found->second->what.num_bytes : 0;
  way.controls.push_back({packet.kind, packet.operation, bytes});
}

void Endpoint::turn(Nanos now) {
  all_.turn(now, in_flight_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || now < ways_[peer].link.probe_at()) continue;
    ways_[peer].link.probe(now, [&](const Flying& packet) { lost(peer, packet); });
  }
  std::vector<uint64_t> begun(order_.begin(), order_.end());
  for (const uint64_t number : begun) {
    const auto found = operations_.find(number);
    if (found == operations_.end()) continue;
    Operation& operation = *found->second;
    if (!operation.what.is_tolerant) continue;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (close_at(peer, operation) <= now) try_to_close(now, peer, operation);
    }
    forget_if_over(number);
  }
}

Nanos Endpoint::wake_at(Nanos now) const {
  const double share = share_of_window();
  Nanos at = Link::kNever;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    const Way& way = ways_[peer];
    at = std::min({at, way.link.probe_at(), way.link.ack_at()});
    if (way.is_held || !way.link.has_window(all_.bytes_per_s(), share)) continue;
    const Nanos due = has_to_send(peer) ? 0 : way.link.ping_at();
    if (due != Link::kNever) at = std::min(at, std::max({due, way.link.next_at(), next_at_}));
  }
  for (const uint64_t number : order_) {
    const Operation& operation = *operations_.at(number);
    if (!operation.what.is_tolerant) continue;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const Nanos closes = close_at(peer, operation);
      // One whose missing blocks are needed is closed as they come.
      if (closes > now) at = std::min(at, closes);
    }
  }
  return at;
}

Nanos Endpoint::rest() const {
  Nanos trip = kLongestRest * kRests;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer != rank_) trip = std::min(trip, ways_[peer].link.rate.shortest_trip());
  }
  const double pace = all_.pace();
  const double turn = pace > 0 ? kRestPackets * kPacketBytes * kSecond / pace : 0;
  const double rest = std::max(static_cast<double>(trip / kRests), turn);
  return rest < kShortestRest ? 0 : std::min(static_cast<Nanos>(rest), kLongestRest);
}

bool Endpoint::has_to_send(int peer) const {
  if (!ways_[peer].controls.empty()) return true;
  return std::any_of(order_.begin(), order_.end(), [&](uint64_t number) {
    const Outgoing& out = operations_.at(number)->out[peer];
    return !out.is_closed && (out.num_unsent > 0 || !out.lost.empty());
  });
}

// --- what goes

bool Endpoint::next(Nanos now, Outbound* out) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || now < ways_[peer].link.ack_at()) continue;
    const Ack ack = ways_[peer].link.make_ack(now);
    std::memcpy(scratch_, &ack, sizeof ack);
    fill(now, peer, Kind::kAck, 0, 0, scratch_, sizeof ack, 0, out);
    return true;
  }
  if (now < next_at_) {
    // What holds this rank up is no limit of a link's.
    for (Way& way : ways_) way.link.rate.has_nothing(way.link.in_flight());
    return false;
  }
  const double pace = all_.pace();
  const double most = pace > 0 ? std::clamp(pace * kTurn / kSecond, 1.0, kTurnBytes) : kTurnBytes;
  for (int tried = 0; tried <= num_ranks_; ++tried) {
    if (turn_ != rank_ && turn_bytes_ < most && next_of(now, turn_, out)) {
      turn_bytes_ += out->num_bytes;
      return true;
    }
    turn_ = (turn_ + 1) % num_ranks_;
    turn_bytes_ = 0;
  }
  bool has_more = false;
  for (int peer = 0; peer < num_ranks_; ++peer) has_more |= peer != rank_ && has_to_send(peer);
  if (!has_more) all_.has_nothing(in_flight_);
  return false;
}

bool Endpoint::next_of(Nanos now, int peer, Outbound* out) {
  Way& way = ways_[peer];
  if (!may_send(now, peer)) return false;
  if (!way.controls.empty()) {
    const Control control = way.controls.front();
    way.controls.pop_front();
    const bool is_start = control.kind == Kind::kStart;
    std::memcpy(scratch_, &control.num_bytes, sizeof control.num_bytes);
    fill(now, peer, control.kind, control.operation, 0, scratch_,
         is_start ? static_cast<int>(sizeof control.num_bytes) : 0, 0, out);
    return true;
  }
  // Small ones first, as they hold nobody up. Others in turn: what is begun late, such as the
  // results of the first part of some values, need not overtake the rows of the last one.
  for (const bool is_small : {true, false}) {
    for (const uint64_t number : order_) {
      Operation& operation = *operations_.at(number);
      if ((operation.num_blocks <= kSmallBlocks) != is_small || operation.out[peer].is_closed) {
        continue;
      }
      uint32_t block = 0;
      bool is_again = false;
      if (!next_block(peer, operation, &block, &is_again)) continue;
      Outgoing& row = operation.out[peer];
      row.blocks[block] = Block::kFlying;
      way.link.counts.blocks_sent_again += is_again;
      if (!is_again && --row.num_unsent == 0) {
        way.controls.push_back({Kind::kEnd, number, 0});
      }
      const char* values = operation.what.sends[peer] + static_cast<uint64_t>(block) * kBlockBytes;
      const void* payload = values;
      int num_bytes = static_cast<int>(bytes_of(operation, block));
      uint8_t flags = row.num_unsent == 0 ? kIsAllSent : 0;
      if (is_compact_ && operation.what.dtype >= 0 && num_bytes == kBlockBytes) {
        auto* packed = reinterpret_cast<char*>(scratch_);
        const int fewer = codec_.compact(operation.what.dtype, values, packed);
        if (fewer < num_bytes) {
          payload = packed;
          num_bytes = fewer;
          flags |= kIsCompact;
        }
      }
      fill(now, peer, Kind::kData, number, block, payload, num_bytes, flags, out);
      return true;
    }
  }
  way.link.rate.has_nothing(way.link.in_flight());
  if (now < way.link.ping_at()) return false;
  fill(now, peer, Kind::kPing, 0, 0, nullptr, 0, 0, out);
  return true;
}

// The next block of a row to send: critical ones first, those that were lost last.
bool Endpoint::next_block(int peer, Operation& operation, uint32_t* block, bool* is_again) {
  Outgoing& out = operation.out[peer];
  const uint32_t num_blocks = operation.num_blocks;
  *is_again = false;
  if (out.num_unsent > 0) {
    const bool has_critical = operation.what.is_tolerant && !operation.what.critical.empty();
    for (; has_critical && out.next_critical < num_blocks; ++out.next_critical) {
      if (out.blocks[out.next_critical] != Block::kUnsent) continue;
      if (!is_critical(operation, peer, out.next_critical)) continue;
      *block = out.next_critical++;
      return true;
    }
    while (out.next_normal < num_blocks && out.blocks[out.next_normal] != Block::kUnsent) {
      ++out.next_normal;
    }
    if (out.next_normal < num_blocks) {
      *block = out.next_normal++;
      return true;
    }
  }
  while (!out.lost.empty()) {
    *block = out.lost.front();
    out.lost.pop_front();
    if (out.blocks[*block] != Block::kLost) continue;
    *is_again = true;
    return true;
  }
  return false;
}

void Endpoint::fill(Nanos now, int peer, Kind kind, uint64_t operation, uint32_t block,
                    const void* payload, int num_bytes, uint8_t flags, Outbound* out) {
  const int bytes = kHeaderBytes + num_bytes + kTagBytes;
  Way& way = ways_[peer];
  const SendMark mark = kind == Kind::kAck ? SendMark{} : all_.sent(now, in_flight_);
  const uint64_t number = way.link.sent(now, kind, operation, block, bytes, mark);
  if (kind != Kind::kAck) {
    in_flight_ += bytes;
    const double pace = all_.pace();
    const bool is_limited = most_bytes_per_s_ > 0 && (pace <= 0 || most_bytes_per_s_ < pace);
    next_at_ = all_.after(now, next_at_, bytes, is_limited ? most_bytes_per_s_ : pace);
  }
  out->peer = peer;
  out->header = {kVersion,  kind,  flags, static_cast<uint8_t>(rank_), world_, number,
                 operation, block, 0};
  out->payload = payload;
  out->num_bytes = num_bytes;
}

// --- what is known

LinkState Endpoint::state(int peer) const {
  const Way& way = ways_[peer];
  return {way.link.counts, way.link.rate.bytes_per_s(),   way.link.rate.pace(), all_.bytes_per_s(),
          all_.pace(),     way.link.rate.shortest_trip(), way.link.in_flight(), way.mean_share,
          way.waits};
}

std::vector<int> Endpoint::silent(Nanos now, Nanos limit) const {
  std::vector<int> found;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const Nanos since = ways_[peer].link.waiting_since();
    if (peer != rank_ && since != Link::kNever && now - since > limit) found.push_back(peer);
  }
  return found;
}

void Endpoint::paused(Nanos for_how_long) {
  for (Way& way : ways_) way.link.paused(for_how_long);
}

}  // namespace loft::datagram
