// Layer 2. Which row was off.

#include "diagnostics.h"

#include <algorithm>

namespace loft {
namespace {

constexpr int64_t kPart =
    1024;  // coordinates aggregated before they are compared: rows stay cached

}  // namespace

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
  alignas(64) double low[kPart], high[kPart];  // wide enough for either arithmetic type
  RowTally* tallies = tallies_.data() + static_cast<size_t>(block / every_) * rows_;
  const int64_t bytes = size_of(job.dtype);
  Work part = work;
  part.low = low;
  part.high = high;
  for (int64_t at = begin; at < end; at += kPart) {
    const int64_t count = std::min(kPart, end - at);
    kernel(part, at, at + count);
    for (size_t row = 0; row < rows_; ++row) {
      compare(job.dtype, work.rows[row] + at * bytes, work.out + at * bytes, low, high, count,
              tallies[row]);
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
