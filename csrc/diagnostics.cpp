// Layer 2. Which row was off.

#include "diagnostics.h"

#include <algorithm>

namespace loft {

// Coordinates that are aggregated and at once compared: their rows stay in the first cache. Fixed
// by the job, because the order of the sums depends on it.
static int64_t tile_of(size_t rows, int64_t bytes) {
  constexpr int64_t kRowBytes = 16 * 1024, kLeast = 128;
  const int64_t fitting = kRowBytes / (static_cast<int64_t>(rows) * bytes) / kLeast * kLeast;
  return std::max(kLeast, std::min(kCompared, fitting));
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
  alignas(64) double low[kCompared], high[kCompared];  // wide enough for either arithmetic type
  std::vector<RowLanes> rows(rows_);
  const int64_t bytes = size_of(job.dtype), step = tile_of(rows_, bytes);
  Work part = work;
  part.low = low;
  part.high = high;
  for (int64_t at = begin; at < end; at += step) {
    const int64_t count = std::min(step, end - at);
    kernel(part, at, at + count);
    compare(job.dtype,
            {work.rows, work.num_rows, at, count, work.out + at * bytes,
             reinterpret_cast<const char*>(low), reinterpret_cast<const char*>(high)},
            rows.data());
  }
  RowTally* tallies = tallies_.data() + static_cast<size_t>(block / every_) * rows_;
  for (size_t row = 0; row < rows_; ++row) {
    tallies[row].coordinates = end - begin;
    for (int lane = 0; lane < RowLanes::kLanes; ++lane) {
      tallies[row].num_outside += rows[row].outside[lane];
      tallies[row].num_non_finite += rows[row].non_finite[lane];
      tallies[row].squared_distance += rows[row].squared[lane];
    }
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
