// Layer 2. Levels: the instruction sets that this build has code for, and those that run here.
#pragma once

#include <string>
#include <vector>

namespace loft {

struct KernelTable;  // cpu/dispatch.h
struct BlockCodec;   // wire/compact.h

struct Level {
  const char* name;
  bool runs;  // on this machine
  const KernelTable& (*kernels)();
  const BlockCodec& (*codec)();
};

// The level of this name, or with "" the best one here. Throws std::invalid_argument for one that
// does not run here.
const Level& level_for(const std::string& wanted);

// The names of the levels that this machine runs, or of all that were built; the best last.
std::vector<std::string> isa_levels(bool all = false);

}  // namespace loft
