// Layer 3. What launchers share: the device, the stream, a grid, and a launch that is checked. Only
// nvcc compiles this file.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "aggregate.h"
#include "cuda/kernels.h"

namespace loft::device {

struct Launch {
  cudaStream_t stream;
  int multiprocessors;
  CudaDiagnostics diagnostics;
  int64_t first = 0;  // the part's first coordinate in the whole job
};

inline void check_call(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(what + " failed: " + cudaGetErrorString(status));
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

inline Launch launch_by(const CudaOptions& options) {
  Launch launch{static_cast<cudaStream_t>(options.stream), 0, options.diagnostics};
  check_call(cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount,
                                    options.device),
             "cudaDeviceGetAttribute");
  return launch;
}

// Queues a kernel and throws with the job's values when that fails.
template <typename... Parameters, typename... Arguments>
void queue(const char* name, void (*kernel)(Parameters...), const Job& job, const Launch& by,
           dim3 grid, int threads, size_t shared_bytes, const Arguments&... arguments) {
  kernel<<<grid, threads, shared_bytes, by.stream>>>(arguments...);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    check_call(status, std::string("launch of ") + name + " for " + describe(job));
}

// Blocks enough to fill the device several times over, and no more: a block takes its share of the
// coordinates in a loop. Bound from the hardware: a multiprocessor runs at most 32 blocks at once.
inline dim3 grid_for(int64_t coordinates, int a_block, const Launch& by) {
  const int64_t blocks = (coordinates + a_block - 1) / a_block;
  const int64_t most = static_cast<int64_t>(by.multiprocessors) * 32;
  return dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min(blocks, most))));
}

template <int kMost, typename T>
Table<T, kMost> table_of(const std::vector<T>& values) {
  Table<T, kMost> table{};
  std::copy(values.begin(), values.end(), table.at);
  return table;
}

// The rows' addresses by wire, `below` wires before the first; wires without a row have its.
template <int kWires>
Rows<kWires> wires_of(const std::vector<const void*>& rows, int below) {
  Rows<kWires> table;
  std::fill(std::begin(table.at), std::end(table.at), rows[0]);
  std::copy(rows.begin(), rows.end(), table.at + below);
  return table;
}

// Calls body(part, by) for parts of a job that kernels take at a time.
template <typename Body>
void queue_parts(const Job& job, Launch by, const Body& body) {
  for_parts(job, kMostAtOnce, [&](const Job& part, int64_t first) {
    by.first = first;
    body(part, by);
  });
}

template <DType kDType>
Bits<kDType>* out_of(const Job& job) {
  return static_cast<Bits<kDType>*>(job.out);
}

// Coordinates of a block of threads that has so many bytes of shared memory for each.
inline int columns_for(int bytes, int most = 32) {
  return std::max(1, std::min(most, kSharedBytes / bytes));
}

// Compares the rows with the result and the windows behind it, where somebody asks who was off.
template <DType kDType>
void launch_compare(const Job& job, const Launch& by);

// The parts, by the names that CMake gives them.
namespace part {
[[maybe_unused]] constexpr DType float64 = DType::kFloat64, float32 = DType::kFloat32;
[[maybe_unused]] constexpr DType float16 = DType::kFloat16, bfloat16 = DType::kBFloat16;
}  // namespace part

// Calls body(code) with the job's dtype as a constant.
template <typename Body>
void for_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64: return body(std::integral_constant<DType, DType::kFloat64>{});
    case DType::kFloat32: return body(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kFloat16: return body(std::integral_constant<DType, DType::kFloat16>{});
    case DType::kBFloat16: return body(std::integral_constant<DType, DType::kBFloat16>{});
  }
}

}  // namespace loft::device
