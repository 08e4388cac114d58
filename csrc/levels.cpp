// Layer 3. Which instruction sets this machine has; loft_hvd/topology.py asks for the same
// features.

#include "levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <stdexcept>

#include "cpu/dispatch.h"
#include "wire/compact.h"

namespace loft {
namespace {

#if defined(LOFT_HAVE_AVX2) || defined(LOFT_HAVE_AVX512)
// GCC before 11 and clang before 18 do not know the name "f16c". AVX2 says that the system keeps
// the registers.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

std::vector<Level> find_built() {
  std::vector<Level> levels{{"baseline", true, baseline::kernels, baseline::codec}};
#if defined(LOFT_HAVE_AVX2) || defined(LOFT_HAVE_AVX512)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
                        __builtin_cpu_supports("bmi2") && has_f16c() &&
                        __builtin_cpu_supports("fma");
#endif
#if defined(LOFT_HAVE_AVX2)
  levels.push_back({"avx2", has_avx2, avx2::kernels, avx2::codec});
#endif
#if defined(LOFT_HAVE_AVX512)
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  levels.push_back({"avx512", has_avx512, avx512::kernels, avx512::codec});
#endif
  return levels;
}

// Those that this build has, the best last. Asked for once: what a virtual machine's CPU has is its
// host's to say, 17 us a call (2026-11-28).
const std::vector<Level>& built() {
  // Never destroyed: a daemon's thread may still call when the process ends.
  static const std::vector<Level>* const levels = new std::vector<Level>(find_built());
  return *levels;
}

}  // namespace

const Level& level_for(const std::string& wanted) {
  const Level* found = nullptr;
  std::string names;
  for (const Level& level : built()) {
    if (!level.runs) continue;  // built, but not for this machine
    names += (names.empty() ? "" : ", ") + std::string(level.name);
    if (wanted.empty() || wanted == level.name) found = &level;
  }
  if (found) return *found;
  throw std::invalid_argument("isa=" + wanted + " does not run here or was not built: use one of " +
                              names + ", or build again with LOFT_HVD_LEVELS=all");
}

std::vector<std::string> isa_levels(bool all) {
  std::vector<std::string> names;
  for (const Level& level : built()) {
    if (all || level.runs) names.push_back(level.name);
  }
  return names;
}

}  // namespace loft
