// Layer 0. Threads that no signal reaches: signals are for those of the interpreter.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace loft {

// Starts a thread in which all signals are blocked, which a thread inherits. Throws what
// std::thread does where the machine has no thread or memory left.
template <typename Body>
std::thread deaf_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread started;
  try {
    started = std::thread(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace loft
