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
#include <utility>
#include <vector>

#include "datagram/endpoint.h"

namespace loft::datagram {

struct NetworkSettings {
  double bytes_per_s = 12.5e6;  // out of, and into, each host, unless it has a rate of its own
  double queue_bytes = 312e3;   // of each of these
  Nanos round_trip = 50 * kMilli;
  double lost = 0, repeated = 0, reordered = 0, spoilt = 0;  // shares of packets
  Nanos latest = 0;  // by which a thread may wake late, for time and for packets
  uint64_t seed = 1;
};

class SimulatedNetwork {
 public:
  SimulatedNetwork(int num_ranks, const NetworkSettings& settings, double most_bytes_per_s = 0)
      : settings_(settings),
        chance_(settings.seed),
        out_(num_ranks),
        in_(num_ranks),
        inboxes_(num_ranks),
        wakes_(num_ranks, INT64_MAX) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      endpoints.push_back(std::make_unique<Endpoint>(rank, num_ranks, 7, most_bytes_per_s));
      hosts.push_back({settings.bytes_per_s, settings.lost, 0, 0});
    }
  }

  struct Host {
    double bytes_per_s;
    double lost;      // share of the packets that it sends
    Nanos cut_until;  // nothing comes from it or to it
    Nanos further;    // its packets take so much longer
  };

  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<Host> hosts;  // by rank; may be changed at any time
  Nanos now = kSecond;
  uint64_t num_dropped = 0, num_lost = 0, num_sent = 0;
  std::function<void(int from, int to, const Header&)> on_packet;  // that an endpoint sends

  bool is_silent() const { return events_.empty(); }
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
  struct Arrived {
    int from;
    Header header;
    std::shared_ptr<std::vector<unsigned char>> payload;
  };

  double draw() { return std::uniform_real_distribution<double>(0, 1)(chance_); }

  // When a packet that comes to a pipe now leaves it; -1 where its queue is full.
  Nanos through(Pipe& pipe, const Host& host, int bytes) {
    const double waiting =
        pipe.free_at > now ? (pipe.free_at - now) * host.bytes_per_s / kSecond : 0;
    if (waiting > settings_.queue_bytes) return -1;
    pipe.free_at =
        std::max(pipe.free_at, now) + static_cast<Nanos>(bytes / host.bytes_per_s * kSecond);
    return pipe.free_at;
  }

  // What the thread of a port does when it wakes.
  void run(int rank) {
    Endpoint& endpoint = *endpoints[rank];
    for (const Arrived& each : std::exchange(inboxes_[rank], {})) {
      endpoint.received(now, each.from, each.header, each.payload->data(),
                        static_cast<int>(each.payload->size()));
    }
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
    if (on_packet) on_packet(from, to, header);
    const int bytes = kHeaderBytes + static_cast<int>(payload.size()) + kTagBytes + 42;
    const Nanos leaves = through(out_[from], hosts[from], bytes);
    if (leaves < 0) {
      ++num_dropped;
      return;
    }
    if (draw() < hosts[from].lost || now < hosts[from].cut_until || now < hosts[to].cut_until) {
      ++num_lost;
      return;
    }
    Nanos delay = settings_.round_trip / 2 + hosts[from].further;
    if (draw() < settings_.reordered) delay += static_cast<Nanos>(draw() * settings_.round_trip);
    const int copies = draw() < settings_.repeated ? 2 : 1;
    if (draw() < settings_.spoilt) {  // its tag does not fit: it is dropped
      ++num_lost;
      return;
    }
    auto shared = std::make_shared<std::vector<unsigned char>>(std::move(payload));
    for (int copy = 0; copy < copies; ++copy) {
      at(leaves + delay, [this, from, to, header, shared, bytes] {
        const Nanos arrives = through(in_[to], hosts[to], bytes);
        if (arrives < 0) {
          ++num_dropped;
          return;
        }
        at(arrives, [this, from, to, header, shared] {
          inboxes_[to].push_back({from, header, shared});
          if (!settings_.latest) return run(to);
          if (inboxes_[to].size() > 1) return;  // the thread has been woken already
          at(now + static_cast<Nanos>(draw() * settings_.latest), [this, to] { run(to); });
        });
      });
    }
  }

  NetworkSettings settings_;
  std::mt19937_64 chance_;
  std::vector<Pipe> out_, in_;
  std::vector<std::vector<Arrived>> inboxes_;  // what lies in a socket's buffer
  std::vector<Nanos> wakes_;
  std::priority_queue<std::shared_ptr<Event>, std::vector<std::shared_ptr<Event>>, Later> events_;
  uint64_t num_events_ = 0;
};

}  // namespace loft::datagram
