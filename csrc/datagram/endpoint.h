// Layer 3. Exchanges of values between ranks by packets, some of which are lost: a state machine
// without clock, sockets or keys.
//
// In an exchange a rank sends a part of its values to each other rank, and receives a row of each.
// Values are cut into blocks, one a packet, which come in any order, and are sent again where they
// are lost. A `tolerant` exchange is over for a rank when its rows are closed (early_close.h), each
// with what is there; others when all is there.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "datagram/link.h"
#include "datagram/packet.h"

namespace loft::datagram {

// What is exchanged, the same on every rank; places are of memory that outlives the exchange.
struct Exchange {
  uint64_t operation = 0;
  std::vector<const char*> sends;  // by rank; this one's is not used
  std::vector<char*> rooms;        // by rank; null, as the place above, for who takes no part
  uint64_t num_bytes = 0;          // of each
  int dtype = -1;                  // code of values that may travel in fewer bytes; -1 for none
  bool is_tolerant = false;
  // Over as soon as rows are closed, while this rank's values may still be on their way: who has
  // received what others send after that has closed this rank's row.
  bool lingers = false;
  bool copies = false;            // what is sent, so that it may be overwritten at once
  int most_missing = 0;           // rows that may lack a block
  std::vector<uint8_t> counts;    // by rank: whether its row counts among these; empty for all
  std::vector<uint8_t> critical;  // by rank and block: must arrive; empty for none
  double enough = 1.0;            // share of a row
  Nanos slack = -1;               // behind the longest usual time; < 0 for what suits the links
};

struct Outcome {
  std::vector<uint8_t> missing;  // [ranks, blocks]: 1 where a block of a row did not come
  std::string error;             // what has ended it
};

// A packet to be sent; its payload lies in memory until the next call.
struct Outbound {
  int peer;
  Header header;
  const void* payload;
  int num_bytes;
};

struct LinkState {
  LinkCounts counts;
  double bytes_per_s, pace_bytes_per_s;
  double all_bytes_per_s, all_pace_bytes_per_s;  // of this rank's way out
  Nanos shortest_trip;
  int64_t in_flight;
  double mean_share;
  bool waits;  // has no deadline: too little of its rows has come in time
};

class Endpoint {
 public:
  // `most_bytes_per_s`: what this rank may send in all; 0 for no limit.
  Endpoint(int rank, int num_ranks, uint32_t world, double most_bytes_per_s);

  // Has data for a rank wait, or not any more: its way is full.
  void hold(int peer, bool waits) { ways_[peer].is_held = waits; }
  // Has values travel in fewer bytes, where `sends`, and reads those of others.
  void set_codec(const PacketCodec& codec, bool sends);
  // Says where rows of an exchange may be written to before it is begun; only `operation`, `rooms`
  // and `num_bytes` are used.
  void expect(Nanos now, const Exchange& exchange);
  void begin(Nanos now, const Exchange& exchange);
  bool is_done(uint64_t operation) const;
  // Ends an exchange that is done; `missing` only of tolerant ones with holes.
  Outcome take(uint64_t operation);
  // Exchanges whose memory is not used any more, each told once.
  std::vector<uint64_t> take_released();

  // A packet from a rank, opened; false where it is none that is accepted.
  bool received(Nanos now, int peer, const Header& header, const unsigned char* payload,
                int num_bytes);
  // Finds what is due at this time: rows to close, packets to give up.
  void turn(Nanos now);
  // Whether a packet may go now, which it fills in.
  bool next(Nanos now, Outbound* out);
  // When the next call of `turn` or `next` is due.
  Nanos wake_at(Nanos now) const;
  // How long packets may be left to gather: little beside a round trip.
  Nanos rest() const;

  LinkState state(int peer) const;
  // The peers that have acknowledged nothing for so long of what was sent to them.
  std::vector<int> silent(Nanos now, Nanos limit) const;
  // Time has stood still for this process: nobody was silent meanwhile.
  void paused(Nanos for_how_long);

 private:
  enum class Block : uint8_t { kUnsent, kFlying, kLost, kArrived };

  struct Outgoing {
    std::vector<Block> blocks;
    std::deque<uint32_t> lost;
    uint32_t next_critical = 0, next_normal = 0;
    uint32_t num_unsent = 0, num_left = 0;  // not arrived
    bool is_closed = false;                 // by its owner, or nothing is sent
    bool is_over() const { return is_closed || num_left == 0; }
  };

  struct Incoming {
    std::vector<uint8_t> has;  // by block; empty where nothing comes
    uint32_t num_has = 0, num_critical_left = 0;
    uint32_t num_at_first = 0;  // of these as every block had been sent once
    uint32_t needed = 0;        // a block that is missing and must come, as was last found
    Nanos started_at = -1, all_sent_at = -1;
    Nanos usual = 0;
    bool is_closed = false;
  };

  struct Operation {
    Exchange what;
    uint32_t num_blocks = 0;
    bool is_begun = false, is_taken = false;
    std::vector<Outgoing> out;          // by rank
    std::vector<Incoming> in;           // by rank
    std::vector<uint16_t> num_missing;  // by block: rows that were closed without it
    std::unique_ptr<char[]> copy;
    std::string error;
    bool has_all_rows() const;
    bool has_sent_all() const;
  };

  struct Stashed {
    int peer;
    Header header;
    std::vector<unsigned char> payload;
  };

  struct Control {
    Kind kind;
    uint64_t operation;
    uint64_t num_bytes;  // of a start
  };

  struct Way {  // to a peer
    Link link;
    std::deque<Control> controls;
    uint64_t bytes_due = 0;   // of rows that have started and are not there
    double best_arrival = 0;  // bytes a second
    Nanos arrival_began_at = 0;
    uint64_t arrived = 0;
    double mean_share = 1;
    bool waits = false;
    bool is_held = false;
  };

  Operation& prepared(const Exchange& exchange);
  bool stash(int peer, const Header& header, const unsigned char* payload, int num_bytes);
  void unstash(Nanos now, uint64_t operation);
  void take_control(Nanos now, int peer, Operation& operation, const Header& header,
                    const unsigned char* payload, int num_bytes);
  void take_data(Nanos now, int peer, Operation& operation, const Header& header,
                 const unsigned char* payload, int num_bytes);
  void measure_arrival(Nanos now, Way& way, int num_bytes);
  void start_row(Nanos now, int peer, Operation& operation);
  void sent_all(Nanos now, int peer, Operation& operation);
  void try_to_close(Nanos now, int peer, Operation& operation);
  bool may_give_up(Operation& operation, int peer) const;
  void close_row(int peer, Operation& operation);
  Nanos close_at(int peer, const Operation& operation) const;
  Nanos usual_end(int peer, const Operation& operation) const;
  Nanos deadline(const Operation& operation) const;
  Nanos queue_of_all(Nanos now) const;
  double share_of_window() const;
  bool may_send(Nanos now, int peer) const;
  void arrived(Nanos now, int peer, const Flying& packet, Nanos queue);
  void lost(int peer, const Flying& packet);
  bool has_to_send(int peer) const;
  bool next_of(Nanos now, int peer, Outbound* out);
  bool next_block(int peer, Operation& operation, uint32_t* block, bool* is_again);
  void fill(Nanos now, int peer, Kind kind, uint64_t operation, uint32_t block, const void* payload,
            int num_bytes, uint8_t flags, Outbound* out);
  void forget_if_over(uint64_t operation);
  uint32_t bytes_of(const Operation& operation, uint32_t block) const;
  bool is_critical(const Operation& operation, int owner, uint32_t block) const;
  int num_others() const { return num_ranks_ - 1; }

  const int rank_, num_ranks_;
  const uint32_t world_;
  const double most_bytes_per_s_;
  // What leaves this rank on all links takes one way out: they share its rate.
  Rate all_{false};
  int64_t in_flight_ = 0;
  Nanos next_at_ = 0;     // by that rate, and the user's limit
  std::deque<Way> ways_;  // by rank
  std::unordered_map<uint64_t, std::unique_ptr<Operation>> operations_;
  std::list<uint64_t> order_;  // of those begun: as they are sent
  std::unordered_set<uint64_t> finished_;
  std::deque<uint64_t> finished_order_;
  std::unordered_map<uint64_t, std::vector<Stashed>> stash_;
  uint64_t stashed_bytes_ = 0;
  std::vector<uint64_t> released_;
  int turn_ = 0;        // whose turn to send it is
  int turn_bytes_ = 0;  // that it has sent in it
  PacketCodec codec_ = {nullptr, nullptr};
  bool is_compact_ = false;
  unsigned char scratch_[kBlockBytes + 64] = {};
};

}  // namespace loft::datagram
