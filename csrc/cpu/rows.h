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

// One mixed row: the sum, over its terms in their order, of by[k] times row from[k]. Where all its
// by[k] are the same, `common`, the sum is multiplied once, at its end; else `common` is 0.
struct MixedRow {
  int first, count;  // its terms
  double common;
};

struct MixedRows {
  const char* const* rows;
  int num_rows;
  const double* scales;  // [num_rows]: of the rows as they are read
  const int* from;       // [terms], rising within a mixed row
  const double* by;      // [terms]
  // Mixed rows that differ, each there once, and which of them each mixed row is.
  const MixedRow* each;
  int num_each;
  const int* which;  // [num_mixed]
  int num_mixed;
};

}  // namespace loft
