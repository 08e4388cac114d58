// Layer 2. One rank's side of the way to another rank: numbers of packets, which of them have
// arrived, and which are lost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "datagram/packet.h"
#include "datagram/rate.h"

namespace loft::datagram {

// A packet that is not acknowledged yet, and what it carries.
struct Flying {
  uint64_t number;
  Nanos sent_at;
  Kind kind;
  bool is_gone;  // acknowledged
  bool is_lost;  // given up: an acknowledgement may come yet, where the way has become longer
  int bytes;     // with its headers
  uint64_t operation;
  uint32_t block;
  SendMark mark, mark_of_all;  // for the rate of this link, and of all
};

struct LinkCounts {
  uint64_t packets_sent = 0, packets_lost = 0, packets_received = 0, packets_refused = 0;
  uint64_t blocks_sent_again = 0, rows_closed_early = 0, blocks_missing = 0;
};

class Link {
 public:
  Rate rate{true};
  LinkCounts counts;

  // Sending.

  // Numbers a packet, and notes what it carries; acknowledgements are not noted.
  uint64_t sent(Nanos now, Kind kind, uint64_t operation, uint32_t block, int bytes,
                const SendMark& mark_of_all) {
    ++counts.packets_sent;
    const uint64_t number = next_number_++;
    if (kind == Kind::kAck) return number;
    num_pings_ = kind == Kind::kPing ? num_pings_ + 1 : 0;
    last_sent_at_ = now;
    const SendMark mark = rate.sent(now, in_flight_);
    flying_.push_back(
        {number, now, kind, false, false, bytes, operation, block, mark, mark_of_all});
    in_flight_ += bytes;
    if (num_probing_ > 0) --num_probing_;
    if (in_flight_ == bytes) heard_or_sent_at_ = waiting_since_ = now;
    next_at_ = rate.after(now, next_at_, bytes);
    return number;
  }

  bool has_window(double all_bytes_per_s, double share) const {
    // What is under way may all be lost, and the window have shrunk: probes go nevertheless.
    return num_probing_ > 0 || in_flight_ < rate.window(all_bytes_per_s, share);
  }
  Nanos next_at() const { return next_at_; }
  // Whether a packet was sent before the end of a time in which nothing came through.
  bool was_cut(const Flying& packet) const { return packet.sent_at <= cut_at_; }
  int64_t in_flight() const { return in_flight_; }

  // Takes how long what an acknowledgement is for was on its way.
  void time(Nanos now, const Ack& ack) {
    for (const Flying& each : flying_) {
      if (each.number > ack.highest) break;
      if (each.number != ack.highest || each.is_gone) continue;
      const Nanos held = static_cast<Nanos>(ack.held_us) * kMicro, trip = now - each.sent_at;
      rate.round_trip(now, held > 0 && held < trip ? trip - held : trip);
      // The two clocks differ by we know not what, but always by that. Numbers begin anew after 71
      // minutes.
      const uint32_t way_us = ack.arrived_us - static_cast<uint32_t>(each.sent_at / kMicro);
      if (!has_way_) first_way_us_ = way_us;
      has_way_ = true;
      rate.one_way(now, static_cast<int32_t>(way_us - first_way_us_) * kMicro);
    }
  }

  // Takes an acknowledgement; calls arrived(packet) and lost(packet) for those that it decides.
  // `queue` is how long packets wait on this link alone.
  template <typename Arrived, typename Lost>
  void acknowledged(Nanos now, const Ack& ack, Nanos queue, const Arrived& arrived,
                    const Lost& lost) {
    heard_or_sent_at_ = waiting_since_ = now;
    num_probes_ = 0;
    const uint64_t first = ack.highest > kAckedPackets ? ack.highest - kAckedPackets : 0;
    for (auto at = from(first); at != flying_.end() && at->number <= ack.highest; ++at) {
      Flying& each = *at;
      if (each.is_gone || !has_come(ack, each.number)) continue;
      if (each.sent_at > newest_arrived_at_) newest_arrived_at_ = each.sent_at;
      if (each.number > highest_arrived_) highest_arrived_ = each.number;
      if (!each.is_lost) {
        rate.acknowledged(now, each.sent_at, each.bytes, each.mark, queue);
        in_flight_ -= each.bytes;
      }
      each.is_gone = true;
      arrived(each);
    }
    find_lost(now, lost);
    rate.turn(now, in_flight_);
  }

  // Gives packets up of which later ones have arrived.
  template <typename Lost>
  void find_lost(Nanos now, const Lost& lost) {
    const Nanos patience = rate.shortest_trip() / 8;
    for (auto at = undecided(); at != flying_.end() && at->number < highest_arrived_; ++at) {
      if (at->sent_at + patience > newest_arrived_at_) break;  // nor were later ones sent earlier
      if (!at->is_gone && !at->is_lost) give_up(*at, lost);
    }
    drop_old(now);
  }

  // When a ping is due: later than the last packets by what makes them lost, where nothing else is
  // sent. Without it their loss would be known by silence alone, after longer.
  Nanos ping_at() const {
    if (in_flight_ == 0 || num_pings_ >= kPings) return kNever;
    return last_sent_at_ + rate.shortest_trip() / 8 + kMilli;
  }

  // When nothing is heard for so long, the oldest packet is sent once more, to hear something.
  Nanos probe_at() const {
    if (in_flight_ == 0) return kNever;
    const Nanos trip = rate.smooth_trip() > 0 ? rate.smooth_trip() : kFirstTrip;
    // Of a way that is cut nothing is expected: probes follow each other before they can be
    // answered.
    const Nanos patience = num_probes_ > 1 ? trip / 2 + kScheduler
                                           : 3 * trip / 2 + 4 * rate.trip_spread() + kScheduler;
    // Less and less often: a cut is noticed to be over a sixteenth of its length later.
    const Nanos silence = heard_or_sent_at_ - waiting_since_;
    return heard_or_sent_at_ + std::max(patience, std::min(silence / 16, kMostPatience));
  }

  template <typename Lost>
  void probe(Nanos now, const Lost& lost) {
    // The first one tells a cut from a burst of which the last packets found a queue full.
    if (++num_probes_ > 1) {
      cut_at_ = now;
      rate.cut(now);
    }
    heard_or_sent_at_ = now;
    int num_given_up = 0;
    for (auto at = undecided(); at != flying_.end() && num_given_up < kProbePackets; ++at) {
      if (at->is_gone || at->is_lost) continue;
      give_up(*at, lost);
      ++num_given_up;
    }
    num_probing_ = num_given_up;
    drop_old(now);
  }

  // Receiving.

  // Whether a packet of this number is new; notes it.
  bool is_new(uint64_t number) const {
    if (number > highest_) return true;
    const uint64_t back = highest_ - number;
    return back > 0 && back <= kWindow && !bit(back - 1);
  }

  void received(Nanos now, uint64_t number, bool wants_ack) {
    ++counts.packets_received;
    if (number > highest_) {
      shift(number - highest_);
      highest_ = number;
      newest_at_ = now;
    } else {
      const uint64_t at = highest_ - number - 1;
      window_[at / 64] |= uint64_t{1} << (at % 64);
    }
    if (wants_ack) answer(now);
  }

  // Has an acknowledgement sent; also where a packet has not been taken, as there is no room: its
  // sender keeps it, and hears that this rank is there.
  void answer(Nanos now) {
    if (num_unacknowledged_++ == 0) oldest_unacknowledged_at_ = now;
  }

  // Has the acknowledgement that is due sent at once; of blocks that are sent again it waits.
  void hurry() { num_unacknowledged_ = kAckEvery; }

  Nanos ack_at() const {
    if (num_unacknowledged_ == 0) return kNever;
    if (num_unacknowledged_ >= kAckEvery) return 0;
    const Nanos wait = std::clamp(rate.shortest_trip() / 8, kAckDelay, kLongestAckDelay);
    return oldest_unacknowledged_at_ + wait;
  }

  Ack make_ack(Nanos now) {
    num_unacknowledged_ = 0;
    Ack ack{highest_,
            static_cast<uint32_t>(newest_at_ / kMicro),
            static_cast<uint32_t>((now - newest_at_) / kMicro),
            {}};
    for (int i = 0; i < kAckedPackets / 64; ++i) ack.before[i] = window_[i];
    return ack;
  }

  // Since when something is under way, and nothing is heard; kNever where nothing is.
  Nanos waiting_since() const { return in_flight_ > 0 ? waiting_since_ : kNever; }
  // Time has stood still for this process.
  void paused(Nanos for_how_long) {
    waiting_since_ += for_how_long;
    heard_or_sent_at_ += for_how_long;
  }

  static constexpr Nanos kNever = INT64_MAX;

 private:
  static constexpr int kWindow = 1024;  // packets that may come after later ones
  static constexpr int kAckEvery = 8;   // packets
  static constexpr int kProbePackets = 2, kPings = 2;
  static constexpr Nanos kAckDelay = kMilli, kLongestAckDelay = 4 * kMilli, kScheduler = 5 * kMilli,
                         kFirstTrip = 50 * kMilli, kMostPatience = kSecond / 4,
                         kRemembered = 2 * kSecond;
  static constexpr uint64_t kMostRemembered = 16384;  // packets

  static bool has_come(const Ack& ack, uint64_t number) {
    if (number == ack.highest) return true;
    const uint64_t at = ack.highest - number - 1;
    return at < kAckedPackets && (ack.before[at / 64] >> (at % 64) & 1);
  }

  template <typename Lost>
  void give_up(Flying& each, const Lost& lost) {
    ++counts.packets_lost;
    if (!was_cut(each)) rate.lost(each.bytes);
    each.is_lost = true;
    in_flight_ -= each.bytes;
    lost(each);
  }

  // The first packet of this number or a later one.
  std::deque<Flying>::iterator from(uint64_t number) {
    return std::lower_bound(
        flying_.begin(), flying_.end(), number,
        [](const Flying& each, uint64_t wanted) { return each.number < wanted; });
  }

  // The first one that is neither acknowledged nor given up, or one before it.
  std::deque<Flying>::iterator undecided() {
    auto at = from(undecided_);
    while (at != flying_.end() && (at->is_gone || at->is_lost)) ++at;
    undecided_ = at == flying_.end() ? next_number_ : at->number;
    return at;
  }

  void drop_old(Nanos now) {
    const auto is_old = [&](const Flying& each) {
      if (each.is_gone) return true;
      const bool is_far = each.number + kMostRemembered < highest_arrived_;
      return each.is_lost && (is_far || now - each.sent_at > kRemembered);
    };
    while (!flying_.empty() && is_old(flying_.front())) flying_.pop_front();
  }

  bool bit(uint64_t at) const { return window_[at / 64] >> (at % 64) & 1; }

  // Moves the window on by so many numbers; the highest one so far falls into it.
  void shift(uint64_t by) {
    constexpr int kWords = kWindow / 64;
    const uint64_t words = by / 64, bits = by % 64;
    for (int i = kWords - 1; i >= 0; --i) {
      const int64_t from = i - static_cast<int64_t>(words < kWords ? words : kWords);
      const uint64_t high = from >= 0 ? window_[from] : 0;
      const uint64_t low = from >= 1 ? window_[from - 1] : 0;
      window_[i] = bits ? high << bits | low >> (64 - bits) : high;
    }
    if (by <= kWindow && highest_ > 0) window_[(by - 1) / 64] |= uint64_t{1} << ((by - 1) % 64);
  }

  uint64_t next_number_ = 1;
  std::deque<Flying> flying_;  // by number
  int64_t in_flight_ = 0;      // bytes
  Nanos next_at_ = 0;
  bool has_way_ = false;
  uint32_t first_way_us_ = 0;
  Nanos newest_arrived_at_ = 0;  // when the newest packet that has arrived had been sent
  uint64_t highest_arrived_ = 0;
  uint64_t undecided_ = 0;  // the number of the first packet that may be
  int num_pings_ = 0;       // since the last other packet
  Nanos last_sent_at_ = 0;
  Nanos heard_or_sent_at_ = 0, waiting_since_ = 0;
  int num_probes_ = 0;   // since something was heard
  int num_probing_ = 0;  // packets of the last one that may still go
  Nanos cut_at_ = -1;

  uint64_t highest_ = 0, window_[kWindow / 64] = {};
  Nanos newest_at_ = 0, oldest_unacknowledged_at_ = 0;
  int num_unacknowledged_ = 0;
};

}  // namespace loft::datagram
