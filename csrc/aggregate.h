// Layer 2. The C++ API: aggregate rows of gradients that lie anywhere in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "rules.h"

namespace loft {

// Rows of one worker each: numel values of dtype, next to each other, any alignment of the row.
// weights: empty for equal ones, else one count > 0 a row. All rows given are present.
struct Job {
  std::vector<const void*> rows;
  int64_t numel = 0;
  DType dtype = DType::kFloat32;
  RuleParams params;
  std::vector<int32_t> weights;
  void* out = nullptr;

  int num_rows() const { return static_cast<int>(rows.size()); }
  int64_t coordinate_bytes() const { return size_of(dtype) * static_cast<int64_t>(rows.size()); }
  const char* const* row_addresses() const {
    return reinterpret_cast<const char* const*>(rows.data());
  }
  const int32_t* weights_or_null() const { return weights.empty() ? nullptr : weights.data(); }
  int64_t total_weight() const {  // 0 without weights
    return std::accumulate(weights.begin(), weights.end(), int64_t{0});
  }
};

// What a row did in this job, for finding out which rank was off.
struct Diagnostics {
  explicit Diagnostics(size_t rows = 0)
      : num_outside(rows), num_non_finite(rows), squared_distance(rows) {}

  int64_t coordinates = 0;               // looked at
  std::vector<int64_t> num_outside;      // [rows], strictly outside the kept window
  std::vector<int64_t> num_non_finite;   // [rows]
  std::vector<double> squared_distance;  // [rows], to the result; non-finite values left out
};

struct CpuOptions {
  int threads = 1;
  std::string isa;  // a level by its name, or "" for the best here
  Diagnostics* diagnostics = nullptr;
  int diagnose_every = 16;  // one block of so many
};

std::string describe(const Job& job);  // for error messages
// Throws std::invalid_argument with the values when the job breaks a limit of rules.h.
void check(const Job& job);
void check_rows(const Job& job, void* out);  // where only rows and the place of a result count
void aggregate_cpu(const Job& job, const CpuOptions& options);

// Blocks of rows that did not come: missing[row * num_blocks + block] is not 0. A block has
// block_numel coordinates, the last one what is left.
struct Holes {
  const uint8_t* missing = nullptr;  // [rows, num_blocks]
  int64_t block_numel = 0;
  int64_t least = 0;  // rows that must have come of a block with a hole, above 2f
};

// Fills them in place, all holes of a block alike: the job's rule, on the rows that came there. Its
// rows are written, `out` is not used. Returns -1, or the first block of which too few rows came,
// and has then filled nothing.
int64_t fill_cpu(const Job& job, const Holes& holes, const CpuOptions& options);

// Squared distances between rows, and from zero: table[i][k] for i < k <= rows, of which column
// `rows` has the squared lengths; [rows + 1, rows + 1], other entries untouched. Not finite where a
// row is not. `params`, `weights` and `out` of the job are not used.
void distances_cpu(const Job& job, const CpuOptions& options, double* table);

// Mixed rows: row i is the sum over k of weights[i][k] * (scales[k] * rows[k]), in the order of k
// and in the type of the arithmetic, to which both are rounded first. Where one is 0 then, the row
// is not read; where all other weights of row i are the same, they are multiplied with the sum.
struct Matrix {
  int num_mixed = 0;
  std::vector<double> scales;   // [rows]
  std::vector<double> weights;  // [num_mixed, rows]
};

// Aggregates mixed rows. `params` and `weights` of the job are theirs; of the diagnostics, which
// look at the given rows, nothing is outside.
void mix_cpu(const Job& job, const Matrix& matrix, const CpuOptions& options);

// A matrix as kernels take it: rounded, without the rows that are not read. Mixed row i adds by[k]
// times row from[k], k in [starts[i], starts[i + 1]); common[i] is what all its by[k] are, else 0.
struct Mixing {
  std::vector<double> scales;  // [rows]
  std::vector<int> starts;     // [num_mixed + 1]
  std::vector<int> from;
  std::vector<double> by;
  std::vector<double> common;  // [num_mixed]
};
// Checks the job and its matrix, too.
Mixing mixing_of(const Job& job, const Matrix& matrix);

// Sum of the rows, float32, in row order: the memory pass that kernels are measured against.
// `in_bursts`: row by row over a tile, which reads many rows with fewer streams at a time.
void pass_cpu(const Job& job, const CpuOptions& options, bool in_bursts);

// --- averages over time, of worker momentum

// Writes gain * gradient + keep * average to out, and to the average, too, unless a value of it is
// not finite; says whether it has. float32 or float64. `gradient` is null for zeros; it may be out,
// else the three do not overlap.
struct AverageUpdate {
  const void* gradient;
  void* average;
  void* out;
  int64_t numel;
  DType dtype;
  double gain, keep;
};
bool absorb_cpu(const AverageUpdate& what, const CpuOptions& options);

// --- the CUDA half, where it was built

// Device memory for diagnostics. low, high: float64 for float64 rows, else float32,
// [blocks_looked_at * kBlock]; sums: [3, rows, blocks_looked_at], of the coordinates outside their
// window, not finite, and squared distances, of the first of every `every` blocks. Null: none.
struct CudaDiagnostics {
  void* low = nullptr;
  void* high = nullptr;
  double* sums = nullptr;
  int every = 16;
};

// stream: the caller's cudaStream_t. Rows and out lie on `device`; weights on the host.
struct CudaOptions {
  int device = 0;
  void* stream = nullptr;
  CudaDiagnostics diagnostics;
};

// Coordinates that kernels take at a time, which they count in 32 bits: no sum of such counts in a
// grid reaches 2^32. Whole blocks, for the windows of diagnostics, and whole packs.
constexpr int64_t kMostAtOnce = int64_t{1} << 30;
static_assert(kMostAtOnce % kBlock == 0, "a part has whole blocks");

// Calls body(part, first) for parts of a job of up to `most` coordinates, from coordinate `first`
// on.
template <typename Body>
void for_parts(const Job& job, int64_t most, const Body& body) {
  if (job.numel <= most) return body(job, int64_t{0});
  Job part = job;
  for (int64_t first = 0; first < job.numel; first += most) {
    const int64_t bytes = first * size_of(job.dtype);
    for (size_t row = 0; row < job.rows.size(); ++row) {
      part.rows[row] = static_cast<const char*>(job.rows[row]) + bytes;
    }
    part.out = static_cast<char*>(job.out) + bytes;
    part.numel = std::min(most, job.numel - first);
    body(part, first);
  }
}

// Queues the work and returns, diagnostics too; throws std::invalid_argument as `check` does and
// std::runtime_error with CUDA's own words when a launch fails.
void aggregate_cuda(const Job& job, const CudaOptions& options);

// As distances_cpu, with `table` on the device; `sums` has room for distance_cells there.
int64_t distance_cells(const Job& job);
void distances_cuda(const Job& job, const CudaOptions& options, double* sums, double* table);

// Float64 cells for what is mixed; see MixMany: weights, scales, what is common, and the words of
// who is named, each counted as a cell.
inline int64_t mix_cells(int64_t rows, int64_t num_mixed) {
  return (num_mixed + 1) * (rows + 1) + num_mixed * ((rows + 31) / 32);
}

// As mix_cpu. `room`: mix_cells float64 on the device. With diagnostics, `low` and `high` are
// given filled, as wide as all values are.
void mix_cuda(const Job& job, const Matrix& matrix, double* room, const CudaOptions& options);

}  // namespace loft
