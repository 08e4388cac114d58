// Layer 0. Memory that a forked process shares with its parent, made its own.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace loft {

// Has what this process writes to memory from now on be its own: a page is copied when it is first
// written to. The memory is the beginning of the file that a descriptor is for. False, and nothing
// is lost, where the system refuses.
inline bool make_private(void* memory, uint64_t num_bytes, int descriptor) {
  void* own =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  if (own == MAP_FAILED) return false;
  const int move = MREMAP_MAYMOVE | MREMAP_FIXED;
  if (mremap(own, num_bytes, num_bytes, move, memory) != MAP_FAILED) return true;
  munmap(own, num_bytes);
  return false;
}

}  // namespace loft
