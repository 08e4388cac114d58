// A cable that is long and loses packets: passes frames on, later and not all of them.
//
//     relay PORT TAP DELAY_MS JITTER_MS LOSS SEED CUT_MS EVERY_MS
//
// A process between a host's port on the switch (a packet socket) and a tap device on the bridge,
// as many kernels lack tc's netem. Order is kept. Delay, jitter and loss hold for each direction;
// the seed says which frames of each are lost. In every EVERY_MS the cable is cut for CUT_MS.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

namespace {

constexpr std::size_t kLargestFrame = 65'600;  // bytes
constexpr std::size_t kMostFrames = 20'000;  // on their way, one way; more are lost, as in a queue
constexpr std::size_t kAtOnce = 64;          // frames read from one side before the other's turn
// What is due in so long is passed on in one go, half of it early, half late: calls of the kernel
// for each frame take a core of the hosts', and what is measured is the cables.
constexpr double kTurn = 150e-6;  // seconds

double now() {
  timespec at{};
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "relay: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

struct Limits {
  double delay_s, jitter_s, loss, cut_s, every_s;
};

struct Frame {
  double due;
  std::vector<char> bytes;
};

// One direction: what is on its way.
class Way {
 public:
  Way(const Limits& limits, std::uint64_t seed) : limits_(limits), draw_(seed) {}

  void take(double at, const char* bytes, std::size_t length) {
    // As many draws for each frame, whatever becomes of it: the seed alone says which are lost.
    const bool is_lost = uniform_(draw_) < limits_.loss;
    const double jitter = (2 * uniform_(draw_) - 1) * limits_.jitter_s;
    const bool is_cut = limits_.cut_s > 0 && std::fmod(at, limits_.every_s) < limits_.cut_s;
    if (is_lost || is_cut || frames_.size() >= kMostFrames) return;
    last_ = std::max(last_, at + limits_.delay_s + jitter);
    frames_.push_back({last_, std::vector<char>(bytes, bytes + length)});
  }

  // Seconds until a frame is due; below 0 if one has been, infinite without any.
  double wait_s(double at) const { return frames_.empty() ? INFINITY : frames_.front().due - at; }

  // A frame that is due, for good.
  std::vector<char> give() {
    std::vector<char> bytes = std::move(frames_.front().bytes);
    frames_.pop_front();
    return bytes;
  }

 private:
  Limits limits_;
  std::mt19937_64 draw_;
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
  std::deque<Frame> frames_;
  double last_ = 0.0;  // when the latest frame is due
};

int open_port(const char* name) {
  const int port = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
  if (port < 0) fail("packet socket");
  const int room = 16 << 20, on = 1;
  setsockopt(port, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
  setsockopt(port, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
  setsockopt(port, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on);
  sockaddr_ll to{};
  to.sll_family = AF_PACKET;
  to.sll_protocol = htons(ETH_P_ALL);
  to.sll_ifindex = static_cast<int>(if_nametoindex(name));
  if (bind(port, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) fail(name);
  return port;
}

int open_tap(const char* name) {
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (tap < 0) fail("/dev/net/tun");
  ifreq asked{};
  std::strncpy(asked.ifr_name, name, IFNAMSIZ - 1);
  asked.ifr_flags = IFF_TAP | IFF_NO_PI;
  if (ioctl(tap, TUNSETIFF, &asked) != 0) fail(name);
  return tap;
}

// Batches of frames between the kernel and this process.
class Batches {
 public:
  Batches()
      : rooms_(kAtOnce, std::vector<char>(kLargestFrame)), messages_(kAtOnce), parts_(kAtOnce) {
    for (std::size_t at = 0; at < kAtOnce; ++at) {
      parts_[at] = {rooms_[at].data(), rooms_[at].size()};
      messages_[at].msg_hdr.msg_iov = &parts_[at];
      messages_[at].msg_hdr.msg_iovlen = 1;
    }
  }

  void from_port(int port, Way& way, double at) {
    const int count = recvmmsg(port, messages_.data(), kAtOnce, 0, nullptr);
    for (int frame = 0; frame < count; ++frame) {  // none where the port is down
      way.take(at, rooms_[frame].data(), messages_[frame].msg_len);
    }
  }

  void from_tap(int tap, Way& way, double at) {
    for (std::size_t frame = 0; frame < kAtOnce; ++frame) {
      const ssize_t length = read(tap, rooms_[0].data(), rooms_[0].size());
      if (length <= 0) return;
      way.take(at, rooms_[0].data(), static_cast<std::size_t>(length));
    }
  }

  // A queue that is full or a link that is down loses frames, as a wire does.
  static void to_port(int port, Way& way, double at) {
    std::vector<std::vector<char>> frames;
    while (frames.size() < kAtOnce && way.wait_s(at) <= 0) frames.push_back(way.give());
    std::vector<iovec> parts(frames.size());
    std::vector<mmsghdr> messages(frames.size());
    for (std::size_t frame = 0; frame < frames.size(); ++frame) {
      parts[frame] = {frames[frame].data(), frames[frame].size()};
      messages[frame].msg_hdr.msg_iov = &parts[frame];
      messages[frame].msg_hdr.msg_iovlen = 1;
    }
    for (std::size_t done = 0; done < frames.size();) {
      const auto left = static_cast<unsigned>(frames.size() - done);
      const int sent = sendmmsg(port, messages.data() + done, left, 0);
      done += sent > 0 ? static_cast<std::size_t>(sent) : 1;
    }
  }

  static void to_tap(int tap, Way& way, double at) {
    for (std::size_t frame = 0; frame < kAtOnce && way.wait_s(at) <= 0; ++frame) {
      const std::vector<char> bytes = way.give();
      if (write(tap, bytes.data(), bytes.size()) < 0) continue;
    }
  }

 private:
  std::vector<std::vector<char>> rooms_;
  std::vector<mmsghdr> messages_;
  std::vector<iovec> parts_;
};

}  // namespace

int main(int count, char** words) {
  if (count != 9) {
    std::fputs("relay PORT TAP DELAY_MS JITTER_MS LOSS SEED CUT_MS EVERY_MS\n", stderr);
    return 2;
  }
  const auto number = [&](int at) { return std::atof(words[at]); };
  const Limits limits{number(3) / 1e3, number(4) / 1e3, number(5), number(7) / 1e3,
                      number(8) / 1e3};
  const auto seed = static_cast<std::uint64_t>(std::atoll(words[6]));
  sched_param priority{1};  // a wire does not wait for a busy CPU: 200 ms late is a TCP timeout
  if (sched_setscheduler(0, SCHED_RR, &priority) != 0) setpriority(PRIO_PROCESS, 0, -20);
  const int port = open_port(words[1]), tap = open_tap(words[2]);
  Way inwards(limits, 2 * seed), outwards(limits, 2 * seed + 1);
  Batches batches;
  for (;;) {
    const timespec rest{0, static_cast<long>(1e9 * kTurn)};
    (void)nanosleep(&rest, nullptr);
    const double wait_s = std::min(inwards.wait_s(now()), outwards.wait_s(now())) - kTurn / 2;
    timespec limit{0, 0};
    if (wait_s > 0 && std::isfinite(wait_s)) {
      limit.tv_sec = static_cast<time_t>(wait_s);
      limit.tv_nsec = static_cast<long>(1e9 * (wait_s - std::floor(wait_s)));
    }
    pollfd sides[] = {{port, POLLIN, 0}, {tap, POLLIN, 0}};
    if (ppoll(sides, 2, std::isfinite(wait_s) ? &limit : nullptr, nullptr) < 0 && errno != EINTR) {
      fail("ppoll");
    }
    const double at = now();
    if (sides[0].revents != 0) batches.from_port(port, inwards, at);
    if (sides[1].revents != 0) batches.from_tap(tap, outwards, at);
    Batches::to_tap(tap, inwards, at + kTurn / 2);
    Batches::to_port(port, outwards, at + kTurn / 2);
  }
}
