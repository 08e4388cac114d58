// Layer 2. What cuda/aggregate.cu asks of the kernels of one dtype.
#pragma once

#include <cuda_runtime.h>

#include "aggregate.h"

namespace loft {
namespace device {

struct Launch {
  cudaStream_t stream;
  int multiprocessors;
  CudaDiagnostics diagnostics;
};

// Each queues one job of its dtype; a job has numel > 0 and has passed `check`.
void launch_float64(const Job& job, const Launch& launch);
void launch_float32(const Job& job, const Launch& launch);
void launch_float16(const Job& job, const Launch& launch);
void launch_bfloat16(const Job& job, const Launch& launch);

}  // namespace device
}  // namespace loft
