// Layer 3. A sampled block: the kernel and the comparison of rows take turns in the cache.

#include "cpu/diagnostics.h"

#include <algorithm>
#include <limits>

namespace loft {
namespace {

// Coordinates after which the kernel and the comparison take turns. Bound from the caches: up to 16
// rows of floats then stay in the L1 cache, and as many as there can be in the L2 cache. Fixed by
// the job, because the order of the sums depends on it.
int64_t turn_of(const Job& job) {
  constexpr int64_t kBytes = 256 * 1024, kLeast = 128;
  const int64_t fitting = kBytes / job.coordinate_bytes() / kLeast * kLeast;
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

// A window that no value is outside of: nothing is above NaN.
template <typename T>
void open_windows(char* low, char* high) {
  std::fill_n(reinterpret_cast<T*>(low), kCompared, -std::numeric_limits<T>::infinity());
  std::fill_n(reinterpret_cast<T*>(high), kCompared, std::numeric_limits<T>::quiet_NaN());
}

}  // namespace

DiagnosticBlocks::DiagnosticBlocks(const Job& job, const KernelTable& table,
                                   const CpuOptions& options)
    : job_(job),
      table_(table),
      period_(std::max(1, options.diagnose_every) * kBlock),
      total_(options.diagnostics) {
  if (!total_) return;
  *total_ = Diagnostics(job.rows.size());
  for (int64_t begin = 0; begin < job.numel; begin += period_) {
    total_->coordinates += std::min(kBlock, job.numel - begin);
    found_.emplace_back(job.rows.size());
  }
}

void DiagnosticBlocks::run(const Work& work, Kernel kernel, int64_t begin, int64_t end) {
  alignas(64) char low[kCompared * sizeof(double)], high[kCompared * sizeof(double)];
  Work part = work;
  part.low = low;
  part.high = keeps_one(job_) ? low : high;  // one buffer for a window of one value
  run_turns(begin, end, low, static_cast<const char*>(part.high),
            [&](int64_t from, int64_t to) { kernel(part, from, to); });
}

void DiagnosticBlocks::run_mixed(int64_t begin, int64_t end, const Aggregate& aggregate) {
  alignas(64) char low[kCompared * sizeof(double)], high[kCompared * sizeof(double)];
  job_.dtype == DType::kFloat64 ? open_windows<double>(low, high) : open_windows<float>(low, high);
  run_turns(begin, end, low, high, aggregate);
}

// `aggregate` leaves the kept windows of a turn in `low` and `high`, or they are there for all.
void DiagnosticBlocks::run_turns(int64_t begin, int64_t end, const char* low, const char* high,
                                 const Aggregate& aggregate) {
  std::vector<RowLanes> rows(job_.rows.size());  // of this block
  char* const out = static_cast<char*>(job_.out);
  const int64_t bytes = size_of(job_.dtype), turn = turn_of(job_);
  const int64_t ahead = job_.rows.size() <= kFetchedRows ? turn * bytes : 0;
  for (int64_t from = begin; from < end; from += turn) {
    const int64_t to = std::min(end, from + turn);
    aggregate(from, to);
    table_.compare(job_.dtype,
                   {job_.row_addresses(), job_.num_rows(), from, to - from, out + from * bytes, low,
                    high, ahead},
                   rows.data());
  }
  Diagnostics& found = found_[static_cast<size_t>(begin / period_)];
  for (size_t row = 0; row < rows.size(); ++row) {
    found.num_outside[row] = rows[row].outside;
    found.num_non_finite[row] = rows[row].non_finite;
    for (double squared : rows[row].squared) found.squared_distance[row] += squared;
  }
}

void DiagnosticBlocks::finish() {
  for (const Diagnostics& found : found_) {
    for (size_t row = 0; row < job_.rows.size(); ++row) {
      total_->num_outside[row] += found.num_outside[row];
      total_->num_non_finite[row] += found.num_non_finite[row];
      total_->squared_distance[row] += found.squared_distance[row];
    }
  }
}

}  // namespace loft
