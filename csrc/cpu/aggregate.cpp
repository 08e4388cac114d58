// Layer 3. One job on the CPU: checks, the instruction set, blocks over coordinates, threads, and
// what diagnostics look at.
//
// Coordinates are independent, so neither the split into blocks nor the number of threads can
// change a bit. Threads are started per call and joined before it returns: a large job takes
// milliseconds, a start microseconds, and nothing is left behind that a fork could copy.

#include "aggregate.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu/dispatch.h"

namespace loft {
namespace {

// Less input than this is not worth a thread. Bound from the memory: one core reads so much in
// about 150 us (14 GB/s), and starting a thread takes some tens.
constexpr int64_t kBytesAThread = 2 * 1024 * 1024;

// Rounding to nearest, no flushing of subnormals, no traps, whatever the caller has set.
class FloatState {
 public:
#if defined(__SSE2__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // MXCSR as at a start
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

// --- instruction sets

struct Level {
  const char* name;
  bool runs;
  const KernelTable& (*kernels)();
};

// Those that this build has, the best last. loft_hvd/topology.py asks for the same features.
std::vector<Level> built() {
  std::vector<Level> levels{{"baseline", true, baseline::kernels}};
#if defined(LOFT_HAVE_AVX2) || defined(LOFT_HAVE_AVX512)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
                        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") &&
                        __builtin_cpu_supports("fma");
#endif
#if defined(LOFT_HAVE_AVX2)
  levels.push_back({"avx2", has_avx2, avx2::kernels});
#endif
#if defined(LOFT_HAVE_AVX512)
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  levels.push_back({"avx512", has_avx512, avx512::kernels});
#endif
  return levels;
}

const KernelTable& table_for(const std::string& wanted) {
  const KernelTable& (*found)() = nullptr;
  std::string names;
  for (const Level& level : built()) {
    if (!level.runs) continue;  // built, but not for this machine
    names += (names.empty() ? "" : ", ") + std::string(level.name);
    if (wanted.empty() || wanted == level.name) found = level.kernels;
  }
  if (found) return found();
  throw std::invalid_argument("isa=" + wanted + " does not run here or was not built: use one of " +
                              names + ", or build again with LOFT_HVD_LEVELS=all");
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
  std::atomic<int64_t> next{0};  // block that nobody has taken yet
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
  loop();  // this thread works, too
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

int64_t threads_for(const Job& job, int threads) {
  const int64_t bytes = job.numel * size_of(job.dtype) * static_cast<int64_t>(job.rows.size());
  return std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kBytesAThread));
}

// --- which row was off
//
// A sampled block is aggregated by the same kernel, which then also leaves each coordinate's kept
// window; while the rows are still in the cache they are compared with it. Sums of a block run over
// sixteen fixed lanes and blocks are added in order, so that no thread count shows.

// Coordinates after which the kernel and the comparison take turns. Bound from the caches: up to 16
// rows of floats then stay in the L1 cache, and as many as there can be in the L2 cache. Fixed by
// the job, because the order of the sums depends on it.
int64_t turn_of(size_t rows, int64_t bytes) {
  constexpr int64_t kBytes = 256 * 1024, kLeast = 128;
  const int64_t fitting = kBytes / (static_cast<int64_t>(rows) * bytes) / kLeast * kLeast;
  return std::max(kLeast, std::min(kCompared, fitting));
}

// Of up to so many rows the next turn's coordinates are prefetched while these are compared.
// Measured (commit abc40b9): more take the kernel so long that nothing is gained.
constexpr size_t kFetchedRows = 8;

// Whether what is kept of a coordinate is the value of one row.
bool keeps_one(const Job& job) {
  const int rows = static_cast<int>(job.rows.size());
  if (job.params.rule == Rule::kMedian) return rows % 2 && job.weights.empty();
  return job.params.rule == Rule::kTrimmedMean && 2 * job.params.f + 1 == rows;
}

// What one row did in one block; see Diagnostics in aggregate.h.
struct RowTally {
  int64_t num_outside, num_non_finite;
  double squared_distance;
};

class DiagnosticBlocks {
 public:
  // Looks at every `every`-th block, the first one included; with no `total` at none.
  DiagnosticBlocks(const Job& job, int64_t blocks, int every, Diagnostics* total)
      : job_(job), every_(std::max(1, every)), total_(total) {
    if (!total) return;
    const size_t rows = job.rows.size();
    *total = {0, std::vector<int64_t>(rows), std::vector<int64_t>(rows), std::vector<double>(rows)};
    tallies_.resize(static_cast<size_t>((blocks + every_ - 1) / every_) * rows);
  }

  bool wants(int64_t block) const { return total_ && block % every_ == 0; }

  // Aggregates a block and compares its rows; called for each wanted block, by any thread.
  void run(const Work& work, const KernelTable& table, Kernel kernel, int64_t begin, int64_t end) {
    alignas(64) char low[kCompared * sizeof(double)], high[kCompared * sizeof(double)];
    std::vector<RowLanes> rows(job_.rows.size());  // of this block
    const int64_t bytes = size_of(job_.dtype), turn = turn_of(job_.rows.size(), bytes);
    const int64_t ahead = job_.rows.size() <= kFetchedRows ? turn * bytes : 0;
    Work part = work;
    part.low = low;
    part.high = keeps_one(job_) ? low : high;  // one buffer for a window of one value
    for (int64_t from = begin; from < end; from += turn) {
      const int64_t to = std::min(end, from + turn);
      kernel(part, from, to);
      const char* to_high = static_cast<const char*>(part.high);
      table.compare(
          job_.dtype,
          {work.rows, work.num_rows, from, to - from, work.out + from * bytes, low, to_high, ahead},
          rows.data());
    }
    RowTally* tally = tallies_.data() + static_cast<size_t>(begin / kBlock / every_) * rows.size();
    for (const RowLanes& row : rows) {
      *tally = {row.outside, row.non_finite, 0};
      for (double squared : row.squared) tally->squared_distance += squared;
      ++tally;
    }
  }

  // Adds up what all wanted blocks had, in their order.
  void finish() {
    if (!total_) return;
    const int64_t last = (job_.numel + kBlock - 1) / kBlock - 1, period = every_ * kBlock;
    total_->coordinates = (job_.numel + period - 1) / period * kBlock;
    if (last % every_ == 0) total_->coordinates -= (last + 1) * kBlock - job_.numel;
    for (size_t i = 0; i < tallies_.size(); ++i) {
      const size_t row = i % job_.rows.size();
      total_->num_outside[row] += tallies_[i].num_outside;
      total_->num_non_finite[row] += tallies_[i].num_non_finite;
      total_->squared_distance[row] += tallies_[i].squared_distance;
    }
  }

 private:
  const Job& job_;
  int64_t every_;
  Diagnostics* total_;
  std::vector<RowTally> tallies_;  // [wanted blocks, rows]
};

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Level& level : built()) {
    if (level.runs) names.push_back(level.name);
  }
  return names;
}

std::vector<std::string> built_levels() {
  std::vector<std::string> names;
  for (const Level& level : built()) names.push_back(level.name);
  return names;
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
  const KernelTable& table = table_for(options.isa);
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(job.dtype)];
  const Work work = work_of(job);
  const int64_t blocks = (job.numel + kBlock - 1) / kBlock;
  DiagnosticBlocks samples(job, blocks, options.diagnose_every, options.diagnostics);
  for_blocks(blocks, threads_for(job, options.threads), [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(job.numel, begin + kBlock);
    if (samples.wants(block)) {
      samples.run(work, table, kernel, begin, end);
    } else {
      kernel(work, begin, end);
    }
  });
  samples.finish();
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
