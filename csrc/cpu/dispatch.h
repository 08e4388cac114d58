// Layer 2. The kernels of one instruction set in a table: all that callers see of a level.
#pragma once

#include <cstdint>

#include "rules.h"

namespace loft {

// One job as the kernels see it; `low` and `high`, where not null, take the kept window of each
// coordinate from `begin` on, double for float64, else float; one buffer for windows of one value.
struct Work {
  const char* const* rows;
  const int32_t* weights;  // null for equal ones
  int num_rows;
  int64_t total_weight;
  RuleParams params;
  char* out;
  void* low = nullptr;
  void* high = nullptr;
};

// Aggregates coordinates [begin, end).
using Kernel = void (*)(const Work& work, int64_t begin, int64_t end);
// Aggregates the whole vectors of them and returns where it stopped.
using Run = int64_t (*)(const Work& work, int64_t begin, int64_t end);

// What one row did in some coordinates, at most a block. Its distance to the result, of finite
// values, is summed lane by lane: lane k has coordinates k, k + 16, ...
struct RowLanes {
  static constexpr int kLanes = 16;
  alignas(64) double squared[kLanes] = {};
  int32_t outside = 0, non_finite = 0;
};

// `count` <= kCompared coordinates from `at` on: all rows from coordinate 0 on, and the results and
// the kept window (arithmetic type) of these coordinates. Measured (commit abc40b9): 384 keep 16
// rows in the L1 cache, and neither 128 nor 1024 are faster.
constexpr int64_t kCompared = 384;
struct Compared {
  const char* const* rows;
  int num_rows;
  int64_t at, count;
  const char* result;
  const char* low;
  const char* high;
  int64_t ahead;  // how far ahead each row is fetched, in bytes; 0 for nothing
};

// Adds to the lanes of every row.
using Compare = void (*)(DType dtype, const Compared& what, RowLanes* rows);

// For rules that see rows, in cpu/rows.h.
struct RowRanges;
struct MixedRows;
using Distances = void (*)(DType dtype, const RowRanges& what, double* found);
// Aggregates what is mixed of coordinates [begin, end): `work` has the mixed rows' number, weights
// and rule, and where results go. `kernel` takes the mixed rows, in the type of the arithmetic.
using Mix = void (*)(DType dtype, const MixedRows& mixed, const Work& work, Kernel kernel,
                     int64_t begin, int64_t end);

// How a gradient goes into an average over time (absorb.cpp), float32 or float64.
struct Absorbed {
  const char* gradient;  // null for zeros
  const char* average;
  double gain, keep;  // what each is multiplied by, rounded to the values' type
  char* out;          // may be the gradient itself
};
// Writes the sums of coordinates [begin, end), and says whether all of them are finite.
using Absorb = bool (*)(DType dtype, const Absorbed& what, int64_t begin, int64_t end);

struct KernelTable {
  Kernel kernels[2][4];  // [weighted][dtype]
  Kernel pass;           // row sums in row order, all rows line by line
  Kernel burst;          // the same, row by row over a tile
  Compare compare;
  Distances distances;
  Mix mix;
  Absorb absorb;
};

// Every level has one; levels.h finds it.
namespace baseline {
const KernelTable& kernels();
}
namespace avx2 {
const KernelTable& kernels();
}
namespace avx512 {
const KernelTable& kernels();
}

}  // namespace loft
