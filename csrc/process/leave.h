// Layer 0. Leaves the process at a time, from a thread of its own.
//
// The last resort of a process that an error has ended: something in it may hold the Python
// interpreter's lock for ever, or the interpreter may be gone while the engine's end hangs. So the
// thread takes no lock of anybody's, and nothing runs at the end but the kernel.

#pragma once

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <string>

#include "process/threads.h"

namespace loft {

// When to leave, in nanoseconds of the monotonic clock; 0 for never. A forked child has it without
// the thread: it stays.
inline std::atomic<int64_t> leaves_at_ns{0};

inline int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

// Leaves the process with status 1 after so many seconds, and says why on standard error; of
// several calls the earliest counts. Cannot be taken back. False where the machine has no thread
// left.
inline bool leave_in(double seconds, const std::string& why) {
  constexpr double kMost = 1e9;  // 30 years: nanoseconds of more, as of infinity, overflow
  const double wait = seconds < 0 ? 0 : seconds < kMost ? seconds : kMost;  // NaN: kMost
  const int64_t due = monotonic_ns() + static_cast<int64_t>(1e9 * wait);
  int64_t before = leaves_at_ns.load();
  while (before == 0 || due < before) {
    if (leaves_at_ns.compare_exchange_weak(before, due)) break;
  }
  if (before != 0) return true;  // its thread runs, and sees the earlier time within a moment
  const auto* text = new std::string(why + '\n');  // for as long as the process lives
  try {
    deaf_thread([text] {
      while (monotonic_ns() < leaves_at_ns.load()) {
        timespec moment{0, 50'000'000};
        nanosleep(&moment, nullptr);
      }
      (void)!write(STDERR_FILENO, text->data(), text->size());
      _exit(1);
    }).detach();
  } catch (const std::exception&) {
    leaves_at_ns.store(0);
    delete text;
    return false;
  }
  return true;
}

}  // namespace loft
