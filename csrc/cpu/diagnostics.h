// Layer 2. Which row was off: what each row did in the blocks that are looked at.
//
// A sampled block is aggregated by the same kernel, which then also leaves each coordinate's kept
// window; while the rows are still in the cache they are compared with it. Sums of a block run over
// sixteen fixed lanes and blocks are added in order, so that no thread count shows.
#pragma once

#include <cstdint>
#include <vector>

#include "aggregate.h"
#include "cpu/dispatch.h"

namespace loft {

void start(Diagnostics& diagnostics, size_t rows);

// What one row did in one block; see Diagnostics in aggregate.h.
struct RowTally {
  int64_t coordinates = 0, num_outside = 0, num_non_finite = 0;
  double squared_distance = 0;
};

class DiagnosticBlocks {
 public:
  // rows = 0 turns diagnostics off; every `every`-th block is looked at, the first one included.
  DiagnosticBlocks(size_t rows, int64_t blocks, int every);
  bool wants(int64_t block) const { return rows_ != 0 && block % every_ == 0; }
  void run(const Job& job, const Work& work, Kernel kernel, Compare compare, int64_t block,
           int64_t begin, int64_t end);
  void add_to(Diagnostics& diagnostics) const;

 private:
  size_t rows_;
  int64_t every_;
  std::vector<RowTally> tallies_;  // [sampled blocks, rows]
};

}  // namespace loft
