// Layer 2. Which row was off.

#include "cpu/diagnostics.h"

#include <algorithm>

namespace loft {

// The kernel and the comparison take turns. Up to about 16 rows of floats then stay in the first
// cache, and as many as there can be in the second. Fixed by the job, because the order of the sums
// depends on it.
static int64_t turn_of(size_t rows, int64_t bytes) {
  constexpr int64_t kBytes = 256 * 1024, kLeast = 128;
  const int64_t fitting = kBytes / (static_cast<int64_t>(rows) * bytes) / kLeast * kLeast;
  return std::max(kLeast, std::min(kCompared, fitting));
}

// Of up to so many rows the next turn's coordinates are fetched while these are compared. More take
// the kernel so long that nothing is gained.
constexpr size_t kFetchedRows = 8;

// Whether what is kept of a coordinate is the value of one row.
static bool keeps_one(const Job& job) {
  const int rows = static_cast<int>(job.rows.size());
  if (job.params.rule == Rule::kMedian) return rows % 2 && job.weights.empty();
  return job.params.rule == Rule::kTrimmedMean && 2 * job.params.f + 1 == rows;
}

void start(Diagnostics& diagnostics, size_t rows) {
  diagnostics.coordinates = 0;
  diagnostics.num_outside.assign(rows, 0);
  diagnostics.num_non_finite.assign(rows, 0);
  diagnostics.squared_distance.assign(rows, 0.0);
}

DiagnosticBlocks::DiagnosticBlocks(size_t rows, int64_t blocks, int every)
    : rows_(rows), every_(std::max(1, every)) {
  if (rows) tallies_.resize(static_cast<size_t>((blocks + every_ - 1) / every_) * rows);
}

void DiagnosticBlocks::run(const Job& job, const Work& work, Kernel kernel, Compare compare,
                           int64_t block, int64_t begin, int64_t end) {
  alignas(64) char low[kCompared * sizeof(double)], high[kCompared * sizeof(double)];
  std::vector<RowLanes> rows(rows_);
  const int64_t bytes = size_of(job.dtype), turn = turn_of(rows_, bytes);
  const int64_t ahead = rows_ <= kFetchedRows ? turn * bytes : 0;
  Work part = work;
  part.low = low;
  part.high = keeps_one(job) ? low : high;
  for (int64_t from = begin; from < end; from += turn) {
    const int64_t to = std::min(end, from + turn);
    kernel(part, from, to);
    compare(job.dtype,
            {work.rows, work.num_rows, from, to - from, work.out + from * bytes, low,
             static_cast<const char*>(part.high), ahead},
            rows.data());
  }
  RowTally* tallies = tallies_.data() + static_cast<size_t>(block / every_) * rows_;
  for (size_t row = 0; row < rows_; ++row) {
    tallies[row].coordinates = end - begin;
    tallies[row].num_outside = rows[row].outside;
    tallies[row].num_non_finite = rows[row].non_finite;
    for (double squared : rows[row].squared) tallies[row].squared_distance += squared;
  }
}

void DiagnosticBlocks::add_to(Diagnostics& diagnostics) const {
  for (size_t i = 0; i < tallies_.size(); ++i) {
    const size_t row = i % rows_;
    if (row == 0) diagnostics.coordinates += tallies_[i].coordinates;
    diagnostics.num_outside[row] += tallies_[i].num_outside;
    diagnostics.num_non_finite[row] += tallies_[i].num_non_finite;
    diagnostics.squared_distance[row] += tallies_[i].squared_distance;
  }
}

}  // namespace loft
