// Layer 4. The module, and the Python names of aggregate.h. They release the interpreter's lock.
// Rows and results are addresses: Python keeps their owners alive.

#include "bindings.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aggregate.h"
#include "levels.h"

namespace loft {
namespace {

// A job of Python's numbers: `rows` and `out` are addresses of numel values of the dtype, which and
// the rule are codes of rules.h. Codes become enumerations here, so they are checked here; whatever
// else is wrong with a job, the API says.
Job job_of(const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
           std::vector<int32_t> weights, uintptr_t out) {
  if (dtype < 0 || dtype > 3 || rule < 0 || rule >= kNumRules || kind < 0 || kind > 2) {
    throw std::invalid_argument("dtype, rule or kind is not a code of rules.h");
  }
  Job job;
  for (uintptr_t row : rows) job.rows.push_back(reinterpret_cast<const void*>(row));
  job.numel = numel;
  job.dtype = static_cast<DType>(dtype);
  job.params = {static_cast<Rule>(rule), static_cast<MedianKind>(kind), f};
  job.weights = std::move(weights);
  job.out = reinterpret_cast<void*>(out);
  return job;
}

// Calls run(options) without the interpreter's lock. Returns what was found, as (coordinates,
// num_outside, num_non_finite, squared_distance), or None where the options want nothing.
template <typename Run>
py::object run_diagnosed(CpuOptions options, const Run& run) {
  Diagnostics found;
  if (options.diagnose_every > 0) options.diagnostics = &found;
  {
    const Unlocked release;
    run(options);
  }
  if (!options.diagnostics) return py::none();
  return py::make_tuple(found.coordinates, found.num_outside, found.num_non_finite,
                        found.squared_distance);
}

#if defined(LOFT_HAVE_CUDA)
// Where to queue: `stream` is torch's raw stream, 0 the default one. `low`, `high` and `sums` are
// addresses on the device, of the windows and sums of diagnostics; with diagnose_every = 0 unused.
CudaOptions cuda_options(int device, uintptr_t stream, int diagnose_every, uintptr_t low,
                         uintptr_t high, uintptr_t sums) {
  CudaOptions options{device, reinterpret_cast<void*>(stream), {}};
  if (diagnose_every > 0) {
    options.diagnostics = {reinterpret_cast<void*>(low), reinterpret_cast<void*>(high),
                           reinterpret_cast<double*>(sums), diagnose_every};
  }
  return options;
}
#endif

void bind_kernels(py::module_& module) {
  module.attr("has_cuda") = false;
  module.attr("block") = kBlock;  // BLOCK in loft_hvd/aggregation/fallback.py
  module.attr("built_levels") = isa_levels(true);
  module.def("isa_levels", &isa_levels, "all"_a = false,
             "Instruction sets that run here, or all that were built; the best last.");
  // Rules that see coordinates. Every function below takes its arguments by value and gives up the
  // interpreter's lock for the work: other threads of Python run meanwhile.
  module.def(
      "aggregate_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int threads, const std::string& isa,
         int diagnose_every) -> py::object {
        const Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        return run_diagnosed({threads, isa, nullptr, diagnose_every},
                             [&](const CpuOptions& options) { aggregate_cpu(job, options); });
      },
      "rows"_a, "numel"_a, "dtype"_a, "rule"_a, "kind"_a, "f"_a, "weights"_a, "out"_a, "threads"_a,
      "isa"_a, "diagnose_every"_a,
      "Aggregate rows into out. With diagnose_every > 0, look at one block of so many and return "
      "(coordinates, num_outside, num_non_finite, squared_distance), the last three one a row.");
  module.def(
      "fill_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t missing, int64_t block_numel, int64_t least,
         int threads, const std::string& isa) {
        const Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), 0);
        const Holes holes{reinterpret_cast<const uint8_t*>(missing), block_numel, least};
        const Unlocked release;
        return fill_cpu(job, holes, {threads, isa, nullptr, 0});
      },
      "rows"_a, "numel"_a, "dtype"_a, "rule"_a, "kind"_a, "f"_a, "weights"_a, "missing"_a,
      "block_numel"_a, "least"_a, "threads"_a, "isa"_a,
      "Fill blocks of rows, in place, by the rule on the rows that came there. Blocks did not come "
      "where missing, bytes [rows, blocks of block_numel values], is not 0. Return -1, or the "
      "first block of which fewer than `least` rows came, and then fill none.");
  // Rules that see rows: a table of distances, from which Python computes a matrix, and sums of
  // rows by that matrix with a rule over them.
  module.def(
      "distances_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, uintptr_t table, int threads,
         const std::string& isa) {
        const Job job = job_of(rows, numel, dtype, 0, 0, 0, {}, 0);
        const Unlocked release;
        distances_cpu(job, {threads, isa, nullptr, 0}, reinterpret_cast<double*>(table));
      },
      "rows"_a, "numel"_a, "dtype"_a, "table"_a, "threads"_a, "isa"_a,
      "Fill the part above the diagonal of a float64 table, [rows + 1, rows + 1], with squared "
      "distances between rows and, in the last column, from zero.");
  module.def(
      "mix_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, std::vector<double> scales,
         std::vector<double> matrix, int num_mixed, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int threads, const std::string& isa,
         int diagnose_every) -> py::object {
        const Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        const Matrix mixed{num_mixed, std::move(scales), std::move(matrix)};
        return run_diagnosed({threads, isa, nullptr, diagnose_every},
                             [&](const CpuOptions& options) { mix_cpu(job, mixed, options); });
      },
      "rows"_a, "numel"_a, "dtype"_a, "scales"_a, "matrix"_a, "num_mixed"_a, "rule"_a, "kind"_a,
      "f"_a, "weights"_a, "out"_a, "threads"_a, "isa"_a, "diagnose_every"_a,
      "Aggregate mixed rows, sums of rows by the weights of a matrix [num_mixed, rows], into out; "
      "weights are theirs. With diagnose_every as aggregate_cpu, of the given rows.");
  // Averages over time.
  module.def(
      "absorb_cpu",
      [](uintptr_t gradient, uintptr_t average, uintptr_t out, int64_t numel, int dtype,
         double gain, double keep, int threads, const std::string& isa) {
        const AverageUpdate what{reinterpret_cast<const void*>(gradient),
                                 reinterpret_cast<void*>(average),
                                 reinterpret_cast<void*>(out),
                                 numel,
                                 static_cast<DType>(dtype),
                                 gain,
                                 keep};
        const Unlocked release;
        return absorb_cpu(what, {threads, isa, nullptr, 0});
      },
      "gradient"_a, "average"_a, "out"_a, "numel"_a, "dtype"_a, "gain"_a, "keep"_a, "threads"_a,
      "isa"_a,
      "Write gain * gradient + keep * average to out, and to average unless a value is not finite; "
      "say whether it has. A gradient at 0 is zeros.");
  // What a rule is measured against: each row read once, one result written.
  module.def(
      "pass_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, uintptr_t out, int threads,
         const std::string& isa, bool in_bursts) {
        const Job job = job_of(rows, numel, 1, 0, 0, 0, {}, out);
        const Unlocked release;
        pass_cpu(job, {threads, isa, nullptr, 0}, in_bursts);
      },
      "rows"_a, "numel"_a, "out"_a, "threads"_a, "isa"_a, "in_bursts"_a,
      "Sum float32 rows in row order: the memory pass of the benchmarks.");
#if defined(LOFT_HAVE_CUDA)
  // The same on a device. They queue and come back: rows, results and room must live until the
  // stream has passed them, which torch's allocator sees to for memory of that stream.
  module.attr("has_cuda") = true;
  module.def(
      "distance_cells",
      [](int64_t rows, int64_t numel, int dtype) {
        return distance_cells(job_of(std::vector<uintptr_t>(static_cast<size_t>(rows)), numel,
                                     dtype, 0, 0, 0, {}, 0));
      },
      "rows"_a, "numel"_a, "dtype"_a, "How many float64 distances_cuda needs room for in sums.");
  module.def(
      "distances_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, uintptr_t sums,
         uintptr_t table, int device, uintptr_t stream) {
        const Job job = job_of(rows, numel, dtype, 0, 0, 0, {}, 0);
        const Unlocked release;
        distances_cuda(job, {device, reinterpret_cast<void*>(stream), {}},
                       reinterpret_cast<double*>(sums), reinterpret_cast<double*>(table));
      },
      "rows"_a, "numel"_a, "dtype"_a, "sums"_a, "table"_a, "device"_a, "stream"_a,
      "Queue distances_cpu on a CUDA device; sums, of distance_cells, and table lie there.");
  module.def("mix_cells", &mix_cells, "rows"_a, "num_mixed"_a,
             "How many float64 mix_cuda needs room for.");
  module.def(
      "mix_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, std::vector<double> scales,
         std::vector<double> matrix, int num_mixed, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, uintptr_t room, int device, uintptr_t stream,
         int diagnose_every, uintptr_t low, uintptr_t high, uintptr_t sums) {
        const Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        const auto options = cuda_options(device, stream, diagnose_every, low, high, sums);
        const Unlocked release;
        mix_cuda(job, {num_mixed, std::move(scales), std::move(matrix)},
                 reinterpret_cast<double*>(room), options);
      },
      "rows"_a, "numel"_a, "dtype"_a, "scales"_a, "matrix"_a, "num_mixed"_a, "rule"_a, "kind"_a,
      "f"_a, "weights"_a, "out"_a, "room"_a, "device"_a, "stream"_a, "diagnose_every"_a, "low"_a,
      "high"_a, "sums"_a,
      "Queue mix_cpu on a CUDA device; room, of mix_cells, lies there, and with "
      "diagnose_every > 0 low and high are filled.");
  module.def(
      "aggregate_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int device, uintptr_t stream,
         int diagnose_every, uintptr_t low, uintptr_t high, uintptr_t sums) {
        const Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        const auto options = cuda_options(device, stream, diagnose_every, low, high, sums);
        const Unlocked release;
        aggregate_cuda(job, options);
      },
      "rows"_a, "numel"_a, "dtype"_a, "rule"_a, "kind"_a, "f"_a, "weights"_a, "out"_a, "device"_a,
      "stream"_a, "diagnose_every"_a, "low"_a, "high"_a, "sums"_a,
      "Queue the aggregation of rows on a CUDA device into out, on the caller's stream. With "
      "diagnose_every > 0 also the sums of CudaDiagnostics, in aggregate.h.");
#endif
}

}  // namespace
}  // namespace loft

PYBIND11_MODULE(_loft, module) {
  module.doc() =
      "Coordinate-wise robust aggregation of rows, and what else Python has no time for: shares of "
      "samples, what goes between processes, and their end.";
  loft::bind_kernels(module);
  loft::bind_shares(module);
  loft::bind_wire(module);
  loft::bind_process(module);
  loft::bind_frames(module);
}
