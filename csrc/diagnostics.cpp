// Layer 2. Which row was off.

#include "diagnostics.h"

#include <algorithm>
#include <memory>

namespace loft {

// A kernel and a comparison that take turns lose the fetching ahead at every turn. So a run of
// coordinates is aggregated while its rows stay in the second cache, then compared tile by tile.
constexpr int64_t kEdgeBytes = 64 * 1024;  // of one edge of the window
struct alignas(64) Window {
  char low[kEdgeBytes], high[kEdgeBytes];
};

// Coordinates of a run; `width` bytes an edge of their window. Fixed by the job, as tiles are,
// because the order of the sums depends on both.
static int64_t run_of(size_t rows, int64_t bytes, int64_t width) {
  constexpr int64_t kRowBytes = 256 * 1024, kLeast = 128;
  const int64_t fitting = kRowBytes / (static_cast<int64_t>(rows) * bytes) / kLeast * kLeast;
  return std::max(kLeast, std::min(kEdgeBytes / width, fitting));
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
  const std::unique_ptr<Window> window(new Window);  // not filled; threads may have small stacks
  std::vector<RowLanes> rows(rows_);
  const int64_t bytes = size_of(job.dtype), width = job.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t length = run_of(rows_, bytes, width);
  Work part = work;
  part.low = window->low;
  part.high = window->high;
  for (int64_t from = begin; from < end; from += length) {
    const int64_t to = std::min(end, from + length);
    kernel(part, from, to);
    for (int64_t at = from; at < to; at += kCompared) {
      const int64_t place = (at - from) * width;
      compare(job.dtype,
              {work.rows, work.num_rows, at, std::min(kCompared, to - at), work.out + at * bytes,
               window->low + place, window->high + place},
              rows.data());
    }
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
