// Layer 2. The memory pass of one instruction set, and the table of its kernels.
//
// The pass adds the rows in row order: the same reads and writes as a rule with hardly any
// arithmetic, so it is what a rule's time is measured against. Float32 only.

#include <utility>

#include "cpu/dispatch.h"
#include "cpu/vectors.h"

namespace loft {
namespace LOFT_ISA {
namespace {

using V = Vector<float>;
constexpr int kLanes = kVectorBytes / 4;
constexpr int kLineVectors = kLineBytes / kVectorBytes;

void add_tail(const Work& work, int64_t at, int64_t end) {
  for (; at < end; ++at) {
    float sum = 0;
    for (int row = 0; row < work.num_rows; ++row) {
      sum += reinterpret_cast<const float*>(work.rows[row])[at];
    }
    reinterpret_cast<float*>(work.out)[at] = sum;
  }
}

template <int kRows>
void pass_rows(const Work& work, int64_t begin, int64_t end) {
  const int rows = kRows ? kRows : work.num_rows;
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

template <int... kRows>
Kernel pass_for(int rows, std::integer_sequence<int, kRows...>) {
  constexpr Kernel table[] = {pass_rows<kRows>...};
  return table[rows < static_cast<int>(sizeof...(kRows)) ? rows : 0];
}

void pass(const Work& work, int64_t begin, int64_t end) {
  pass_for(work.num_rows, std::make_integer_sequence<int, 33>{})(work, begin, end);
}

void burst(const Work& work, int64_t begin, int64_t end) {
  constexpr int kTile = 512;
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

}  // namespace

void float64(const Work&, int64_t, int64_t);
void float32(const Work&, int64_t, int64_t);
void float16(const Work&, int64_t, int64_t);
void bfloat16(const Work&, int64_t, int64_t);
void weighted_float64(const Work&, int64_t, int64_t);
void weighted_float32(const Work&, int64_t, int64_t);
void weighted_float16(const Work&, int64_t, int64_t);
void weighted_bfloat16(const Work&, int64_t, int64_t);

void compare_rows(DType, const Compared&, RowLanes*);

const KernelTable& kernels() {
  static const KernelTable table{
      {{float64, float32, float16, bfloat16},
       {weighted_float64, weighted_float32, weighted_float16, weighted_bfloat16}},
      pass,
      burst,
      compare_rows};
  return table;
}

}  // namespace LOFT_ISA
}  // namespace loft
