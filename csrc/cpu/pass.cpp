// Layer 2. The memory pass of one instruction set, for the benchmarks.
//
// The pass adds the rows in row order: the same reads and writes as a rule with hardly any
// arithmetic, so it is what a rule's time is measured against. Float32 only.

#include "cpu/dispatch.h"
#include "cpu/vectors.h"

namespace loft::LOFT_ISA {
namespace {

using V = Vector<float>;
constexpr int kLanes = kVectorBytes / 4;
constexpr int kLineVectors = kLineBytes / kVectorBytes;  // vectors of one L1 line

// The last coordinates, fewer than a line.
void add_tail(const Work& work, int64_t at, int64_t end) {
  for (; at < end; ++at) {
    float sum = 0;
    for (int row = 0; row < work.num_rows; ++row) {
      sum += reinterpret_cast<const float*>(work.rows[row])[at];
    }
    reinterpret_cast<float*>(work.out)[at] = sum;
  }
}

// kRows: the number of rows, or 0 for any.
template <int kRows>
void pass_rows(const Work& work, int64_t begin, int64_t end) {
  const int rows = kRows ? kRows : work.num_rows;  // a constant where it can be
  int64_t at = begin;
  for (; at + kLineVectors * kLanes <= end; at += kLineVectors * kLanes) {
    V sum[kLineVectors] = {};
#pragma GCC unroll 32
    for (int row = 0; row < rows; ++row) {
      const char* from = work.rows[row] + at * 4;
      prefetch<(kRows > 0 && kRows <= kNearRows)>(from);
      for (int i = 0; i < kLineVectors; ++i) sum[i] += load<V>(from + i * kVectorBytes);
    }
    for (int i = 0; i < kLineVectors; ++i) store(work.out + at * 4 + i * kVectorBytes, sum[i]);
  }
  add_tail(work, at, end);
}

}  // namespace

// All rows line by line; the loop over up to 32 rows is unrolled.
void pass(const Work& work, int64_t begin, int64_t end) {
  constexpr auto table = table_of<33>([](auto rows) -> Kernel { return pass_rows<rows>; });
  table[work.num_rows < 33 ? work.num_rows : 0](work, begin, end);
}

// Row by row over a tile, which reads many rows with fewer streams at a time.
void burst(const Work& work, int64_t begin, int64_t end) {
  constexpr int kTile = 512;  // 2 KiB of sums, which stay in the L1 cache
  alignas(64) float sum[kTile];
  int64_t at = begin;
  for (; at + kTile <= end; at += kTile) {
    std::memset(sum, 0, sizeof(sum));
    for (int row = 0; row < work.num_rows; ++row) {
      const char* from = work.rows[row] + at * 4;
      for (int i = 0; i < kTile; i += kLanes)
        store(sum + i, load<V>(sum + i) + load<V>(from + 4 * i));
    }
    std::memcpy(work.out + at * 4, sum, sizeof(sum));
  }
  add_tail(work, at, end);
}

}  // namespace loft::LOFT_ISA
