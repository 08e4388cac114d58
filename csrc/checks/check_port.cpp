// Layer 4. Ports on this host's loopback: several threads use two of them at once, for the thread
// sanitizer, and somebody between them sends what he has heard again, spoilt, cut off and back.
//
//   check_port            all of it
//   check_port --flood    how long an exchange takes while a stranger sends 100,000 packets a
//   second
//   check_port --rate     bytes a second each way, with the kernel's GSO and GRO and without

#include <arpa/inet.h>
#include <malloc.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <thread>

#include "checks/plain.h"
#include "datagram/port.h"

namespace loft::checks {
namespace {

using namespace datagram;
using Clock = std::chrono::steady_clock;

constexpr char kAddress[] = "127.0.0.1";

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

void pause_ms(int time) { std::this_thread::sleep_for(std::chrono::milliseconds(time)); }

sockaddr_in place_of(int number) {
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(static_cast<uint16_t>(number));
  inet_pton(AF_INET, kAddress, &place.sin_addr);
  return place;
}

// A UDP socket of somebody's.
struct Socket {
  int socket = ::socket(AF_INET, SOCK_DGRAM, 0), number = 0;
  Socket() {
    sockaddr_in own = place_of(0);
    socklen_t size = sizeof own;
    const bool is_there = bind(socket, reinterpret_cast<sockaddr*>(&own), sizeof own) == 0 &&
                          getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0;
    expect(is_there, "no UDP socket");
    number = ntohs(own.sin_port);
  }
  ~Socket() { close(socket); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
};

// Two ports that know each other's keys; whose addresses they get is said later.
struct Pair {
  std::unique_ptr<Port> ports[2];
  explicit Pair(bool offloads = true) {
    for (const int rank : {0, 1}) {
      PortSettings settings;
      settings.offloads = offloads;
      settings.rank = rank;
      settings.num_ranks = 2;
      settings.world = 7;
      settings.address = kAddress;
      for (const int peer : {0, 1}) {
        settings.keys_out.push_back(std::string(16, static_cast<char>('a' + 2 * rank + peer)));
        settings.keys_in.push_back(std::string(16, static_cast<char>('a' + 2 * peer + rank)));
      }
      ports[rank] = std::make_unique<Port>(settings);
    }
  }
  void connect(int first, int second) {  // where rank 0 finds rank 1, and rank 1 rank 0
    ports[0]->connect({{kAddress, ports[0]->number()}, {kAddress, first}});
    ports[1]->connect({{kAddress, second}, {kAddress, ports[1]->number()}});
  }
};

// What a rank sends to and receives from the other one.
struct Values {
  std::vector<char> sent, received;
  Values(size_t num_bytes, char value) : sent(num_bytes, value), received(num_bytes) {}
};

void begin(Port& port, int rank, uint64_t operation, Values& values, bool is_tolerant = false) {
  Exchange exchange;
  exchange.operation = operation;
  exchange.sends.assign(2, values.sent.data());
  exchange.rooms.assign(2, nullptr);
  exchange.rooms[1 - rank] = values.received.data();
  exchange.num_bytes = values.sent.size();
  exchange.is_tolerant = exchange.lingers = is_tolerant;
  port.begin(exchange);
}

bool is_over(Port& port, uint64_t operation, double limit_s = 20) {
  const auto began = Clock::now();
  while (!port.is_done(operation)) {
    if (seconds_since(began) > limit_s) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// Carries an exchange out on both ports; returns the seconds that it took.
double exchange(Pair& pair, uint64_t operation, size_t num_bytes) {
  Values values[2] = {{num_bytes, 'x'}, {num_bytes, 'y'}};
  const auto began = Clock::now();
  for (const int rank : {0, 1}) begin(*pair.ports[rank], rank, operation, values[rank]);
  for (const int rank : {0, 1}) {
    expect(is_over(*pair.ports[rank], operation), "exchange ", operation, " is not over");
  }
  const double took_s = seconds_since(began);
  for (const int rank : {0, 1}) {
    expect(pair.ports[rank]->take(operation).error.empty() &&
               values[rank].received == values[1 - rank].sent,
           "exchange ", operation, " brought other values");
  }
  return took_s;
}

// Three threads a port exchange while two others ask.
void check_many_threads() {
  Pair pair;
  pair.connect(pair.ports[1]->number(), pair.ports[0]->number());
  std::atomic<bool> is_over_for_all{false};
  std::atomic<int> num_right{0};
  std::vector<std::thread> callers, askers;
  constexpr int kCallers = 3, kTurns = 100;
  for (const int rank : {0, 1}) {
    Port& port = *pair.ports[rank];
    for (int caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, rank, caller] {
        for (int turn = 1; turn <= kTurns; ++turn) {
          const auto operation = static_cast<uint64_t>(caller * kTurns + turn);
          const auto num_bytes = static_cast<size_t>(1000 * caller + 13 * turn);
          Values values(num_bytes, static_cast<char>('a' + rank));
          begin(port, rank, operation, values);
          if (!is_over(port, operation)) return;
          num_right +=
              port.take(operation).error.empty() &&
              values.received == std::vector<char>(num_bytes, static_cast<char>('b' - rank));
        }
      });
    }
    for (int asker = 0; asker < 2; ++asker) {
      askers.emplace_back([&, rank] {
        while (!is_over_for_all) {
          (void)port.state(1 - rank);
          (void)port.counts();
          (void)port.silent(1.0);
          (void)port.take_released();
        }
      });
    }
  }
  for (std::thread& each : callers) each.join();
  is_over_for_all = true;
  for (std::thread& each : askers) each.join();
  expect(num_right == 2 * kCallers * kTurns, num_right, " exchanges of several threads are right");
}

// Values are exchanged where the kernel has neither GSO nor GRO.
void check_without_offloads() {
  Pair pair(false);
  pair.connect(pair.ports[1]->number(), pair.ports[0]->number());
  for (const size_t num_bytes : {1, 1'279, 3'000'001}) exchange(pair, num_bytes, num_bytes);
  for (const auto& port : pair.ports) {
    const PortCounts counts = port->counts();
    expect(!counts.has_gso && !counts.has_gro, "a port takes what it shall leave");
  }
}

// A port is closed while exchanges are under way, and while others begin some and ask.
void check_close_in_the_midst() {
  for (int round = 0; round < 30; ++round) {
    Values values[2][2] = {{{2'000'000, 'x'}, {2'000'000, 'x'}},
                           {{2'000'000, 'y'}, {2'000'000, 'y'}}};
    Pair pair;
    pair.connect(pair.ports[1]->number(), pair.ports[0]->number());
    std::vector<std::thread> threads;
    for (const int rank : {0, 1}) begin(*pair.ports[rank], rank, 1, values[rank][0]);
    for (const int rank : {0, 1}) {
      Port& port = *pair.ports[rank];
      threads.emplace_back([&, rank] {
        for (int asked = 0; asked < 100; ++asked) (void)port.is_done(1);
        begin(port, rank, 2, values[rank][1]);
        (void)port.state(1 - rank);
      });
      for (int closer = 0; closer < 2; ++closer) threads.emplace_back([&] { port.close(); });
    }
    for (std::thread& each : threads) each.join();
    for (const int rank : {0, 1}) {
      const std::vector<char> before = values[rank][0].received;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      expect(before == values[rank][0].received, "a port writes after it was closed");
    }
  }
}

// Stands between two ports: each takes it for the other one.
class Between {
 public:
  using Packet = std::vector<unsigned char>;

  explicit Between(Pair& pair) {
    for (const int side : {0, 1}) places_[side] = place_of(pair.ports[side]->number());
    pair.connect(sockets_[0].number, sockets_[1].number);
    thread_ = std::thread([this] { run(); });
  }
  ~Between() {
    is_stopped_ = true;
    thread_.join();
  }

  // To a side's port, from the address of the other one.
  void send(int side, const Packet& packet) {
    (void)sendto(sockets_[side].socket, packet.data(), packet.size(), 0,
                 reinterpret_cast<sockaddr*>(&places_[side]), sizeof places_[side]);
  }
  // Waits until nothing is heard for 100 ms.
  void wait_for_silence() {
    for (int64_t before = -1; before != num_heard; pause_ms(100)) before = num_heard;
  }
  const std::vector<Packet>& heard_of(int side) const { return heard_[side]; }

  std::atomic<int64_t> num_heard{0};

 private:
  void run() {
    while (!is_stopped_) {
      pollfd ready[2] = {{sockets_[0].socket, POLLIN, 0}, {sockets_[1].socket, POLLIN, 0}};
      if (poll(ready, 2, 10) <= 0) continue;
      for (const int side : {0, 1}) {
        Packet packet(2048);
        const ssize_t got = recv(sockets_[side].socket, packet.data(), packet.size(), MSG_DONTWAIT);
        if (got <= 0) continue;
        packet.resize(static_cast<size_t>(got));
        send(1 - side, packet);
        heard_[side].push_back(std::move(packet));
        ++num_heard;
      }
    }
  }

  const Socket sockets_[2];  // by the side that sends to it
  sockaddr_in places_[2];
  std::vector<Packet> heard_[2];  // from a side; read while nothing is sent
  std::atomic<bool> is_stopped_{false};
  std::thread thread_;
};

// Nothing that is heard and sent again is accepted, answered, or remembered.
void check_hostile() {
  Pair pair;
  Between between(pair);
  for (uint64_t operation = 1; operation <= 10; ++operation) exchange(pair, operation, 60'000);
  between.wait_for_silence();
  std::mt19937 chance(1);
  using Packet = Between::Packet;
  struct Attack {
    const char* name;
    int target;       // side, of packets from side 0
    bool is_refused;  // by the endpoint, else by the port
    std::function<Packet(Packet)> change;
  };
  const std::vector<Attack> attacks = {
      {"replayed", 1, true, [](Packet packet) { return packet; }},
      {"reflected", 0, false, [](Packet packet) { return packet; }},
      {"truncated", 1, false,
       [&](Packet packet) {
         packet.resize(chance() % packet.size());
         return packet;
       }},
      {"lengthened", 1, false,
       [&](Packet packet) {
         packet.resize(packet.size() + 1 + chance() % 100);
         return packet;
       }},
      {"spoilt", 1, false,
       [&](Packet packet) {
         packet[chance() % packet.size()] ^= static_cast<unsigned char>(1 << chance() % 8);
         return packet;
       }},
      {"made up", 1, false,
       [&](Packet packet) {  // with a right header and number
         for (size_t at = kHeaderBytes; at < packet.size(); ++at) {
           packet[at] = static_cast<unsigned char>(chance());
         }
         packet[8 + 2] ^= 1;  // a number that has not come yet
         return packet;
       }},
  };
  const std::vector<Packet> heard = between.heard_of(0);
  const auto num_sent = static_cast<int64_t>(heard.size());
  for (const Attack& attack : attacks) {
    Port& port = *pair.ports[attack.target];
    const LinkCounts before = port.state(1 - attack.target).counts;
    const uint64_t strangers = port.counts().strangers;
    const int64_t heard_before = between.num_heard;
    const size_t heap = mallinfo2().uordblks;
    const auto num_refused = [&] {
      const uint64_t now =
          attack.is_refused
              ? port.state(1 - attack.target).counts.packets_refused - before.packets_refused
              : port.counts().strangers - strangers;
      return static_cast<int64_t>(now);
    };
    for (const Packet& each : heard) {
      between.send(attack.target, attack.change(each));
      if (chance() % 64 == 0) pause_ms(1);  // a socket's buffer is not endless
    }
    const auto began = Clock::now();
    while (num_refused() < num_sent && seconds_since(began) < 5) pause_ms(1);
    between.wait_for_silence();
    const LinkCounts now = port.state(1 - attack.target).counts;
    const int64_t grown = static_cast<int64_t>(mallinfo2().uordblks) - static_cast<int64_t>(heap);
    expect(num_refused() == num_sent, attack.name, ": ", num_refused(), " of ", num_sent,
           " refused");
    expect(now.packets_received == before.packets_received, attack.name, ": accepted");
    expect(between.num_heard == heard_before, attack.name, ": answered");
    expect(grown < 20'000, attack.name, ": ", grown, " bytes more");
  }
  exchange(pair, 100, 60'000);
}

// The median of exchanges with the kernel's offloads and without, by turns.
void measure_rate() {
  constexpr size_t kBytes = 32'000'000;
  constexpr int kTurns = 21;
  Pair with(true), without(false);
  Pair* pairs[] = {&with, &without};
  std::vector<double> took_s[2];
  double cpu_s[2] = {};
  for (Pair* pair : pairs) pair->connect(pair->ports[1]->number(), pair->ports[0]->number());
  for (int turn = 1; turn <= kTurns; ++turn) {
    for (const int kind : {0, 1}) {
      const std::clock_t began = std::clock();
      took_s[kind].push_back(exchange(*pairs[kind], static_cast<uint64_t>(turn), kBytes));
      cpu_s[kind] += static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
    }
  }
  for (const int kind : {0, 1}) {
    std::vector<double>& times = took_s[kind];
    std::sort(times.begin(), times.end());
    const double cpu_of_port_s = cpu_s[kind] / (2 * kTurns);
    const auto rate = [&](int at) { return 1e-6 * kBytes / times[static_cast<size_t>(at)]; };
    std::cout << (kind ? "without" : "with") << " GSO and GRO: " << rate(kTurns / 2)
              << " MB/s each way (" << rate(3 * kTurns / 4) << " to " << rate(kTurns / 4)
              << "; best " << rate(0) << "), a core of its own for each port would do "
              << 1e-6 * kBytes / cpu_of_port_s << "\n";
  }
}

// The median of an exchange alone, while a stranger floods somebody else on this host, whose
// packets cost as much to send, and while he floods one of the ports; by turns.
void measure_flood() {
  Pair pair;
  pair.connect(pair.ports[1]->number(), pair.ports[0]->number());
  const Socket other, own;
  std::atomic<int> target{0};  // port; 0 for none, -1 to end
  std::atomic<int64_t> num_sent{0};
  std::thread stranger([&] {
    sockaddr_in place{};
    char bytes[100] = {};
    iovec part{bytes, sizeof bytes};
    std::vector<mmsghdr> messages(100);
    for (mmsghdr& each : messages) {
      each = {};
      each.msg_hdr.msg_name = &place;
      each.msg_hdr.msg_namelen = sizeof place;
      each.msg_hdr.msg_iov = &part;
      each.msg_hdr.msg_iovlen = 1;
    }
    for (auto next = Clock::now(); target >= 0;) {
      std::this_thread::sleep_until(next += std::chrono::milliseconds(1));
      place = place_of(target);
      if (target > 0) num_sent += std::max(0, sendmmsg(own.socket, messages.data(), 100, 0));
    }
  });
  const char* names[] = {"alone", "beside a flood", "flooded"};
  const int targets[] = {0, other.number, pair.ports[0]->number()};
  constexpr int kTurns = 41;
  std::vector<double> took_s[3];
  double all_s[3] = {};
  int64_t all_sent[3] = {};
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int kind = 0; kind < 3; ++kind) {
      target = targets[kind];
      pause_ms(20);
      const int64_t before = num_sent;
      took_s[kind].push_back(exchange(pair, static_cast<uint64_t>(3 * turn + kind), 8'000'000));
      all_s[kind] += took_s[kind].back();
      all_sent[kind] += num_sent - before;
    }
  }
  target = -1;
  stranger.join();
  for (int kind = 0; kind < 3; ++kind) {
    std::vector<double>& times = took_s[kind];
    std::sort(times.begin(), times.end());
    std::cout << "8 MB each way " << names[kind] << ": " << 1e3 * times[kTurns / 2] << " ms ("
              << 1e3 * times[kTurns / 4] << " to " << 1e3 * times[3 * kTurns / 4] << "), "
              << static_cast<double>(all_sent[kind]) / all_s[kind] << " packets a second\n";
  }
}

}  // namespace
}  // namespace loft::checks

int main(int argc, char** argv) {
  using namespace loft::checks;
  if (argc > 1 && std::string(argv[1]) == "--flood") {
    measure_flood();
    return report("flood");
  }
  if (argc > 1 && std::string(argv[1]) == "--rate") {
    measure_rate();
    return report("rate");
  }
  check_without_offloads();
  check_many_threads();
  check_close_in_the_midst();
  check_hostile();
  return report("ports");
}
