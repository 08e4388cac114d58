// Layer 0. Bytes on sockets once a period, from a thread of its own.
//
// Who reads them knows that this process runs and is not stopped, even while something in it holds
// the Python interpreter's lock. Knows nothing of what the bytes mean or of who reads them.

#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "process/threads.h"

namespace loft {

class Pulse {
 public:
  Pulse(double period_s, std::string bytes)
      : owner_(getpid()), shared_(std::make_unique<Shared>()) {
    // More, as infinity, would overflow where it is waited for.
    shared_->period = std::chrono::duration<double>(period_s < 1e9 ? period_s : 1e9);
    shared_->bytes = std::move(bytes);
    thread_ =
        std::make_unique<std::thread>(deaf_thread([shared = shared_.get()] { shared->run(); }));
  }

  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;
  ~Pulse() { stop(); }

  // Begins to write to a socket. Keeps a descriptor of its own, so that the number may be used
  // again after the caller has closed it; the caller shuts the connection down to end it. Where
  // no descriptor is left nothing is written.
  void add(int descriptor) {
    if (!is_running()) return;
    const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return;
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->drop(descriptor);
    shared_->sockets[descriptor] = own;
  }

  // Ends writing to it. Nothing happens where it was not added.
  void remove(int descriptor) {
    if (!is_running()) return;
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->drop(descriptor);
  }

  // Ends the thread; can be called again.
  void stop() {
    if (!is_running()) {
      (void)thread_.release();
      (void)shared_.release();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->is_stopped = true;
    }
    shared_->wake.notify_all();
    thread_->join();
    for (const auto& [descriptor, own] : shared_->sockets) close(own);
    thread_.reset();
    shared_.reset();
  }

 private:
  // What the thread works on. A fork of the process has it without the thread, perhaps locked, and
  // its end would wait for that thread: there it is left as it is.
  struct Shared {
    std::chrono::duration<double> period{};
    std::string bytes;
    std::mutex mutex;  // guards what follows
    std::condition_variable wake;
    bool is_stopped = false;
    std::map<int, int> sockets;  // the caller's descriptor -> ours

    void drop(int descriptor) {
      const auto found = sockets.find(descriptor);
      if (found == sockets.end()) return;
      close(found->second);
      sockets.erase(found);
    }

    void run() {
      std::unique_lock<std::mutex> lock(mutex);
      while (!wake.wait_for(lock, period, [this] { return is_stopped; })) {
        for (const auto& [descriptor, own] : sockets) {
          // Lost where the other side has not read for long, or is gone: that is not for here.
          (void)!send(own, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        }
      }
    }
  };

  bool is_running() const { return shared_ && getpid() == owner_; }

  const pid_t owner_;
  std::unique_ptr<Shared> shared_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace loft
