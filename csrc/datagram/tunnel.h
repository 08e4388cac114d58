// Layer 1. Packets over a TCP connection, each behind its length: for two ranks between which UDP
// does not pass any more. Nothing waits here.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "datagram/packet.h"

namespace loft::datagram {

class Tunnel {
 public:
  // Takes a socket, which does not block, for its own.
  explicit Tunnel(int socket) : socket_(socket) {}
  Tunnel(const Tunnel&) = delete;
  Tunnel& operator=(const Tunnel&) = delete;
  ~Tunnel() { close(socket_); }

  int socket() const { return socket_; }
  bool has_to_send() const { return begin_ < out_.size(); }
  // Whether packets had better wait. One that does not is lost, as on any way.
  bool is_full() const { return out_.size() - begin_ > kMostQueued / 2; }

  void send(const unsigned char* packet, int num_bytes) {
    if (out_.size() - begin_ > kMostQueued) return;
    if (begin_ > kMostQueued) {
      out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
    const auto length = static_cast<uint16_t>(num_bytes);
    const auto* head = reinterpret_cast<const unsigned char*>(&length);
    out_.insert(out_.end(), head, head + sizeof length);
    out_.insert(out_.end(), packet, packet + num_bytes);
  }

  // Writes what the connection takes; false where it has ended.
  bool flush() {
    while (has_to_send()) {
      const ssize_t done =
          ::send(socket_, out_.data() + begin_, out_.size() - begin_, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (done < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      begin_ += static_cast<size_t>(done);
    }
    out_.clear();
    begin_ = 0;
    return true;
  }

  // Reads what there is, and calls take(packet, num_bytes), which says whether to go on; false
  // where the connection has ended, or is none of packets.
  template <typename Take>
  bool receive(const Take& take) {
    while (true) {
      const ssize_t got = recv(socket_, in_ + num_in_, sizeof in_ - num_in_, MSG_DONTWAIT);
      if (got == 0) return false;
      if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      num_in_ += static_cast<size_t>(got);
      size_t at = 0;
      uint16_t length = 0;
      while (num_in_ - at >= sizeof length) {
        std::memcpy(&length, in_ + at, sizeof length);
        if (length > kPacketBytes) return false;
        if (num_in_ - at < sizeof length + length) break;
        if (!take(in_ + at + sizeof length, static_cast<int>(length))) return false;
        at += sizeof length + length;
      }
      std::memmove(in_, in_ + at, num_in_ - at);
      num_in_ -= at;
    }
  }

 private:
  static constexpr size_t kMostQueued = 1 << 18;  // bytes

  int socket_;
  std::vector<unsigned char> out_;
  size_t begin_ = 0;  // of what is not written
  unsigned char in_[4 * kPacketBytes];
  size_t num_in_ = 0;
};

}  // namespace loft::datagram
