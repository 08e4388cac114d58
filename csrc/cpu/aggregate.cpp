// Layer 3. One job on the CPU: checks, blocks over coordinates, threads, choice of instruction set.
//
// Coordinates are independent, so neither the split into blocks nor the number of threads can
// change a bit. Threads are started per call and joined before it returns: a large job takes
// milliseconds, a start microseconds, and nothing is left behind that a fork could copy.

#include "aggregate.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu/diagnostics.h"
#include "cpu/dispatch.h"

namespace loft {
namespace {

constexpr int64_t kBytesAThread = 2 * 1024 * 1024;  // less input than this is not worth a thread

// Rounding to nearest, no flushing of subnormals, no traps, whatever the caller has set.
class FloatState {
 public:
#if defined(__SSE2__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

std::string describe(const Job& job) {
  return "rows=" + std::to_string(job.rows.size()) + ", numel=" + std::to_string(job.numel) +
         ", f=" + std::to_string(job.params.f);
}

const KernelTable& table_for(const std::string& wanted) {
  const std::vector<std::string> levels = isa_levels();
  const std::string level = wanted.empty() ? levels.back() : wanted;
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("isa=" + level + " does not run here; the best here is " +
                                levels.back());
  }
#if defined(LOFT_HAVE_X86_LEVELS)
  if (level == "avx512") return avx512::kernels();
  if (level == "avx2") return avx2::kernels();
#endif
  return baseline::kernels();
}

Work work_of(const Job& job) {
  Work work{};
  work.rows = reinterpret_cast<const char* const*>(job.rows.data());
  work.weights = job.weights.empty() ? nullptr : job.weights.data();
  work.num_rows = static_cast<int>(job.rows.size());
  for (int32_t weight : job.weights) work.total_weight += weight;
  work.params = job.params;
  work.out = static_cast<char*>(job.out);
  return work;
}

// Calls body(block) for every block; the first exception of any thread comes back.
template <typename Body>
void for_blocks(int64_t blocks, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  const auto loop = [&] {
    const FloatState state;
    try {
      for (int64_t block; (block = next.fetch_add(1)) < blocks;) body(block);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(threads, blocks); ++i) {
    try {
      helpers.emplace_back(loop);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: the ones there are do the work
    }
  }
  loop();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

int64_t threads_for(const Job& job, int threads) {
  const int64_t bytes = job.numel * size_of(job.dtype) * static_cast<int64_t>(job.rows.size());
  return std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kBytesAThread));
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> levels{"baseline"};
#if defined(LOFT_HAVE_X86_LEVELS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("fma")) {
    levels.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      levels.push_back("avx512");
    }
  }
#endif
  return levels;
}

void check(const Job& job) {
  const int64_t rows = static_cast<int64_t>(job.rows.size());
  const int64_t f = job.params.f;
  if (rows < 1 || rows > kMaxRows) {
    throw std::invalid_argument(describe(job) + ": need 1 <= rows <= " + std::to_string(kMaxRows));
  }
  if (job.numel < 0 || f < 0 || 2 * f >= rows) {
    throw std::invalid_argument(describe(job) + ": need numel >= 0 and 0 <= 2*f < rows");
  }
  if (job.weights.empty()) return;
  int64_t total = 0;
  for (int32_t weight : job.weights) {
    if (weight < 1) throw std::invalid_argument("weights must be >= 1; leave other rows out");
    total += weight;
  }
  if (static_cast<int64_t>(job.weights.size()) != rows || total > kMaxTotalWeight) {
    throw std::invalid_argument(describe(job) + ": need one weight a row, in all at most " +
                                std::to_string(kMaxTotalWeight) + ", not " + std::to_string(total));
  }
}

void aggregate_cpu(const Job& job, const CpuOptions& options) {
  check(job);
  if (options.diagnostics) start(*options.diagnostics, job.rows.size());
  if (job.numel == 0) return;
  const KernelTable& table = table_for(options.isa);
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(job.dtype)];
  const Work work = work_of(job);
  const int64_t blocks = (job.numel + kBlock - 1) / kBlock;
  DiagnosticBlocks samples(options.diagnostics ? job.rows.size() : 0, blocks,
                           options.diagnose_every);
  for_blocks(blocks, threads_for(job, options.threads), [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(job.numel, begin + kBlock);
    if (samples.wants(block)) {
      samples.run(job, work, kernel, table.compare, block, begin, end);
    } else {
      kernel(work, begin, end);
    }
  });
  if (options.diagnostics) samples.add_to(*options.diagnostics);
}

void pass_cpu(const Job& job, const CpuOptions& options, bool in_bursts) {
  check(job);
  if (job.dtype != DType::kFloat32) throw std::invalid_argument("the pass takes float32 rows only");
  const KernelTable& table = table_for(options.isa);
  const Kernel kernel = in_bursts ? table.burst : table.pass;
  const Work work = work_of(job);
  const int64_t blocks = (job.numel + kBlock - 1) / kBlock;
  for_blocks(blocks, threads_for(job, options.threads), [&](int64_t block) {
    kernel(work, block * kBlock, std::min(job.numel, (block + 1) * kBlock));
  });
}

}  // namespace loft
