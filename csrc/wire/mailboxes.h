// Layer 0. Messages between processes that share memory: whose values lie ready, and where.
//
// Each rank has memory that the others can read. It begins with a box for every rank, a ring of
// messages with one writer, its owner, and one reader. Nobody waits here, and no call takes long.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace loft {

class Mailboxes {
 public:
  // `heads` are where the memories of all ranks begin, this rank's own to write to; `num_bytes` is
  // how long each memory is, and `capacity` how many messages a box has room for.
  Mailboxes(std::vector<uintptr_t> heads, int rank, uint64_t num_bytes, uint64_t capacity)
      : heads_(std::move(heads)),
        rank_(rank),
        num_bytes_(num_bytes),
        capacity_(capacity),
        peers_(heads_.size()) {
    if (rank < 0 || rank >= size() || capacity == 0 || num_bytes < head_bytes(size(), capacity)) {
      throw std::invalid_argument("no box for this rank, or none has room");
    }
  }

  // How much of a memory is boxes.
  static uint64_t head_bytes(int num_ranks, uint64_t capacity) {
    return kFirst + static_cast<uint64_t>(num_ranks) * box_bytes(capacity);
  }

  // Tells every other rank where values for it lie, by rank, each of so many bytes. Returns which
  // exchange of that tag it is for this rank, from 1 on. The tag is one of the series' alone.
  uint64_t post(uint64_t series, uint64_t tag, const std::vector<uint64_t>& places,
                uint64_t num_bytes) {
    if (has_left_) throw std::runtime_error("this rank has left, and posts nothing any more");
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      if (peers_[peer].num_posted - load(peer, rank_, kTaken) >= capacity_) {
        throw std::runtime_error(std::to_string(capacity_) +
                                 " exchanges are under way of which rank " + std::to_string(peer) +
                                 " has not heard; have fewer at once (LOFT_HVD_BUCKET_BYTES for "
                                 "larger buckets), or set LOFT_HVD_LANE=engine");
      }
    }
    const uint64_t number = ++num_begun_[tag];
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      uint64_t& num_posted = peers_[peer].num_posted;
      *message_at(rank_, peer, num_posted) = {series, tag, number, places.at(peer), num_bytes};
      store(peer, kPosted, ++num_posted);
    }
    return number;
  }

  // Whether the values of every other rank for an exchange lie ready. What was left of earlier ones
  // of that tag, which this rank has given up, is forgotten. Throws if a rank has left before it
  // posted its values.
  bool has_all(uint64_t tag, uint64_t number) {
    std::string gone, missing;
    const auto add = [](std::string& ranks, int rank) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    };
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      // Before its messages are taken: what a rank posts it posts before it leaves.
      const bool has_left = left_at(peer)->load(std::memory_order_acquire) != 0;
      take(peer);
      const auto found = peers_[peer].waiting.find(tag);
      if (found != peers_[peer].waiting.end()) {
        while (!found->second.empty() && found->second.front().number < number) {
          found->second.pop_front();
          has_read(peer);
        }
      }
      const bool is_there = found != peers_[peer].waiting.end() && !found->second.empty() &&
                            found->second.front().number == number;
      if (!is_there) add(has_left ? gone : missing, peer);
    }
    if (!gone.empty()) {
      // A rank may have left because it has waited for another in vain.
      const std::string others =
          missing.empty() ? "" : ", to which ranks [" + missing + "] have not come yet either";
      throw std::runtime_error("ranks [" + gone +
                               "] have left, by the end of their scripts or hvd.shutdown(), before "
                               "an exchange that this rank waits for" +
                               others +
                               "; look for an error above, or have all ranks take the same number "
                               "of steps");
    }
    return missing.empty();
  }

  // Says that this rank posts nothing any more.
  void leave() {
    has_left_ = true;
    left_at(rank_)->store(1, std::memory_order_release);
  }

  // Returns where a rank's values for an exchange lie in its memory, once: has_all was true. They
  // may be read until has_read.
  uint64_t take_place(int peer, uint64_t tag, uint64_t number, uint64_t num_bytes) {
    const auto found = peers_.at(peer).waiting.find(tag);
    if (found == peers_[peer].waiting.end() || found->second.empty() ||
        found->second.front().number != number) {
      throw std::runtime_error("rank " + std::to_string(peer) + " has nothing ready");
    }
    const Message message = found->second.front();
    found->second.pop_front();
    if (found->second.empty()) peers_[peer].waiting.erase(found);
    if (message.num_bytes != num_bytes || num_bytes > num_bytes_ ||
        message.place > num_bytes_ - num_bytes) {
      has_read(peer);
      throw std::runtime_error(
          "rank " + std::to_string(peer) + " shows " + std::to_string(message.num_bytes) +
          " bytes at " + std::to_string(message.place) + " of the " + std::to_string(num_bytes_) +
          " that it shares, where " + std::to_string(num_bytes) +
          " are due; look at that machine's processes");
    }
    return message.place;
  }

  // Ends a series: this rank will not read what it was sent in it, nor what may come yet.
  void end(uint64_t series) {
    ended_.insert(series);
    for (int peer = 0; peer < size(); ++peer) {
      auto& waiting = peers_[peer].waiting;
      for (auto each = waiting.begin(); each != waiting.end();) {
        // All of a tag are of one series.
        const bool is_over = each->second.empty() || each->second.front().series == series;
        for (std::size_t at = 0; is_over && at < each->second.size(); ++at) has_read(peer);
        each = is_over ? waiting.erase(each) : std::next(each);
      }
    }
  }

  // Says that the values of one more message of a rank are not read any more.
  void has_read(int peer) { store(peer, kRead, ++peers_.at(peer).num_read); }

  // Whether the others have read, or forgotten, all that this rank has posted.
  bool all_is_read() const {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_ && load(peer, rank_, kRead) != peers_[peer].num_posted) return false;
    }
    return true;
  }

  // How many messages each other rank was sent; the most of them.
  uint64_t num_posted() const {
    uint64_t most = 0;
    for (const Peer& peer : peers_) most = peer.num_posted > most ? peer.num_posted : most;
    return most;
  }

 private:
  struct Message {
    uint64_t series, tag, number, place, num_bytes;
  };
  struct Peer {
    uint64_t num_posted = 0, num_taken = 0, num_read = 0;
    std::map<uint64_t, std::deque<Message>> waiting;  // by tag
  };
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "other processes see words whole");

  // A memory's first line is its owner's to tell it by, but for its last word, which is not 0 once
  // the owner has left. Each count has a line of 64 bytes to itself: bound from x86-64 and most of
  // arm64.
  static constexpr uint64_t kLeft = 56;
  static constexpr uint64_t kFirst = 64, kPosted = 0, kTaken = 64, kRead = 128, kRing = 192;

  static uint64_t box_bytes(uint64_t capacity) {
    return kRing + (capacity * sizeof(Message) + 63) / 64 * 64;
  }

  int size() const { return static_cast<int>(heads_.size()); }

  Word* left_at(int owner) const { return reinterpret_cast<Word*>(heads_[owner] + kLeft); }

  uintptr_t box(int owner, int peer) const {
    return heads_[owner] + kFirst + static_cast<uint64_t>(peer) * box_bytes(capacity_);
  }

  Message* message_at(int owner, int peer, uint64_t number) const {
    return reinterpret_cast<Message*>(box(owner, peer) + kRing) + number % capacity_;
  }

  // What a process has written before it stored a count is seen by whoever loads it.
  uint64_t load(int owner, int peer, uint64_t count) const {
    return reinterpret_cast<const Word*>(box(owner, peer) + count)->load(std::memory_order_acquire);
  }

  void store(int peer, uint64_t count, uint64_t value) {
    reinterpret_cast<Word*>(box(rank_, peer) + count)->store(value, std::memory_order_release);
  }

  // Sorts what a rank has written by tag.
  void take(int peer) {
    Peer& known = peers_[peer];
    const uint64_t num_posted = load(peer, rank_, kPosted);
    if (num_posted == known.num_taken) return;
    if (num_posted - known.num_taken > capacity_) {  // also where it has become less
      throw std::runtime_error("rank " + std::to_string(peer) + " says that it has posted " +
                               std::to_string(num_posted) + " messages, of which " +
                               std::to_string(known.num_taken) +
                               " were taken; look at that machine's processes");
    }
    while (known.num_taken < num_posted) {
      const Message message = *message_at(peer, rank_, known.num_taken++);
      if (ended_.count(message.series)) {
        has_read(peer);
      } else {
        known.waiting[message.tag].push_back(message);
      }
    }
    store(peer, kTaken, known.num_taken);
  }

  std::vector<uintptr_t> heads_;
  int rank_;
  uint64_t num_bytes_, capacity_;
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, uint64_t> num_begun_;  // exchanges of this rank, by tag
  std::set<uint64_t> ended_;                          // series
  bool has_left_ = false;                             // this rank
};

}  // namespace loft
