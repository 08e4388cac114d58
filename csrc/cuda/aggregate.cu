// Layer 3. One job on a CUDA device: checks, the device guard, the dtype's launcher. No host sync.

#include "aggregate.h"

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace loft {
namespace {

void check_call(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(status));
}

// Makes a device current and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_call(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_call(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, device_;
};

}  // namespace

void aggregate_cuda(const Job& job, const CudaOptions& options) {
  check(job);
  if (job.numel == 0) return;
  const DeviceGuard guard(options.device);
  device::Launch launch{static_cast<cudaStream_t>(options.stream), 0, options.diagnostics};
  check_call(cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount,
                                    options.device),
             "cudaDeviceGetAttribute");
  switch (job.dtype) {
    case DType::kFloat64: return device::launch_job<DType::kFloat64>(job, launch);
    case DType::kFloat32: return device::launch_job<DType::kFloat32>(job, launch);
    case DType::kFloat16: return device::launch_job<DType::kFloat16>(job, launch);
    case DType::kBFloat16: return device::launch_job<DType::kBFloat16>(job, launch);
  }
}

}  // namespace loft
