// Layer 2. The CUDA half of the API.
#pragma once

#include "aggregate.h"

namespace loft {

// stream: the caller's cudaStream_t. Rows and out lie on `device`; weights on the host.
struct CudaOptions {
  int device = 0;
  void* stream = nullptr;
};

// Queues the work and returns; throws std::invalid_argument as `check` does and std::runtime_error
// with CUDA's own words when a launch fails.
void aggregate_cuda(const Job& job, const CudaOptions& options);

}  // namespace loft
