// Layer 4. Endpoints of datagrams on a virtual clock, and a network between them that is slow, far,
// shallow, and loses, repeats, delays and spoils packets: the same every time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <vector>

#include "datagram/endpoint.h"

namespace loft::datagram {

struct NetworkSettings {
  double bytes_per_s = 12.5e6;  // out of, and into, each host
  double queue_bytes = 312e3;   // of each of these
  Nanos round_trip = 50 * kMilli;
  double lost = 0, repeated = 0, reordered = 0, spoilt = 0;  // shares of packets
  Nanos latest = 0;                                          // by which a thread may wake late
  uint64_t seed = 1;
};

class SimulatedNetwork {
 public:
  SimulatedNetwork(int num_ranks, const NetworkSettings& settings, double most_bytes_per_s = 0)
      : settings_(settings),
        chance_(settings.seed),
        out_(num_ranks),
        in_(num_ranks),
        wakes_(num_ranks, INT64_MAX) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      endpoints.push_back(std::make_unique<Endpoint>(rank, num_ranks, 7, most_bytes_per_s));
    }
  }

  std::vector<std::unique_ptr<Endpoint>> endpoints;
  Nanos now = kSecond;
  uint64_t num_dropped = 0, num_lost = 0, num_sent = 0;
  // Who is cut off, until when.
  std::vector<Nanos> cut_until = std::vector<Nanos>(64, 0);

  int num_ranks() const { return static_cast<int>(endpoints.size()); }

  void wake(int rank) { run(rank); }

  // Goes on until `is_over`, or the time is up; says whether it is over.
  bool run_until(const std::function<bool()>& is_over, Nanos limit) {
    const Nanos end = now + limit;
    while (!is_over()) {
      if (events_.empty() || events_.top()->at > end) return false;
      const std::shared_ptr<Event> event = events_.top();
      events_.pop();
      now = std::max(now, event->at);
      event->happen();
    }
    return true;
  }

  void at(Nanos when, std::function<void()> happen) {
    auto event = std::make_shared<Event>();
    event->at = when;
    event->number = num_events_++;
    event->happen = std::move(happen);
    events_.push(std::move(event));
  }

 private:
  struct Event {
    Nanos at;
    uint64_t number;
    std::function<void()> happen;
  };
  struct Later {
    bool operator()(const std::shared_ptr<Event>& a, const std::shared_ptr<Event>& b) const {
      return a->at != b->at ? a->at > b->at : a->number > b->number;
    }
  };
  struct Pipe {
    Nanos free_at = 0;
  };

  double draw() { return std::uniform_real_distribution<double>(0, 1)(chance_); }

  // When a packet that comes to a pipe now leaves it; -1 where its queue is full.
  Nanos through(Pipe& pipe, int bytes) {
    const double waiting =
        pipe.free_at > now ? (pipe.free_at - now) * settings_.bytes_per_s / kSecond : 0;
    if (waiting > settings_.queue_bytes) return -1;
    pipe.free_at =
        std::max(pipe.free_at, now) + static_cast<Nanos>(bytes / settings_.bytes_per_s * kSecond);
    return pipe.free_at;
  }

  void run(int rank) {
    Endpoint& endpoint = *endpoints[rank];
    endpoint.turn(now);
    Outbound out;
    while (endpoint.next(now, &out)) {
      std::vector<unsigned char> payload(static_cast<size_t>(out.num_bytes));
      if (out.num_bytes) std::memcpy(payload.data(), out.payload, payload.size());
      send(rank, out.peer, out.header, std::move(payload));
    }
    const Nanos at_time = std::max(endpoint.wake_at(now), now + kMicro);
    if (at_time == INT64_MAX || at_time >= wakes_[rank]) {
      if (wakes_[rank] > now) return;
    }
    const Nanos late = settings_.latest ? static_cast<Nanos>(draw() * settings_.latest) : 0;
    if (at_time == INT64_MAX) return;
    wakes_[rank] = at_time + late;
    at(at_time + late, [this, rank, when = at_time + late] {
      if (wakes_[rank] != when) return;
      wakes_[rank] = INT64_MAX;
      run(rank);
    });
  }

  void send(int from, int to, const Header& header, std::vector<unsigned char> payload) {
    ++num_sent;
    const int bytes = kHeaderBytes + static_cast<int>(payload.size()) + kTagBytes + 42;
    const Nanos leaves = through(out_[from], bytes);
    if (leaves < 0) {
      ++num_dropped;
      return;
    }
    if (draw() < settings_.lost || now < cut_until[from] || now < cut_until[to]) {
      ++num_lost;
      return;
    }
    Nanos delay = settings_.round_trip / 2;
    if (draw() < settings_.reordered) delay += static_cast<Nanos>(draw() * settings_.round_trip);
    const int copies = draw() < settings_.repeated ? 2 : 1;
    if (draw() < settings_.spoilt) return;  // its tag does not fit: it is dropped
    auto shared = std::make_shared<std::vector<unsigned char>>(std::move(payload));
    for (int copy = 0; copy < copies; ++copy) {
      at(leaves + delay, [this, from, to, header, shared, bytes] {
        const Nanos arrives = through(in_[to], bytes);
        if (arrives < 0) {
          ++num_dropped;
          return;
        }
        at(arrives, [this, from, to, header, shared] {
          endpoints[to]->received(now, from, header, shared->data(),
                                  static_cast<int>(shared->size()));
          run(to);
        });
      });
    }
  }

  NetworkSettings settings_;
  std::mt19937_64 chance_;
  std::vector<Pipe> out_, in_;
  std::vector<Nanos> wakes_;
  std::priority_queue<std::shared_ptr<Event>, std::vector<std::shared_ptr<Event>>, Later> events_;
  uint64_t num_events_ = 0;
};

}  // namespace loft::datagram
