// Layer 3. Jobs that see coordinates by themselves, on the CPU: a rule, averages over time, and the
// memory pass. Each is checked, and goes block by block to the kernels of a level.

#include "aggregate.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "cpu/blocks.h"
#include "cpu/diagnostics.h"
#include "cpu/dispatch.h"
#include "levels.h"

namespace loft {
namespace {

Work work_of(const Job& job) {
  return {job.row_addresses(), job.weights_or_null(),      job.num_rows(), job.total_weight(),
          job.params,          static_cast<char*>(job.out)};
}

}  // namespace

void aggregate_cpu(const Job& job, const CpuOptions& options) {
  check(job);
  const KernelTable& table = level_for(options.isa).kernels();
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(job.dtype)];
  const Work work = work_of(job);
  DiagnosticBlocks samples(job, table, options);
  for_blocks(job.numel, job.coordinate_bytes(), options.threads, [&](int64_t begin, int64_t end) {
    samples.wants(begin) ? samples.run(work, kernel, begin, end) : kernel(work, begin, end);
  });
  samples.finish();
}

void pass_cpu(const Job& job, const CpuOptions& options, bool in_bursts) {
  check(job);
  if (job.dtype != DType::kFloat32) throw std::invalid_argument("the pass takes float32 rows only");
  const KernelTable& table = level_for(options.isa).kernels();
  const Kernel kernel = in_bursts ? table.burst : table.pass;
  const Work work = work_of(job);
  for_blocks(job.numel, job.coordinate_bytes(), options.threads,
             [&](int64_t begin, int64_t end) { kernel(work, begin, end); });
}

bool absorb_cpu(const AverageUpdate& what, const CpuOptions& options) {
  if (what.dtype != DType::kFloat64 && what.dtype != DType::kFloat32) {
    throw std::invalid_argument("dtype=" + std::to_string(static_cast<int>(what.dtype)) +
                                ": averages are float64 or float32, 0 or 1");
  }
  Job job;  // two rows are read; the average stands for a gradient that may be null
  job.rows = {what.average, what.average};
  job.numel = what.numel;
  job.dtype = what.dtype;
  check_rows(job, what.out);
  const KernelTable& table = level_for(options.isa).kernels();
  char* const average = static_cast<char*>(what.average);
  char* const out = static_cast<char*>(what.out);
  const Absorbed part{static_cast<const char*>(what.gradient), average, what.gain, what.keep, out};
  std::atomic<bool> is_finite{true};
  for_blocks(job.numel, job.coordinate_bytes(), options.threads, [&](int64_t begin, int64_t end) {
    if (!table.absorb(what.dtype, part, begin, end)) is_finite = false;
  });
  if (!is_finite) return false;
  // Not before all are known: the average is to be all new or all old.
  const int64_t bytes = size_of(what.dtype);
  for_blocks(job.numel, job.coordinate_bytes(), options.threads, [&](int64_t begin, int64_t end) {
    std::memcpy(average + begin * bytes, out + begin * bytes,
                static_cast<size_t>((end - begin) * bytes));
  });
  return true;
}

}  // namespace loft
