// Layer 3. Blocks of rows that did not come are filled, by a rule on the rows that came there.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "aggregate.h"
#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "levels.h"

namespace loft {
namespace {

// Blocks with holes that a thread takes at a time: some 100 kB of 8 rows.
constexpr int64_t kBlocksAtOnce = 16;
// What is fetched of each row's next block: kernels fetch what follows, kAhead (cpu/vectors.h).
// Measured, 387 of 3125 blocks of 8 float32 rows that are in no cache: 0.8 of the time without, and
// no more with all of a block, or two blocks ahead. To copy rows next to each other takes 1.2.
constexpr int64_t kFetchedBytes = 512;
constexpr int64_t kLineBytes = 64;

// How many rows miss each block, [num_blocks].
std::vector<int16_t> count_missing(const Job& job, const Holes& holes, int64_t num_blocks) {
  static_assert(kMaxRows <= INT16_MAX, "counts of rows fit");
  std::vector<int16_t> counts(static_cast<size_t>(num_blocks));
  for (int row = 0; row < job.num_rows(); ++row) {
    const uint8_t* const missing = holes.missing + row * num_blocks;
    for (size_t block = 0; block < counts.size(); ++block) counts[block] += missing[block] != 0;
  }
  return counts;
}

// What a block is filled from, and where; vectors that are used again.
struct Parts {
  std::vector<const char*> came;
  std::vector<int32_t> weights;  // of those that came; empty for equal ones
  std::vector<char*> gaps;
};

// Sorts the rows of a block, which begins at a byte of each, by whether they came.
void split(const Job& job, const uint8_t* missing, int64_t num_blocks, int64_t byte, Parts& parts) {
  parts.came.clear(), parts.weights.clear(), parts.gaps.clear();
  for (int row = 0; row < job.num_rows(); ++row) {
    const char* const at = job.row_addresses()[row] + byte;
    if (missing[row * num_blocks]) {
      parts.gaps.push_back(const_cast<char*>(at));  // the one place where rows are written
    } else {
      parts.came.push_back(at);
      if (!job.weights.empty()) parts.weights.push_back(job.weights[static_cast<size_t>(row)]);
    }
  }
  if (parts.weights.empty()) return;
  // As reduce_weights in compute.py: equal ones are none, which are the same bits.
  int32_t divisor = 0;
  for (int32_t weight : parts.weights) divisor = std::gcd(divisor, weight);
  for (int32_t& weight : parts.weights) weight /= divisor;
  const auto [least, most] = std::minmax_element(parts.weights.begin(), parts.weights.end());
  if (*least == *most) parts.weights.clear();
}

// Fetches how the block of all rows begins that is at `byte`; past a row's end nothing happens.
void fetch(const Job& job, int64_t byte) {
  for (int row = 0; row < job.num_rows(); ++row) {
    const char* const at = job.row_addresses()[row] + byte;
    for (int64_t line = 0; line < kFetchedBytes; line += kLineBytes) __builtin_prefetch(at + line);
  }
}

}  // namespace

int64_t fill_cpu(const Job& job, const Holes& holes, const CpuOptions& options) {
  Job into = job;  // checked as it is, for results go into rows
  into.out = const_cast<void*>(job.rows.empty() ? nullptr : job.rows[0]);
  check(into);
  if (holes.block_numel < 1 || holes.least <= 2 * int64_t{job.params.f} ||
      (job.numel > 0 && holes.missing == nullptr)) {
    throw std::invalid_argument(describe(job) +
                                ", block_numel=" + std::to_string(holes.block_numel) +
                                ", least=" + std::to_string(holes.least) +
                                ": need blocks of values, 2*f < least, and what is missing");
  }
  const int64_t num_blocks = (job.numel + holes.block_numel - 1) / holes.block_numel;
  const std::vector<int16_t> counts = count_missing(job, holes, num_blocks);
  std::vector<int64_t> blocks;  // that have holes
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int missing = counts[static_cast<size_t>(block)];
    if (missing == 0) continue;
    if (job.num_rows() - missing < holes.least) return block;
    blocks.push_back(block);
  }
  const Kernel(&kernels)[2][4] = level_for(options.isa).kernels().kernels;
  const int64_t value_bytes = size_of(job.dtype);
  const auto fill = [&](int64_t begin, int64_t end) {
    Parts parts;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = blocks[static_cast<size_t>(i)], first = block * holes.block_numel;
      const int64_t count = std::min(holes.block_numel, job.numel - first);
      split(job, holes.missing + block, num_blocks, first * value_bytes, parts);
      const size_t next = static_cast<size_t>(i) + 1;
      if (next < blocks.size()) fetch(job, blocks[next] * holes.block_numel * value_bytes);
      const bool is_weighted = !parts.weights.empty();
      const Work work{parts.came.data(),
                      is_weighted ? parts.weights.data() : nullptr,
                      static_cast<int>(parts.came.size()),
                      std::accumulate(parts.weights.begin(), parts.weights.end(), int64_t{0}),
                      job.params,
                      parts.gaps[0]};
      kernels[is_weighted][static_cast<int>(job.dtype)](work, 0, count);
      for (size_t gap = 1; gap < parts.gaps.size(); ++gap) {
        std::memcpy(parts.gaps[gap], parts.gaps[0], static_cast<size_t>(count * value_bytes));
      }
    }
  };
  for_blocks(static_cast<int64_t>(blocks.size()), holes.block_numel * job.coordinate_bytes(),
             options.threads, fill, kBlocksAtOnce);
  return -1;
}

}  // namespace loft
