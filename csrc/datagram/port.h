// Layer 4. A UDP port on which ranks exchange values: an endpoint with sockets, keys and a thread.
// Where UDP does not pass between two of them any more, their packets go by a TCP connection to the
// port of the same number (tunnel.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "datagram/endpoint.h"
#include "datagram/seal.h"
#include "datagram/tunnel.h"

struct sockaddr_in;

namespace loft::datagram {

struct PortSettings {
  int rank = 0, num_ranks = 0;
  uint32_t world = 0;
  std::string address;                         // to listen on, IPv4
  int first_port = 0, last_port = 0;           // the first that is free; 0: any
  std::vector<std::string> keys_out, keys_in;  // by rank, of 16 bytes
  double most_bytes_per_s = 0;
  bool offloads = true;  // takes GSO and GRO where the kernel has them
};

struct PortCounts {
  uint64_t strangers = 0;  // packets from addresses that are no rank's, or that no key opens
  uint64_t sends = 0, receives = 0;  // calls of the kernel
  bool has_gso = false, has_gro = false;
  int receive_buffer = 0;  // bytes
};

class Port {
 public:
  explicit Port(PortSettings settings);
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  ~Port();

  int number() const { return number_; }
  // Begins; addresses and ports by rank.
  void connect(const std::vector<std::pair<std::string, int>>& peers);
  // Ends the thread; nothing is written to anybody's memory from then on. Can be called again.
  void close();

  void set_codec(const PacketCodec& codec, bool sends);
  void expect(const Exchange& exchange);
  void begin(const Exchange& exchange);
  bool is_done(uint64_t operation);
  Outcome take(uint64_t operation);
  std::vector<uint64_t> take_released();
  LinkState state(int peer);
  PortCounts counts();
  std::vector<int> silent(double limit_s);
  // The ranks to which packets go by TCP.
  std::vector<int> tunnelled();

 private:
  struct Batch;
  static Nanos now();
  void run();
  void receive();
  void take(int peer, const unsigned char* packet, int num_bytes, Nanos at);
  int peer_of(const sockaddr_in& from) const;
  bool send();  // whether all that was due is sent
  void wait(Nanos until, Nanos rest, bool is_full);
  void look_for_silence(Nanos at);
  void open_tunnel(int peer);
  void accept_tunnels(Nanos at);
  void serve_tunnels(Nanos at);
  int who_sealed(uint32_t address, const unsigned char* packet, int num_bytes);
  void wake();  // with the lock held

  const PortSettings settings_;
  int socket_ = -1, event_ = -1, number_ = 0;
  std::mutex mutex_;  // guards what follows
  Endpoint endpoint_;
  std::vector<Cipher> seals_, opens_;                     // by rank
  std::vector<std::pair<uint32_t, uint16_t>> addresses_;  // by rank, as the network has them
  std::unique_ptr<Batch> batch_;
  struct Caller {  // who has connected, and not said who it is
    std::unique_ptr<Tunnel> tunnel;
    uint32_t address;
    Nanos until;
  };
  int listener_ = -1;
  std::vector<std::unique_ptr<Tunnel>> tunnels_;  // by rank
  std::vector<Nanos> tried_at_;                   // by rank
  std::vector<Caller> callers_;
  Nanos looked_at_ = 0;
  PortCounts counts_;
  bool is_stopped_ = false;
  int owner_;  // process
  std::unique_ptr<std::thread> thread_;
};

}  // namespace loft::datagram
