// Layer 2. What cuda/aggregate.cu asks of the kernels of one dtype.
#pragma once

#include <cuda_runtime.h>

#include "aggregate.h"

namespace loft::device {

struct Launch {
  cudaStream_t stream;
  int multiprocessors;
  CudaDiagnostics diagnostics;
};

// Queues one job of its dtype, which has numel > 0 and has passed `check`.
template <DType kDType>
void launch_job(const Job& job, const Launch& by);

}  // namespace loft::device
