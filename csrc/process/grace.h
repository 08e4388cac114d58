// Layer 0. SIGTERM ends the process a moment later, and those who asked hear of it first.
//
// A launcher ends all ranks as soon as one has ended, perhaps before the others have seen which. A
// handler of the interpreter's would run when the main thread comes back to Python, which may be
// never. So this one is the kernel's, and a thread of its own does the rest. It takes the place of
// the default action only: a script that handles SIGTERM itself keeps it.

#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>

#include "process/leave.h"
#include "process/threads.h"

namespace loft {

// What the handler, its thread and those who asked share, for as long as the process lives. A
// forked child has it without the thread, and perhaps locked: there nothing here is used.
struct Grace {
  std::atomic<pid_t> owner{0};
  std::atomic<int64_t> told_ns{0};  // when SIGTERM came first, by monotonic_ns; 0: it has not
  int told[2] = {-1, -1};           // a pipe, from the handler to the thread
  double seconds = 0;
  std::mutex mutex;              // guards what follows
  std::map<int, int> listeners;  // the caller's descriptor -> ours

  void drop(int descriptor) {
    const auto found = listeners.find(descriptor);
    if (found == listeners.end()) return;
    close(found->second);
    listeners.erase(found);
  }
};

inline Grace& grace() {
  static auto* shared = new Grace();  // never freed: a signal may come in the last moment
  return *shared;
}

// The first SIGTERM of a process gives it its time, a second one ends it at once.
inline void on_term(int) {
  const int before = errno;
  signal(SIGTERM, SIG_DFL);
  const bool is_first = getpid() == grace().owner && grace().told_ns.exchange(monotonic_ns()) == 0;
  if (!is_first || write(grace().told[1], "", 1) != 1) kill(getpid(), SIGTERM);
  errno = before;
}

// Seconds since this process was told to end by SIGTERM; below zero where it was not.
inline double since_sigterm_s() {
  const Grace& shared = grace();
  const int64_t at = shared.owner == getpid() ? shared.told_ns.load() : 0;
  return at == 0 ? -1 : 1e-9 * static_cast<double>(monotonic_ns() - at);
}

inline void end_after_grace() {
  Grace& shared = grace();
  char byte;
  if (read(shared.told[0], &byte, 1) != 1) return;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    for (const auto& [descriptor, own] : shared.listeners) {
      (void)!send(own, "T", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
  }
  timespec left{static_cast<time_t>(shared.seconds), 0};
  left.tv_nsec = static_cast<long>(1e9 * (shared.seconds - static_cast<double>(left.tv_sec)));
  nanosleep(&left, nullptr);
  kill(getpid(), SIGTERM);
}

// Whether SIGTERM has the handler given here.
inline bool is_term_handled_by(void (*handler)(int)) {
  struct sigaction now{};
  return sigaction(SIGTERM, nullptr, &now) == 0 && !(now.sa_flags & SA_SIGINFO) &&
         now.sa_handler == handler;
}

// From now on the first SIGTERM writes "T" to a socket, and ends the process so many seconds
// later, those of the first call. Keeps a descriptor of its own, so that the number may be used
// again after the caller has closed it. False, and nothing is done, where the process handles or
// ignores SIGTERM, as the first one of a container does, or has had it; in a fork of a process
// that has called this; and where no thread or descriptor is left.
inline bool add_grace(int descriptor, double seconds) {
  Grace& shared = grace();
  const pid_t owner = shared.owner;
  if ((owner != 0 && owner != getpid()) || getpid() == 1) return false;
  const std::lock_guard<std::mutex> lock(shared.mutex);
  if (!is_term_handled_by(on_term) && !is_term_handled_by(SIG_DFL)) return false;
  if (shared.told_ns != 0) return false;
  if (owner == 0) {
    if (pipe2(shared.told, O_CLOEXEC) != 0) return false;
    shared.seconds = seconds > 0 && seconds < 60 ? seconds : 0;  // NaN: none
    try {
      deaf_thread(end_after_grace).detach();
    } catch (const std::exception&) {
      for (const int end : shared.told) close(end);
      return false;
    }
    shared.owner = getpid();
  }
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return false;
  struct sigaction action{};
  action.sa_handler = on_term;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigfillset(&action.sa_mask);
  sigaction(SIGTERM, &action, nullptr);
  shared.drop(descriptor);
  shared.listeners[descriptor] = own;
  return true;
}

// Ends writing to a socket; after the last one SIGTERM has its default action again. Nothing
// happens where it was not added.
inline void remove_grace(int descriptor) {
  Grace& shared = grace();
  if (shared.owner != getpid()) return;
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.drop(descriptor);
  if (shared.listeners.empty() && is_term_handled_by(on_term)) signal(SIGTERM, SIG_DFL);
}

}  // namespace loft
