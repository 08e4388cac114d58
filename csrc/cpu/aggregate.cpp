// Layer 3. One job on the CPU: checks, the instruction set, blocks over coordinates, threads, and
// what diagnostics look at.
//
// Coordinates are independent, so neither the split into blocks nor the number of threads can
// change a bit. Threads are started per call and joined before it returns: a large job takes
// milliseconds, a start microseconds, and nothing is left behind that a fork could copy.

#include "aggregate.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "cpu/dispatch.h"
#include "cpu/rows.h"

namespace loft {
namespace {

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

// --- instruction sets

struct Level {
  const char* name;
  bool runs;
  const KernelTable& (*kernels)();
};

#if defined(LOFT_HAVE_AVX2) || defined(LOFT_HAVE_AVX512)
// GCC before 11 and clang before 18 do not know the name "f16c". AVX2 says that the system keeps
// the registers.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

std::vector<Level> find_built() {
  std::vector<Level> levels{{"baseline", true, baseline::kernels}};
#if defined(LOFT_HAVE_AVX2) || defined(LOFT_HAVE_AVX512)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
                        __builtin_cpu_supports("bmi2") && has_f16c() &&
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

// Those that this build has, the best last. loft_hvd/topology.py asks for the same features. Asked
// for once: what a virtual machine's CPU has is its host's to say, 17 us a call (2026-11-28).
const std::vector<Level>& built() {
  // Never destroyed: a daemon's thread may still call when the process ends.
  static const std::vector<Level>* const levels = new std::vector<Level>(find_built());
  return *levels;
}

}  // namespace

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

namespace {

Work work_of(const Job& job) {
  const int32_t* weights = job.weights.empty() ? nullptr : job.weights.data();
  const auto* rows = reinterpret_cast<const char* const*>(job.rows.data());
  return {
      rows, weights, job.num_rows(), job.total_weight(), job.params, static_cast<char*>(job.out)};
}

// Calls body(begin, end) for every block of coordinates; a thread's first exception comes back.
template <typename Body>
void for_blocks(const Job& job, int threads, const Body& body) {
  const int64_t bytes = job.numel * size_of(job.dtype) * static_cast<int64_t>(job.rows.size());
  std::atomic<int64_t> next{0};  // coordinate from which on nobody has taken any yet
  std::exception_ptr failure;
  std::mutex guard;
  const auto loop = [&] {
    const FloatState state;
    try {
      for (int64_t begin; (begin = next.fetch_add(kBlock)) < job.numel;) {
        body(begin, std::min(job.numel, begin + kBlock));
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  const int64_t most = std::min<int64_t>(threads, bytes / kBytesAThread);
  for (int64_t i = 1; i < std::min(most, (job.numel + kBlock - 1) / kBlock); ++i) {
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
  if (job.params.rule == Rule::kMedian) return job.num_rows() % 2 && job.weights.empty();
  return job.params.rule == Rule::kTrimmedMean && 2 * job.params.f + 1 == job.num_rows();
}

class DiagnosticBlocks {
 public:
  // Looks at every `every`-th block, the first one included; with no `total` at none.
  DiagnosticBlocks(const Job& job, int every, Diagnostics* total)
      : job_(job), period_(std::max(1, every) * kBlock), total_(total) {
    if (!total) return;
    *total = Diagnostics(job.rows.size());
    for (int64_t begin = 0; begin < job.numel; begin += period_) {
      total->coordinates += std::min(kBlock, job.numel - begin);
      found_.emplace_back(job.rows.size());
    }
  }

  bool wants(int64_t begin) const { return total_ && begin % period_ == 0; }

  // Aggregates a block and compares its rows; called for each wanted block, by any thread.
  void run(const Work& work, const KernelTable& table, Kernel kernel, int64_t begin, int64_t end) {
    alignas(64) char low[kCompared * sizeof(double)], high[kCompared * sizeof(double)];
    Work part = work;
    part.low = low;
    part.high = keeps_one(job_) ? low : high;  // one buffer for a window of one value
    run_turns(table, begin, end, low, static_cast<const char*>(part.high),
              [&](int64_t from, int64_t to) { kernel(part, from, to); });
  }

  // The same where the rows that the rule sees are mixed ones: no value of the given rows is
  // outside.
  template <typename Body>
  void run_mixed(const KernelTable& table, int64_t begin, int64_t end, const Body& body) {
    alignas(64) double low[kCompared], high[kCompared];
    if (job_.dtype == DType::kFloat64) {
      std::fill_n(low, kCompared, -std::numeric_limits<double>::infinity());
      std::fill_n(high, kCompared, std::numeric_limits<double>::quiet_NaN());
    } else {
      std::fill_n(reinterpret_cast<float*>(low), kCompared,
                  -std::numeric_limits<float>::infinity());
      std::fill_n(reinterpret_cast<float*>(high), kCompared,
                  std::numeric_limits<float>::quiet_NaN());
    }
    run_turns(table, begin, end, reinterpret_cast<const char*>(low),
              reinterpret_cast<const char*>(high), body);
  }

  // Aggregates and compares by turns: body(from, to) aggregates, and leaves the kept window.
  template <typename Body>
  void run_turns(const KernelTable& table, int64_t begin, int64_t end, const char* low,
                 const char* high, const Body& body) {
    const Work work = work_of(job_);
    std::vector<RowLanes> rows(job_.rows.size());  // of this block
    const int64_t bytes = size_of(job_.dtype), turn = turn_of(job_.rows.size(), bytes);
    const int64_t ahead = job_.rows.size() <= kFetchedRows ? turn * bytes : 0;
    for (int64_t from = begin; from < end; from += turn) {
      const int64_t to = std::min(end, from + turn);
      body(from, to);
      table.compare(
          job_.dtype,
          {work.rows, work.num_rows, from, to - from, work.out + from * bytes, low, high, ahead},
          rows.data());
    }
    Diagnostics& found = found_[static_cast<size_t>(begin / period_)];
    for (size_t row = 0; row < rows.size(); ++row) {
      found.num_outside[row] = rows[row].outside;
      found.num_non_finite[row] = rows[row].non_finite;
      for (double squared : rows[row].squared) found.squared_distance[row] += squared;
    }
  }

  // Adds up what all wanted blocks had, in their order.
  void finish() {
    for (const Diagnostics& found : found_) {
      for (size_t row = 0; row < job_.rows.size(); ++row) {
        total_->num_outside[row] += found.num_outside[row];
        total_->num_non_finite[row] += found.num_non_finite[row];
        total_->squared_distance[row] += found.squared_distance[row];
      }
    }
  }

 private:
  const Job& job_;
  const int64_t period_;  // coordinates from one wanted block to the next
  Diagnostics* total_;
  std::vector<Diagnostics> found_;  // one a wanted block
};

}  // namespace

std::vector<std::string> isa_levels(bool all) {
  std::vector<std::string> names;
  for (const Level& level : built()) {
    if (all || level.runs) names.push_back(level.name);
  }
  return names;
}

std::string describe(const Job& job) {
  return "rows=" + std::to_string(job.rows.size()) + ", numel=" + std::to_string(job.numel) +
         ", f=" + std::to_string(job.params.f);
}

void check(const Job& job) {
  const int64_t rows = static_cast<int64_t>(job.rows.size());
  if (rows < 1 || rows > kMaxRows) {
    throw std::invalid_argument(describe(job) + ": need 1 <= rows <= " + std::to_string(kMaxRows));
  }
  if (job.numel < 0 || job.params.f < 0 || 2 * int64_t{job.params.f} >= rows) {
    throw std::invalid_argument(describe(job) + ": need numel >= 0 and 0 <= 2*f < rows");
  }
  const auto null = std::find(job.rows.begin(), job.rows.end(), nullptr);
  if (job.numel > 0 && (job.out == nullptr || null != job.rows.end())) {
    const std::string which =
        job.out == nullptr ? "out" : "row " + std::to_string(null - job.rows.begin());
    throw std::invalid_argument(describe(job) + ": " + which + " has no address");
  }
  if (job.weights.empty()) return;
  if (*std::min_element(job.weights.begin(), job.weights.end()) < 1) {
    throw std::invalid_argument("weights must be >= 1; leave other rows out");
  }
  const int64_t total = job.total_weight();
  if (static_cast<int64_t>(job.weights.size()) != rows || total > kMaxTotalWeight) {
    throw std::invalid_argument(describe(job) + ": need one weight a row, in all at most " +
                                std::to_string(kMaxTotalWeight) + ", not " + std::to_string(total));
  }
}

void check_rows(const Job& job, void* out) {
  Job any = job;
  any.params = {};
  any.weights.clear();
  any.out = out;
  check(any);
}

void aggregate_cpu(const Job& job, const CpuOptions& options) {
  check(job);
  const KernelTable& table = table_for(options.isa);
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(job.dtype)];
  const Work work = work_of(job);
  DiagnosticBlocks samples(job, options.diagnose_every, options.diagnostics);
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) {
    samples.wants(begin) ? samples.run(work, table, kernel, begin, end) : kernel(work, begin, end);
  });
  samples.finish();
}

void distances_cpu(const Job& job, const CpuOptions& options, double* table) {
  check_rows(job, table);
  const KernelTable& kernels = table_for(options.isa);
  const int rows = job.num_rows(), stride = rows + 1;
  for (int row = 0; row < rows; ++row) std::fill_n(table + row * stride + row + 1, rows - row, 0.0);
  // Every block's sums wait until those before it are added, whatever thread has which.
  std::mutex guard;
  std::map<int64_t, std::vector<double>> ready;  // by the block's first coordinate
  int64_t next = 0;                              // block to be added
  const auto* addresses = reinterpret_cast<const char* const*>(job.rows.data());
  constexpr int64_t kPairs = kGroupRows * kGroupRows;
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  const auto for_groups = [&](int64_t begin, int64_t end, double* found, const auto& body) {
    for (int a = 0; a < rows; a += kGroupRows) {
      for (int b = a; b < rows; b += kGroupRows, found += kPairs) {
        const int a_end = std::min(rows, a + kGroupRows), b_end = std::min(rows, b + kGroupRows);
        body(RowRanges{addresses, a, a_end, b, b_end, begin, end}, found);
      }
    }
  };
  const auto add = [&](const RowRanges& what, const double* found) {
    for (int a = what.a; a < what.a_end; ++a) {
      for (int b = what.is_same() ? a : what.b; b < what.b_end; ++b) {
        const int column = a == b ? rows : b;  // a row's own place has its squared length
        table[a * stride + column] += found[RowRanges::place(a - what.a, b - what.b)];
      }
    }
  };
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) {
    std::vector<double> found(static_cast<size_t>(kPairs * groups * (groups + 1) / 2));
    for_groups(begin, end, found.data(),
               [&](const RowRanges& what, double* to) { kernels.distances(job.dtype, what, to); });
    const std::lock_guard<std::mutex> lock(guard);
    ready.emplace(begin, std::move(found));
    for (; !ready.empty() && ready.begin()->first == next; next += kBlock) {
      for_groups(0, 0, ready.begin()->second.data(), add);
      ready.erase(ready.begin());
    }
  });
}

namespace {

// The rule's own job: the mixed rows, which have no address.
Job mixed_job(const Job& job, const Matrix& matrix) {
  Job inner = job;
  inner.rows.assign(static_cast<size_t>(std::max(0, matrix.num_mixed)), job.out);
  return inner;
}

}  // namespace

Mixing mixing_of(const Job& job, const Matrix& matrix) {
  check_rows(job, job.out);
  const Job inner = mixed_job(job, matrix);
  check(inner);
  const size_t rows = job.rows.size();
  if (matrix.weights.size() != inner.rows.size() * rows || matrix.scales.size() != rows) {
    throw std::invalid_argument(describe(job) + ": need a weight of every row for each of " +
                                std::to_string(matrix.num_mixed) + " mixed rows, and its scale");
  }
  const FloatState state;  // as for the kernels: whoever calls may flush small numbers to 0
  // As the arithmetic has it: a weight that is too small for it is none.
  const auto rounded = [&](double weight) {
    return job.dtype == DType::kFloat64 ? weight : static_cast<float>(weight);
  };
  Mixing mixing;
  mixing.starts.push_back(0);
  for (const double scale : matrix.scales) mixing.scales.push_back(rounded(scale));
  for (size_t mixed = 0; mixed < inner.rows.size(); ++mixed) {
    for (size_t row = 0; row < rows; ++row) {
      const double weight = rounded(matrix.weights[mixed * rows + row]);
      if (weight == 0 || mixing.scales[row] == 0) continue;
      mixing.from.push_back(static_cast<int>(row));
      mixing.by.push_back(weight);
    }
    const auto first = mixing.by.begin() + mixing.starts.back(), last = mixing.by.end();
    const bool is_common = std::adjacent_find(first, last, std::not_equal_to<>()) == last;
    mixing.common.push_back(first != last && is_common ? *first : 0);
    mixing.starts.push_back(static_cast<int>(mixing.from.size()));
  }
  return mixing;
}

namespace {

// Mixed rows that differ, and which of them each one is: where honest rows lie together, many leave
// out the same ones, and are mixed once.
struct MixPlan {
  std::vector<MixedRow> each;
  std::vector<int> which;
};

MixPlan plan_of(const Mixing& mixing) {
  MixPlan plan;
  std::map<std::vector<std::pair<int, double>>, int> known;  // by terms
  for (size_t row = 0; row < mixing.common.size(); ++row) {
    const int first = mixing.starts[row], count = mixing.starts[row + 1] - first;
    std::vector<std::pair<int, double>> terms;
    for (int k = first; k < first + count; ++k) terms.emplace_back(mixing.from[k], mixing.by[k]);
    const auto [place, is_new] = known.try_emplace(terms, static_cast<int>(plan.each.size()));
    if (is_new) plan.each.push_back({first, count, mixing.common[row]});
    plan.which.push_back(place->second);
  }
  return plan;
}

}  // namespace

void mix_cpu(const Job& job, const Matrix& matrix, const CpuOptions& options) {
  const Mixing mixing = mixing_of(job, matrix);
  const KernelTable& table = table_for(options.isa);
  const DType dtype = job.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(dtype)];
  const Job inner = mixed_job(job, matrix);
  Work work = work_of(inner);
  work.rows = nullptr;  // the mixed rows, which the kernel makes
  const MixPlan plan = plan_of(mixing);
  const MixedRows mixed{reinterpret_cast<const char* const*>(job.rows.data()),
                        job.num_rows(),
                        mixing.scales.data(),
                        mixing.from.data(),
                        mixing.by.data(),
                        plan.each.data(),
                        static_cast<int>(plan.each.size()),
                        plan.which.data(),
                        matrix.num_mixed};
  const auto run = [&](int64_t begin, int64_t end) {
    table.mix(job.dtype, mixed, work, kernel, begin, end);
  };
  DiagnosticBlocks samples(job, options.diagnose_every, options.diagnostics);
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) {
    samples.wants(begin) ? samples.run_mixed(table, begin, end, run) : run(begin, end);
  });
  samples.finish();
}

void pass_cpu(const Job& job, const CpuOptions& options, bool in_bursts) {
  check(job);
  if (job.dtype != DType::kFloat32) throw std::invalid_argument("the pass takes float32 rows only");
  const KernelTable& table = table_for(options.isa);
  const Kernel kernel = in_bursts ? table.burst : table.pass;
  const Work work = work_of(job);
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) { kernel(work, begin, end); });
}

bool absorb_cpu(const AverageUpdate& what, const CpuOptions& options) {
  if (what.dtype != DType::kFloat64 && what.dtype != DType::kFloat32) {
    throw std::invalid_argument("dtype=" + std::to_string(static_cast<int>(what.dtype)) +
                                ": averages are float64 or float32, 0 or 1");
  }
  Job job;  // two rows are read; the average stands for a gradient that may be null
  job.rows = {what.average, what.average};
  job.numel = what.numel;
  job.dtype = what.dtype;
  check_rows(job, what.out);
  const KernelTable& table = table_for(options.isa);
  char* const average = static_cast<char*>(what.average);
  char* const out = static_cast<char*>(what.out);
  const Absorbed part{static_cast<const char*>(what.gradient), average, what.gain, what.keep, out};
  std::atomic<bool> is_finite{true};
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) {
    if (!table.absorb(what.dtype, part, begin, end)) is_finite = false;
  });
  if (!is_finite) return false;
  // Not before all are known: the average is to be all new or all old.
  const int64_t bytes = size_of(what.dtype);
  for_blocks(job, options.threads, [&](int64_t begin, int64_t end) {
    std::memcpy(average + begin * bytes, out + begin * bytes,
                static_cast<size_t>((end - begin) * bytes));
  });
  return true;
}

}  // namespace loft
