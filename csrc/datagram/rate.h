// Layer 1. How fast a rank sends on one link: at the rate at which packets have arrived, whatever
// is lost on the way.
//
// After BBR, version 1 (draft-cardwell-iccrg-bbr-congestion-control): the link's rate is the
// largest of ten round trips, its delay the least of ten seconds, and no more is under way than
// twice their product. Other than a rule that takes losses for a full queue it keeps a link busy
// that loses packets for other reasons. Above a fifth of lost packets in a round trip the rate is
// halved.
//
// What it does otherwise:
// - What leaves a rank takes one way out, whichever rank it is for. So there is a rate of all
//   links, and single ones have none of their own (Phase::kFree) until a queue builds on them
//   alone.
// - A higher rate counts only where the last packet that it is measured of has met no queue. In an
//   exchange of all ranks acknowledgements wait behind other ranks' values, and then come at once:
//   rates seem higher than they are, all send too much, and queues overflow.
// - A queue that stays brings the rate down, and is drained at three quarters of it: at a third the
//   link stood idle. The drain is over when packets wait half as long as in a queue: as
//   acknowledgements come late by turns of two threads, what is under way seems to be queued. What
//   arrives in a drain tells the link's rate best: it was never idle.
// - Packets of the links come by turns, and a round trip of a short way is a few turns of threads:
//   rates of one round trip differ by half. The rate of all links is measured over one and a half
//   round trips, at least eight milliseconds, and rises by a quarter at most. A higher one is tried
//   for as long and a round trip more, or until a queue shows. No round raises the rate that it is
//   to lower.
// - Windows of links that are used together share what one way out carries: each with all of it
//   they queued several round trips, and what was too fast showed only after as long.
// - A thread sends, which may wait for a core: rates are remembered for a second, and rounds are at
//   least a millisecond.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "datagram/packet.h"

namespace loft::datagram {

// What a packet notes as it is sent, for the rate when it is acknowledged.
struct SendMark {
  uint64_t delivered;   // bytes that had been acknowledged by then
  Nanos delivered_at;   // when the last of them were
  Nanos first_sent_at;  // when the packet that these acknowledged last had been sent
  bool is_app_limited;  // nothing more was to be sent
};

class Rate {
 public:
  explicit Rate(bool is_single)
      : is_single_(is_single), phase_(is_single ? Phase::kFree : Phase::kStart) {}

  SendMark sent(Nanos now, int64_t in_flight) {
    if (in_flight == 0) {
      first_sent_at_ = delivered_at_ = round_began_at_ = now;
      round_acked_ = round_lost_ = 0;
    }
    return {delivered_, delivered_at_, first_sent_at_, delivered_ < app_limited_until_};
  }

  // Nothing is left to send: rates measured until all that is under way is acknowledged say what
  // the sender had, not what the link carries.
  void has_nothing(int64_t in_flight) {
    app_limited_until_ = delivered_ + static_cast<uint64_t>(std::max<int64_t>(in_flight, 1));
  }

  // A packet of so many bytes, sent at `sent_at`, is acknowledged; what packets come through waits
  // `queue` longer than it need.
  void acknowledged(Nanos now, Nanos sent_at, int bytes, const SendMark& mark, Nanos queue) {
    delivered_ += static_cast<uint64_t>(bytes);
    delivered_at_ = now;
    first_sent_at_ = sent_at;
    round_acked_ += bytes;
    round_queue_ = std::min(round_queue_, queue);
    newest_queue_ = queue;
    if (mark.delivered >= round_ends_ && now - round_began_at_ >= kShortest) {
      begin_round(now, mark.is_app_limited);
    }
    Nanos took = std::max(now - mark.delivered_at, sent_at - mark.first_sent_at);
    uint64_t bytes_since = delivered_ - mark.delivered;
    if (took <= 0 || took < shortest_trip_) return;
    if (phase_ == Phase::kStart && bytes_since < kFewestMeasured * kPacketBytes) return;
    bool is_limited = mark.is_app_limited;
    const bool is_of_all = !is_single_ && phase_ != Phase::kStart;
    if (is_of_all) {
      if (span_.began_at == 0 || now - span_.began_at >= 4 * span()) {
        span_ = {now, sent_at, delivered_, is_limited};
        return;
      }
      span_.is_limited |= is_limited;
      took = std::max(now - span_.began_at, sent_at - span_.sent_at);
      if (took < span()) return;  // it goes on
      bytes_since = delivered_ - span_.delivered;
      is_limited = span_.is_limited;
      span_ = {now, sent_at, delivered_, false};
    }
    const double rate = static_cast<double>(bytes_since) * kSecond / took;
    const bool tells_less = !is_limited && mark.delivered_at > cut_at_;
    if (rate < bytes_per_s() ? !tells_less : is_queue(queue) && !best_.empty()) return;
    note(now, is_of_all && !best_.empty() ? std::min(rate, kProbeGain * bytes_per_s()) : rate);
  }

  void lost(int bytes) { round_lost_ += bytes; }

  // Nothing has been heard for long: the way is cut. What was under way then is lost, and its time
  // is no measure of how fast the link is.
  void cut(Nanos now) {
    cut_at_ = round_began_at_ = now;
    round_acked_ = round_lost_ = 0;
  }

  // A packet was there and back in `trip`.
  void round_trip(Nanos now, Nanos trip) {
    trip = std::max<Nanos>(trip, 1);
    if (shortest_trip_ == 0 || trip <= shortest_trip_ || now - shortest_at_ > 10 * kSecond) {
      shortest_trip_ = trip;
      shortest_at_ = now;
    }
    smooth_trip_ = smooth_trip_ == 0 ? trip : smooth_trip_ + (trip - smooth_trip_) / 8;
    const Nanos off = std::max(trip - smooth_trip_, smooth_trip_ - trip);
    trip_spread_ += (off - trip_spread_) / 4;
  }

  // A packet took `way` from here to there, but for a number that is always the same.
  void one_way(Nanos now, Nanos way) {
    if (recent_since_ == 0 || way <= least_way_ || now - least_at_ > 10 * kSecond) {
      least_way_ = way;
      least_at_ = now;
    }
    const Nanos span = std::clamp(shortest_trip_, kRecent, kMostRecent);
    if (now - recent_since_ > span) {
      before_way_ = now - recent_since_ > 3 * span ? way : recent_way_;
      recent_way_ = way;
      recent_since_ = now;
    }
    recent_way_ = std::min(recent_way_, way);
  }

  // How much longer packets have been on their way lately than they need.
  Nanos queue() const {
    return std::max<Nanos>(0, std::min(before_way_, recent_way_) - least_way_);
  }
  bool is_active(Nanos now) const {
    return recent_since_ > 0 && now - recent_since_ < 3 * std::max(shortest_trip_, kRecent);
  }

  // Called now and then: moves from one gain to the next.
  void turn(Nanos now, int64_t in_flight) {
    // Acknowledgements that have not come yet hide that a queue is gone: it tells so itself.
    const bool is_drained =
        in_flight <= product(1.0, bytes_per_s()) || (is_gentle_ && !is_queue(2 * newest_queue_));
    if (phase_ == Phase::kDrain && is_drained) {
      const Nanos took = now - drain_began_at_;
      const bool had_more = app_limited_until_ <= drain_delivered_;  // to send, all the time
      if (is_gentle_ && had_more && took > kTellingDrain && drain_began_at_ > cut_at_) {
        const double had = bytes_per_s();
        const double told = static_cast<double>(delivered_ - drain_delivered_) * kSecond / took;
        best_.clear();
        note(now, std::clamp(told, kLower * had, had));
      }
      phase_ = Phase::kProbe;
      turn_ = 2;
      turned_at_ = now;
    } else if (phase_ == Phase::kProbe && is_turn_over(now)) {
      turned_at_ = now;
      // Once more at once where the link turned out to carry more.
      turn_ = turn_ == 2 && bytes_per_s() > kMore * before_probe_ ? 0 : (turn_ + 1) % kTurns;
      if (turn_ == 0) {
        before_probe_ = bytes_per_s();
        queue_before_ = newest_queue_;
        span_ = Span{};
      }
    }
  }

  double bytes_per_s() const { return best_.empty() ? 0 : best_.front().bytes_per_s; }
  Nanos shortest_trip() const { return shortest_trip_; }
  Nanos smooth_trip() const { return smooth_trip_; }
  Nanos trip_spread() const { return trip_spread_; }

  // Bytes a second to send at; 0 for no limit, as nothing is known.
  double pace() const {
    if (phase_ == Phase::kFree || best_.empty()) return 0;
    // A time to send at that lies far away would hold although the rate rises before it.
    const double least = kLeastPackets * kPacketBytes * kSecond / std::max(smooth_trip_, kLeastIn);
    return std::max(gain() * bytes_per_s(), least);
  }

  // When the next packet may go after one of so many bytes, which might have gone at `due`. Time
  // that was not used is not made up for, but for a little: timers are late.
  Nanos after(Nanos now, Nanos due, int bytes) const { return after(now, due, bytes, pace()); }
  Nanos after(Nanos now, Nanos due, int bytes, double pace) const {
    if (pace <= 0) return due;
    const Nanos late = std::clamp(shortest_trip_ / 16, kLate, kLatest);
    return std::max(due, now - late) + static_cast<Nanos>(bytes / pace * kSecond);
  }

  // The most bytes to have under way on a link, where all may have `all_bytes_per_s`, of which this
  // one may count on a share.
  int64_t window(double all_bytes_per_s, double share) const {
    const double rate =
        phase_ == Phase::kFree ? std::max(all_bytes_per_s, bytes_per_s()) : bytes_per_s();
    int64_t most = product(kWindow, rate);
    if (phase_ == Phase::kFree) {
      const Nanos trip = std::max(shortest_trip_, kShortestShared);
      const double shared = kWindow * share * rate * static_cast<double>(trip) / kSecond;
      most = std::min(most, static_cast<int64_t>(shared));
    }
    return std::max<int64_t>(most, kFewestPackets * kPacketBytes);
  }

 private:
  static constexpr double kStartGain = 2.885, kProbeGain = 1.25, kWindow = 2.0, kGentle = 0.75;
  // Acknowledgements come for several packets, and a millisecond or a scheduler's turn late.
  static constexpr Nanos kShortestWindow = 2 * kMilli, kQueue = 2 * kMilli, kRecent = 5 * kMilli,
                         kMostRecent = 10 * kMilli;
  // Windows of a shorter way hold little enough.
  static constexpr Nanos kShortestShared = 10 * kMilli;
  static constexpr Nanos kShortWay = 5 * kMilli;
  static constexpr int kMostLost = 5, kMostLostNear = 20;             // one packet of so many
  static constexpr int kFullRound = 4, kFreeAfter = 16 * kFullRound;  // without a queue
  static constexpr int kTelling = 3;                                  // rounds
  static constexpr double kLower = 0.8;  // at most in one go: what is measured may be too little
  static constexpr int kFewestPackets = 16, kFewestMeasured = 8, kRounds = 10;
  static constexpr Nanos kLate = kMilli, kLatest = 4 * kMilli, kShortest = kMilli,
                         kRemembered = kSecond;
  // BBR's least window of four packets, in a round trip that has a timer's inaccuracy in it.
  static constexpr double kLeastPackets = 4;
  static constexpr Nanos kLeastIn = 20 * kMilli;
  static constexpr int kTurns = 8;
  static constexpr double kMore = 1.1;  // of what it was: it is no noise

  static constexpr Nanos kSpan = 8 * kMilli;
  static constexpr double kSpanTrips = 1.5;
  static constexpr Nanos kFirstQueue = kMilli / 2;    // is one where a higher rate is tried
  static constexpr Nanos kTellingDrain = 2 * kMilli;  // a shorter one is too short to tell

  struct Span {
    Nanos began_at = 0, sent_at = 0;
    uint64_t delivered = 0;
    bool is_limited = false;  // by what there was to send
  };
  struct Measured {
    uint64_t round;
    Nanos at;
    double bytes_per_s;
  };
  enum class Phase { kFree, kStart, kDrain, kProbe };

  double gain() const {
    if (phase_ == Phase::kStart) return kStartGain;
    if (phase_ == Phase::kDrain) return is_gentle_ ? kGentle : 1 / kStartGain;
    return turn_ == 0 ? kProbeGain : turn_ == 1 ? 0.75 : 1.0;
  }

  // That rates of all links are measured over.
  Nanos span() const { return std::max<Nanos>(kSpan, kSpanTrips * shortest_trip_); }

  bool is_turn_over(Nanos now) const {
    const Nanos took = now - turned_at_;
    if (took <= std::max(shortest_trip_, kShortest)) return false;
    if (is_single_) return true;
    // Others' packets wait too, and clocks drift: what counts is what has come since it is tried.
    const bool is_queued = newest_queue_ > queue_before_ + kFirstQueue;
    if (turn_ == 0) return is_queued || took > span() + smooth_trip_;
    return turn_ != 1 || !is_queued || took > span();
  }

  int64_t product(double gain, double bytes_per_s) const {
    const Nanos trip = std::max(shortest_trip_, kShortestWindow);
    return static_cast<int64_t>(gain * bytes_per_s * static_cast<double>(trip) / kSecond);
  }

  bool is_queue(Nanos queue) const {
    // Links are told apart by more, as they also differ by what others send there.
    return is_single_ ? queue > shortest_trip_ / 4 + 2 * kQueue
                      : queue > shortest_trip_ / 10 + kQueue;
  }

  void begin_round(Nanos now, bool is_app_limited) {
    const Nanos took = now - round_began_at_;
    ++round_;
    round_ends_ = delivered_;
    round_began_at_ = now;
    while (best_.size() > 1 && best_.front().round + kRounds < round_ &&
           best_.front().at + kRemembered < now) {
      best_.pop_front();
    }
    const int64_t sent = round_acked_ + round_lost_;
    // On a short way nothing but full queues loses so many.
    const int most = shortest_trip_ < kShortWay ? kMostLostNear : kMostLost;
    const bool loses = sent > kFewestPackets * kPacketBytes && most * round_lost_ > sent;
    // What came down is given some rounds to tell.
    const bool is_full =
        is_queue(round_queue_) && !is_app_limited && round_ > lowered_in_ + kTelling;
    num_full_ = is_full ? num_full_ + 1 : 0;
    // A round in which little was to be sent counts less, but it counts: a way that is given less
    // than it carries would stay so.
    num_empty_ = is_queue(round_queue_) ? 0 : num_empty_ + (is_app_limited ? 1 : kFullRound);
    const double measured = static_cast<double>(round_acked_) * kSecond / took;
    round_acked_ = round_lost_ = 0;
    round_queue_ = INT64_MAX;
    if (loses || num_full_ >= 2) {  // more is sent than arrives
      num_full_ = num_empty_ = 0;
      lowered_in_ = round_;
      const double had = bytes_per_s();
      const double least = phase_ == Phase::kFree ? 0 : kLower * had;
      const double most = is_single_ || had == 0 ? measured : had;
      best_.clear();
      note(now, std::max(std::min(measured, most), least));
      phase_ = Phase::kDrain;
      is_gentle_ = !loses;
      drain_began_at_ = now;
      drain_delivered_ = delivered_;
    } else if (phase_ == Phase::kStart && !is_app_limited) {
      num_same_ = bytes_per_s() >= 1.25 * full_ ? 0 : num_same_ + 1;
      if (num_same_ == 0) full_ = bytes_per_s();
      if (num_same_ >= 3 || is_full) phase_ = Phase::kDrain;  // of what the start has queued
    } else if (phase_ == Phase::kProbe && is_single_ && num_empty_ >= kFreeAfter) {
      phase_ = Phase::kFree;
    }
  }

  void note(Nanos now, double rate) {
    while (!best_.empty() && best_.back().bytes_per_s <= rate) best_.pop_back();
    best_.push_back({round_, now, rate});
  }

  uint64_t delivered_ = 0, app_limited_until_ = 0, round_ends_ = 0;
  Nanos delivered_at_ = 0, first_sent_at_ = 0;
  std::deque<Measured> best_;  // by time, rates falling: the first is the most
  uint64_t round_ = 0, lowered_in_ = 0, drain_delivered_ = 0;
  Nanos round_began_at_ = 0, drain_began_at_ = 0, cut_at_ = -1;
  int64_t round_acked_ = 0, round_lost_ = 0;                             // bytes
  Nanos newest_queue_ = 0, queue_before_ = 0, round_queue_ = INT64_MAX;  // the least of this round
  Span span_;
  bool is_gentle_ = false;            // a drain that keeps the link busy
  int num_full_ = 0, num_empty_ = 0;  // rounds with a queue all the time, and without
  Nanos shortest_trip_ = 0, shortest_at_ = 0, smooth_trip_ = 0, trip_spread_ = 0;
  Nanos least_way_ = 0, least_at_ = 0, recent_way_ = 0, before_way_ = 0, recent_since_ = 0;
  const bool is_single_;
  Phase phase_;
  double full_ = 0, before_probe_ = 0;
  int num_same_ = 0, turn_ = 0;
  Nanos turned_at_ = 0;
};

}  // namespace loft::datagram
