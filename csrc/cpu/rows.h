// Layer 2. What kernels for rules that see rows are asked: distances of rows, and mixed rows.
#pragma once

#include <cstdint>

namespace loft {

// Squared distances of rows [a, a_end) from rows [b, b_end), over coordinates [begin, end), at most
// a block; within one range those of each pair once, and the squared lengths.
constexpr int kGroupRows = 16;  // most rows of a range
struct RowRanges {
  const char* const* rows;
  int a, a_end, b, b_end;
  int64_t begin, end;
  bool is_same() const { return a == b; }
  // Where a pair is found, [kGroupRows][kGroupRows]; within one range lengths are on the diagonal.
  static int place(int row_a, int row_b) { return row_a * kGroupRows + row_b; }
};

// Mixed row i is the sum of by[k] * (scales[from[k]] * rows[from[k]]) for k in [starts[i],
// starts[i + 1]), in this order. Where all by[k] of a row are the same, `common[i]`, the sum is
// multiplied once, at its end; else `common[i]` is 0.
struct MixedRows {
  const char* const* rows;
  int num_rows, num_mixed;
  const double* scales;  // [num_rows]
  const int* starts;     // [num_mixed + 1]
  const int* from;
  const double* by;
  const double* common;  // [num_mixed]
};

}  // namespace loft
