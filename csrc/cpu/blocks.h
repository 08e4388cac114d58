// Layer 3. Blocks of coordinates, shared out to threads.
//
// Coordinates are independent, so neither the split into blocks nor the number of threads can
// change a bit. Threads are started per call and joined before it returns: a large job takes
// milliseconds, a start microseconds, and nothing is left behind that a fork could copy.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "rules.h"

namespace loft {

// Less input than this is not worth a thread. Bound from the memory: one core reads so much in
// about 150 us (14 GB/s), and starting a thread takes some tens.
constexpr int64_t kBytesAThread = 2 * 1024 * 1024;

// Rounding to nearest, no flushing of subnormals, no traps, whatever the caller has set.
class FloatState {
 public:
  FloatState() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);  // as at a program's start
  }
  ~FloatState() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

// Calls body(begin, end) for every block of `numel` coordinates, each of which has so many bytes of
// input; a thread's first exception comes back. A thread takes `block` of them at a time.
template <typename Body>
void for_blocks(int64_t numel, int64_t bytes, int threads, const Body& body,
                int64_t block = kBlock) {
  std::atomic<int64_t> next{0};  // coordinate from which on nobody has taken any yet
  std::exception_ptr failure;
  std::mutex guard;
  const auto loop = [&] {
    const FloatState state;
    try {
      for (int64_t begin; (begin = next.fetch_add(block)) < numel;) {
        body(begin, std::min(numel, begin + block));
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  const int64_t most = std::min<int64_t>(threads, numel * bytes / kBytesAThread);
  for (int64_t i = 1; i < std::min(most, (numel + block - 1) / block); ++i) {
    try {
      helpers.emplace_back(loop);
    } catch (const std::exception&) {
      break;  // no more threads, or no memory for them, to be had: the ones there are do the work
    }
  }
  loop();  // this thread works, too
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace loft
