// Layer 2. Which row was off.

#include "diagnostics.h"

#include <algorithm>

namespace loft {

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
  RowTally* tallies = tallies_.data() + static_cast<size_t>(block / every_) * rows_;
  const int64_t bytes = size_of(job.dtype);
  Work part = work;
  part.low = low;
  part.high = high;
  for (int64_t at = begin; at < end; at += kCompared) {
    const int64_t count = std::min(kCompared, end - at);
    kernel(part, at, at + count);
    // at once, while the rows are in the cache
    compare(job.dtype,
            {work.rows, work.num_rows, at, count, work.out + at * bytes,
             reinterpret_cast<const char*>(low), reinterpret_cast<const char*>(high)},
            tallies);
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
