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
//
// Mixed rows that begin with the same terms share their sum: in the order of the steps, a row goes
// on from what an earlier one has saved after its first `resume` terms. Of rows that leave one out:
//   terms    resume  saves
//   0 1 2    0       2      after the terms 0 1
//   0 1 3    2
//   0 2 3    0              a first term is read as fast as a saved sum
//   1 2 3    0
struct MixStep {
  int row;           // mixed row
  int first, count;  // its terms
  double common;
  int resume;                    // how many of its terms are added already; 0 for none
  int first_saved, after_saved;  // where `saves` says after how many terms the sum is saved
};

struct MixedRows {
  const char* const* rows;
  int num_rows, num_mixed;
  const double* scales;  // [num_rows]: of the rows as they are read
  const int* from;       // [num_terms]
  const double* by;      // [num_terms]
  const MixStep* steps;  // [num_mixed]
  const int* saves;
  int num_terms, most_saved;  // of all mixed rows; after how many terms the last sum is saved
};

}  // namespace loft
