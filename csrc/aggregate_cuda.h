// Layer 2. The CUDA half of the API.
#pragma once

#include "aggregate.h"

namespace loft {

// Device memory for diagnostics. low, high: float64 for float64 rows, else float32,
// [blocks_looked_at * kBlock]; sums: [3, rows, blocks_looked_at], of the coordinates outside their
// window, not finite, and the squared distance, where every `every`-th block is looked at, the
// first one included. Null: none.
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

// Queues the work and returns, diagnostics too; throws std::invalid_argument as `check` does and
// std::runtime_error with CUDA's own words when a launch fails.
void aggregate_cuda(const Job& job, const CudaOptions& options);

}  // namespace loft
