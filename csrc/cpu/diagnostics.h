// Layer 3. Which row was off: sampled blocks of a job, and what their rows did.
//
// A sampled block is aggregated by the same kernel, which then also leaves each coordinate's kept
// window; while the rows are still in the cache they are compared with it. Sums of a block run over
// sixteen fixed lanes and blocks are added in order, so that no thread count shows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "aggregate.h"
#include "cpu/dispatch.h"

namespace loft {

class DiagnosticBlocks {
 public:
  // Aggregates coordinates [from, to).
  using Aggregate = std::function<void(int64_t from, int64_t to)>;

  // Looks at every `diagnose_every`-th block, the first one included; without a place for
  // diagnostics at none. All that is given must outlive it.
  DiagnosticBlocks(const Job& job, const KernelTable& table, const CpuOptions& options);

  bool wants(int64_t begin) const { return total_ && begin % period_ == 0; }

  // Aggregates a block and compares its rows; called for each wanted block, by any thread.
  void run(const Work& work, Kernel kernel, int64_t begin, int64_t end);
  // The same where the rows that the rule sees are mixed ones: no value of the given rows is
  // outside.
  void run_mixed(int64_t begin, int64_t end, const Aggregate& aggregate);

  // Adds up what all wanted blocks had, in their order.
  void finish();

 private:
  void run_turns(int64_t begin, int64_t end, const char* low, const char* high,
                 const Aggregate& aggregate);

  const Job& job_;
  const KernelTable& table_;
  const int64_t period_;  // coordinates from one wanted block to the next
  Diagnostics* total_;
  std::vector<Diagnostics> found_;  // one a wanted block
};

}  // namespace loft
