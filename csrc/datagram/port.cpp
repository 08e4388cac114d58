// Layer 4. See port.h. Many packets a call of the kernel: sendmmsg and recvmmsg, and where the
// kernel has them GSO and GRO, by which one message is up to 64 packets of a length.

#include "datagram/port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "process/threads.h"

#if !defined(UDP_SEGMENT)
#define UDP_SEGMENT 103
#endif
#if !defined(UDP_GRO)
#define UDP_GRO 104
#endif
#if !defined(SOL_UDP)
#define SOL_UDP 17
#endif

namespace loft::datagram {
namespace {

constexpr int kPackets = 128;       // of a batch that is sent
constexpr int kSegments = 40;       // of one message: below 64 and 64 KiB
constexpr int kReceives = 4;        // messages of a call, of up to 64 packets: one acknowledgement
                                    // tells of 256
constexpr int kPlainReceives = 64;  // of a call without GRO, a packet each
constexpr int kReceiveBytes = 1 << 16;
constexpr int kBufferBytes = 8 << 20;
constexpr Nanos kLongestWait = 100 * kMilli, kPause = kSecond;
// After so long without an acknowledgement a rank calls the other by TCP; of two ranks the higher
// one a little later, so that they do not call each other. Again after so long where that was in
// vain.
constexpr Nanos kSilence = 5 * kSecond, kLater = 2 * kSecond, kAgain = 3 * kSecond;
constexpr size_t kMostCallers = 8;
constexpr Nanos kCallerSpeaks = 5 * kSecond;  // who has connected has so long to say who it is

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

int grow(int socket, int option, int forced) {
  const int wanted = kBufferBytes;
  if (setsockopt(socket, SOL_SOCKET, forced, &wanted, sizeof wanted) != 0) {
    (void)setsockopt(socket, SOL_SOCKET, option, &wanted, sizeof wanted);
  }
  int got = 0;
  socklen_t size = sizeof got;
  (void)getsockopt(socket, SOL_SOCKET, option, &got, &size);
  return got / 2;  // the kernel counts its own bookkeeping
}

// Has a connection send at once: an acknowledgement waits for nothing.
void hurry(int socket) {
  const int on = 1;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

// Packets that are sealed and not sent, and room for those that come.
struct Port::Batch {
  int num_packets = 0, num_sent = 0;
  std::array<std::array<unsigned char, kPacketBytes>, kPackets> packets;
  std::array<int, kPackets> lengths, peers;
  std::vector<unsigned char> received = std::vector<unsigned char>(kReceives * kReceiveBytes);
  unsigned char opened[kReceiveBytes];
  bool has_caller = false;  // somebody connects
  std::vector<pollfd> ready;
};

Nanos Port::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Port::Port(PortSettings settings)
    : settings_(std::move(settings)),
      endpoint_(settings_.rank, settings_.num_ranks, settings_.world, settings_.most_bytes_per_s),
      batch_(std::make_unique<Batch>()),
      owner_(getpid()) {
  const auto num_ranks = static_cast<size_t>(settings_.num_ranks);
  if (settings_.keys_out.size() != num_ranks || settings_.keys_in.size() != num_ranks) {
    throw std::invalid_argument("there is one key a rank and direction");
  }
  for (size_t peer = 0; peer < num_ranks; ++peer) {
    seals_.emplace_back(settings_.keys_out[peer], true);
    opens_.emplace_back(settings_.keys_in[peer], false);
  }
  sockaddr_in place{};
  place.sin_family = AF_INET;
  if (inet_pton(AF_INET, settings_.address.c_str(), &place.sin_addr) != 1) {
    throw std::invalid_argument("no IPv4 address: " + settings_.address);
  }
  socket_ = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) fail("a UDP socket");
  int is_bound = -1;
  for (int port = settings_.first_port; port <= settings_.last_port && is_bound != 0; ++port) {
    place.sin_port = htons(static_cast<uint16_t>(port));
    is_bound = bind(socket_, reinterpret_cast<sockaddr*>(&place), sizeof place);
  }
  socklen_t size = sizeof place;
  if (is_bound != 0 || getsockname(socket_, reinterpret_cast<sockaddr*>(&place), &size) != 0) {
    const int error = errno;
    ::close(socket_);
    errno = error;
    fail("UDP port " + std::to_string(settings_.first_port) + " to " +
         std::to_string(settings_.last_port) + " of " + settings_.address);
  }
  number_ = ntohs(place.sin_port);
  counts_.receive_buffer = grow(socket_, SO_RCVBUF, SO_RCVBUFFORCE);
  (void)grow(socket_, SO_SNDBUF, SO_SNDBUFFORCE);
  const int whole = IP_PMTUDISC_DO, on = 1;  // a fragment lost is a packet lost
  (void)setsockopt(socket_, IPPROTO_IP, IP_MTU_DISCOVER, &whole, sizeof whole);
  const auto takes = [&](int option, int value) {
    return settings_.offloads && setsockopt(socket_, SOL_UDP, option, &value, sizeof value) == 0;
  };
  counts_.has_gro = takes(UDP_GRO, 1);
  counts_.has_gso = takes(UDP_SEGMENT, 0);
  tunnels_.resize(num_ranks);
  tried_at_.resize(num_ranks, 0);
  // Without it, as where the number is taken, ranks that hear nothing end in an error.
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  (void)setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&place), sizeof place) != 0 ||
      listen(listener_, static_cast<int>(kMostCallers)) != 0) {
    ::close(listener_);
    listener_ = -1;
  }
  event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (event_ < 0) {
    ::close(socket_);
    fail("an eventfd");
  }
}

Port::~Port() { close(); }

void Port::connect(const std::vector<std::pair<std::string, int>>& peers) {
  if (thread_) throw std::logic_error("the port is connected");
  for (const auto& [address, port] : peers) {
    in_addr place{};
    if (inet_pton(AF_INET, address.c_str(), &place) != 1) {
      throw std::invalid_argument("no IPv4 address: " + address);
    }
    addresses_.emplace_back(place.s_addr, htons(static_cast<uint16_t>(port)));
  }
  if (addresses_.size() != static_cast<size_t>(settings_.num_ranks)) {
    throw std::invalid_argument("there is one address a rank");
  }
  thread_ = std::make_unique<std::thread>(deaf_thread([this] { run(); }));
}

void Port::close() {
  const bool is_fork = getpid() != owner_;  // its thread stayed behind, with the lock perhaps
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (is_fork) {
    (void)thread_.release();
  } else {
    lock.lock();
    if (std::exchange(is_stopped_, true)) return;
    wake();
    lock.unlock();
    if (thread_) thread_->join();
    thread_.reset();
    lock.lock();  // others may still ask; these numbers are soon those of other files
  }
  if (socket_ < 0) return;
  ::close(socket_);
  ::close(event_);
  if (listener_ >= 0) ::close(listener_);
  tunnels_.clear();
  callers_.clear();
  socket_ = event_ = listener_ = -1;
}

void Port::wake() {
  const uint64_t one = 1;
  if (event_ >= 0) (void)!write(event_, &one, sizeof one);
}

void Port::set_codec(const PacketCodec& codec, bool sends) {
  const std::lock_guard<std::mutex> lock(mutex_);
  endpoint_.set_codec(codec, sends);
}

void Port::expect(const Exchange& exchange) {
  const std::lock_guard<std::mutex> lock(mutex_);
  endpoint_.expect(now(), exchange);
}

void Port::begin(const Exchange& exchange) {
  const std::lock_guard<std::mutex> lock(mutex_);
  endpoint_.begin(now(), exchange);
  wake();
}

bool Port::is_done(uint64_t operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return endpoint_.is_done(operation);
}

Outcome Port::take(uint64_t operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return endpoint_.take(operation);
}

std::vector<uint64_t> Port::take_released() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return endpoint_.take_released();
}

LinkState Port::state(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return endpoint_.state(peer);
}

PortCounts Port::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::vector<int> Port::silent(double limit_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return endpoint_.silent(now(), static_cast<Nanos>(limit_s * kSecond));
}

std::vector<int> Port::tunnelled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> found;
  for (size_t peer = 0; peer < tunnels_.size(); ++peer) {
    if (tunnels_[peer]) found.push_back(static_cast<int>(peer));
  }
  return found;
}

// --- the thread

void Port::run() {
  Nanos last = now();
  while (true) {
    Nanos until = 0, rest = 0;
    bool is_full = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopped_) return;
      const Nanos at = now();
      if (at - last > kPause) endpoint_.paused(at - last);
      receive();
      look_for_silence(at);
      if (batch_->has_caller) accept_tunnels(at);
      serve_tunnels(at);
      endpoint_.turn(now());
      is_full = !send();
      for (size_t peer = 0; peer < tunnels_.size(); ++peer) {
        auto& tunnel = tunnels_[peer];
        if (tunnel && !tunnel->flush()) tunnel.reset();
        endpoint_.hold(static_cast<int>(peer), tunnel && tunnel->is_full());
      }
      until = endpoint_.wake_at(now());
      rest = endpoint_.rest();
      last = now();
    }
    wait(until, rest, is_full);
  }
}

void Port::wait(Nanos until, Nanos rest, bool is_full) {
  std::vector<pollfd>& ready = batch_->ready;
  // What comes, and what is due, in the next moment is dealt with in one go.
  if (rest > 0) {
    ready.assign({{event_, POLLIN, 0}});
    const timespec limit{0, std::min<Nanos>(rest, kSecond / 2)};
    (void)ppoll(ready.data(), ready.size(), &limit, nullptr);
  }
  ready.assign({{socket_, static_cast<short>(is_full ? POLLIN | POLLOUT : POLLIN), 0},
                {event_, POLLIN, 0},
                {listener_, POLLIN, 0}});  // -1 is passed over
  for (const auto& tunnel : tunnels_) {
    if (!tunnel) continue;
    const int wanted = tunnel->has_to_send() ? POLLIN | POLLOUT : POLLIN;
    ready.push_back({tunnel->socket(), static_cast<short>(wanted), 0});
  }
  for (const Caller& caller : callers_) ready.push_back({caller.tunnel->socket(), POLLIN, 0});
  const Nanos left = std::clamp<Nanos>(until - now(), 0, kLongestWait);
  const timespec limit{left / kSecond, left % kSecond};
  (void)ppoll(ready.data(), ready.size(), &limit, nullptr);
  uint64_t count = 0;
  if (ready[1].revents & POLLIN) (void)!read(event_, &count, sizeof count);
  batch_->has_caller = ready[2].revents & POLLIN;
}

// --- where UDP does not pass

void Port::look_for_silence(Nanos at) {
  if (at - looked_at_ < kSecond / 4) return;
  looked_at_ = at;
  for (const int peer : endpoint_.silent(at, kSilence)) {
    const auto index = static_cast<size_t>(peer);
    if (tunnels_[index] || (tried_at_[index] > 0 && at - tried_at_[index] < kAgain)) continue;
    const bool is_first = settings_.rank < peer;
    if (!is_first && endpoint_.silent(at, kSilence + kLater).empty()) continue;
    tried_at_[index] = at;
    open_tunnel(peer);
  }
}

void Port::open_tunnel(int peer) {
  const int end = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (end < 0) return;
  auto tunnel = std::make_unique<Tunnel>(end);
  hurry(end);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = addresses_[static_cast<size_t>(peer)].first;
  place.sin_port = addresses_[static_cast<size_t>(peer)].second;
  // In progress: what is sent waits until it is connected, and is lost where it never is.
  const int done = ::connect(end, reinterpret_cast<sockaddr*>(&place), sizeof place);
  if (done == 0 || errno == EINPROGRESS) tunnels_[static_cast<size_t>(peer)] = std::move(tunnel);
}

void Port::accept_tunnels(Nanos at) {
  while (listener_ >= 0) {
    sockaddr_in from{};
    socklen_t size = sizeof from;
    const int end =
        accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (end < 0) return;
    auto tunnel = std::make_unique<Tunnel>(end);
    hurry(end);
    const uint32_t address = from.sin_addr.s_addr;
    const bool is_ranks = std::any_of(addresses_.begin(), addresses_.end(),
                                      [&](const auto& each) { return each.first == address; });
    if (is_ranks && callers_.size() < kMostCallers) {
      callers_.push_back({std::move(tunnel), address, at + kCallerSpeaks});
    } else {
      ++counts_.strangers;
    }
  }
}

// The rank of an address whose key opens a packet; -1 for none.
int Port::who_sealed(uint32_t address, const unsigned char* packet, int num_bytes) {
  const int sealed = num_bytes - kHeaderBytes - kTagBytes;
  Header header;
  if (sealed < 0) return -1;
  std::memcpy(&header, packet, sizeof header);
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (static_cast<int>(peer) == settings_.rank || addresses_[peer].first != address) continue;
    if (opens_[peer].open(header, packet + kHeaderBytes, sealed, batch_->opened)) {
      return static_cast<int>(peer);
    }
  }
  return -1;
}

void Port::serve_tunnels(Nanos at) {
  for (size_t peer = 0; peer < tunnels_.size(); ++peer) {
    if (!tunnels_[peer]) continue;
    const bool goes_on = tunnels_[peer]->receive([&](const unsigned char* packet, int num_bytes) {
      take(static_cast<int>(peer), packet, num_bytes, at);
      return true;
    });
    if (!goes_on) tunnels_[peer].reset();
  }
  for (size_t i = 0; i < callers_.size();) {
    Caller& caller = callers_[i];
    int peer = -1;
    const bool goes_on = caller.tunnel->receive([&](const unsigned char* packet, int num_bytes) {
      if (peer < 0) peer = who_sealed(caller.address, packet, num_bytes);
      if (peer >= 0) take(peer, packet, num_bytes, at);
      return peer >= 0;
    });
    if (goes_on && peer < 0 && at < caller.until) {
      ++i;
      continue;
    }
    if (goes_on && peer >= 0) {
      tunnels_[static_cast<size_t>(peer)] = std::move(caller.tunnel);
    } else {
      ++counts_.strangers;
    }
    callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

int Port::peer_of(const sockaddr_in& from) const {
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer].first == from.sin_addr.s_addr &&
        addresses_[peer].second == from.sin_port) {
      return static_cast<int>(peer);
    }
  }
  return -1;
}

void Port::receive() {
  mmsghdr messages[kPlainReceives];
  iovec places[kPlainReceives];
  sockaddr_in from[kPlainReceives];
  alignas(cmsghdr) unsigned char notes[kPlainReceives][CMSG_SPACE(sizeof(int))];
  const int most = counts_.has_gro ? kReceives : kPlainReceives;
  const size_t room = batch_->received.size() / static_cast<size_t>(most);
  for (int turn = 0; turn < 16; ++turn) {  // then others have theirs
    for (int i = 0; i < most; ++i) {
      places[i] = {batch_->received.data() + static_cast<size_t>(i) * room, room};
      std::memset(&messages[i], 0, sizeof messages[i]);
      messages[i].msg_hdr.msg_name = &from[i];
      messages[i].msg_hdr.msg_namelen = sizeof from[i];
      messages[i].msg_hdr.msg_iov = &places[i];
      messages[i].msg_hdr.msg_iovlen = 1;
      messages[i].msg_hdr.msg_control = notes[i];
      messages[i].msg_hdr.msg_controllen = sizeof notes[i];
    }
    const int got = recvmmsg(socket_, messages, static_cast<unsigned>(most), MSG_DONTWAIT, nullptr);
    if (got <= 0) return;
    ++counts_.receives;
    const Nanos at = now();
    for (int i = 0; i < got; ++i) {
      const int peer = peer_of(from[i]);
      const int total = static_cast<int>(messages[i].msg_len);
      int each = total;
      for (cmsghdr* note = CMSG_FIRSTHDR(&messages[i].msg_hdr); note;
           note = CMSG_NXTHDR(&messages[i].msg_hdr, note)) {
        if (note->cmsg_level != SOL_UDP || note->cmsg_type != UDP_GRO) continue;
        std::memcpy(&each, CMSG_DATA(note), sizeof each);
      }
      if (peer < 0 || peer == settings_.rank || each <= 0) {
        ++counts_.strangers;
        continue;
      }
      const auto* packet = static_cast<const unsigned char*>(places[i].iov_base);
      for (int begin = 0; begin < total; begin += each) {
        take(peer, packet + begin, std::min(each, total - begin), at);
      }
    }
    if (got < most) return;
    (void)send();
  }
}

void Port::take(int peer, const unsigned char* packet, int num_bytes, Nanos at) {
  const int sealed = num_bytes - kHeaderBytes - kTagBytes;
  Header header;
  if (sealed < 0 || num_bytes > kPacketBytes) {
    ++counts_.strangers;
    return;
  }
  std::memcpy(&header, packet, sizeof header);
  // Into memory of our own: what is in place already must not be spoilt by what is forged.
  if (!opens_[static_cast<size_t>(peer)].open(header, packet + kHeaderBytes, sealed,
                                              batch_->opened)) {
    ++counts_.strangers;
    return;
  }
  (void)endpoint_.received(at, peer, header, batch_->opened, sealed);
}

bool Port::send() {
  Batch& batch = *batch_;
  while (true) {
    if (batch.num_sent == batch.num_packets) {
      batch.num_sent = batch.num_packets = 0;
      const Nanos at = now();
      Outbound out;
      while (batch.num_packets < kPackets && endpoint_.next(at, &out)) {
        auto& packet = batch.packets[static_cast<size_t>(batch.num_packets)];
        std::memcpy(packet.data(), &out.header, kHeaderBytes);
        if (!seals_[static_cast<size_t>(out.peer)].seal(out.header, out.payload, out.num_bytes,
                                                        packet.data() + kHeaderBytes)) {
          continue;  // as if it were lost
        }
        if (const auto& tunnel = tunnels_[static_cast<size_t>(out.peer)]) {
          tunnel->send(packet.data(), kHeaderBytes + out.num_bytes + kTagBytes);
          endpoint_.hold(out.peer, tunnel->is_full());
          continue;
        }
        batch.lengths[batch.num_packets] = kHeaderBytes + out.num_bytes + kTagBytes;
        batch.peers[batch.num_packets++] = out.peer;
      }
      if (batch.num_packets == 0) return true;
    }
    mmsghdr messages[kPackets];
    iovec places[kPackets];
    sockaddr_in to[kPackets];
    alignas(cmsghdr) unsigned char notes[kPackets][CMSG_SPACE(sizeof(uint16_t))];
    int num_packets_of[kPackets];
    int num_messages = 0;
    for (int at = batch.num_sent; at < batch.num_packets;) {
      int end = at + 1;
      // All of a message but the last have one length.
      while (counts_.has_gso && end < batch.num_packets && end - at < kSegments &&
             batch.peers[end] == batch.peers[at] && batch.lengths[end - 1] == batch.lengths[at] &&
             batch.lengths[end] <= batch.lengths[at]) {
        ++end;
      }
      for (int i = at; i < end; ++i) {
        places[i] = {batch.packets[static_cast<size_t>(i)].data(),
                     static_cast<size_t>(batch.lengths[i])};
      }
      const auto& [address, port] = addresses_[static_cast<size_t>(batch.peers[at])];
      sockaddr_in& place = to[num_messages];
      place = {};
      place.sin_family = AF_INET;
      place.sin_addr.s_addr = address;
      place.sin_port = port;
      msghdr& message = messages[num_messages].msg_hdr;
      std::memset(&message, 0, sizeof message);
      message.msg_name = &place;
      message.msg_namelen = sizeof place;
      message.msg_iov = places + at;
      message.msg_iovlen = static_cast<size_t>(end - at);
      if (end - at > 1) {
        message.msg_control = notes[num_messages];
        message.msg_controllen = sizeof notes[num_messages];
        cmsghdr* note = CMSG_FIRSTHDR(&message);
        note->cmsg_level = SOL_UDP;
        note->cmsg_type = UDP_SEGMENT;
        note->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        const auto length = static_cast<uint16_t>(batch.lengths[at]);
        std::memcpy(CMSG_DATA(note), &length, sizeof length);
      }
      num_packets_of[num_messages++] = end - at;
      at = end;
    }
    const int done = sendmmsg(socket_, messages, static_cast<unsigned>(num_messages), MSG_DONTWAIT);
    ++counts_.sends;
    if (done > 0) {
      for (int i = 0; i < done; ++i) batch.num_sent += num_packets_of[i];
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return false;
    if (errno == EINTR) continue;
    if (counts_.has_gso && num_packets_of[0] > 1 && (errno == EINVAL || errno == EIO)) {
      counts_.has_gso = false;  // a device that cannot
      continue;
    }
    // As if lost: nobody is there (an error of an earlier packet), or it is too long for the way.
    batch.num_sent += num_packets_of[0];
  }
}

}  // namespace loft::datagram
