// Layer 3. Jobs for rules that see rows, on the CPU: a table of distances, and rules over mixed
// rows.
//
// Sums of the table's blocks are added in the order of blocks, so that no thread count shows.

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>

#include "aggregate.h"
#include "cpu/blocks.h"
#include "cpu/diagnostics.h"
#include "cpu/dispatch.h"
#include "cpu/rows.h"
#include "levels.h"

namespace loft {

void distances_cpu(const Job& job, const CpuOptions& options, double* table) {
  check_rows(job, table);
  const KernelTable& kernels = level_for(options.isa).kernels();
  const int rows = job.num_rows(), stride = rows + 1;
  for (int row = 0; row < rows; ++row) std::fill_n(table + row * stride + row + 1, rows - row, 0.0);
  // Every block's sums wait until those before it are added, whatever thread has which.
  std::mutex guard;
  std::map<int64_t, std::vector<double>> ready;  // by the block's first coordinate
  int64_t next = 0;                              // block to be added
  constexpr int64_t kPairs = kGroupRows * kGroupRows;
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  const auto for_groups = [&](int64_t begin, int64_t end, double* found, const auto& body) {
    for (int a = 0; a < rows; a += kGroupRows) {
      for (int b = a; b < rows; b += kGroupRows, found += kPairs) {
        const int a_end = std::min(rows, a + kGroupRows), b_end = std::min(rows, b + kGroupRows);
        body(RowRanges{job.row_addresses(), a, a_end, b, b_end, begin, end}, found);
      }
    }
  };
  const auto add = [&](const RowRanges& what, const double* found) {
    for (int a = what.a; a < what.a_end; ++a) {
      for (int b = what.is_same() ? a : what.b; b < what.b_end; ++b) {
        const int column = a == b ? rows : b;  // a row's own place has its squared length
        table[a * stride + column] += found[RowRanges::place(a - what.a, b - what.b)];
      }
    }
  };
  for_blocks(job.numel, job.coordinate_bytes(), options.threads, [&](int64_t begin, int64_t end) {
    std::vector<double> found(static_cast<size_t>(kPairs * groups * (groups + 1) / 2));
    for_groups(begin, end, found.data(),
               [&](const RowRanges& what, double* to) { kernels.distances(job.dtype, what, to); });
    const std::lock_guard<std::mutex> lock(guard);
    ready.emplace(begin, std::move(found));
    for (; !ready.empty() && ready.begin()->first == next; next += kBlock) {
      for_groups(0, 0, ready.begin()->second.data(), add);
      ready.erase(ready.begin());
    }
  });
}

namespace {

// Mixed rows that differ, and which of them each one is: where honest rows lie together, many leave
// out the same ones, and are mixed once.
struct MixPlan {
  std::vector<MixedRow> each;
  std::vector<int> which;
};

MixPlan plan_of(const Mixing& mixing) {
  MixPlan plan;
  std::map<std::vector<std::pair<int, double>>, int> known;  // by terms
  for (size_t row = 0; row < mixing.common.size(); ++row) {
    const int first = mixing.starts[row], count = mixing.starts[row + 1] - first;
    std::vector<std::pair<int, double>> terms;
    for (int k = first; k < first + count; ++k) terms.emplace_back(mixing.from[k], mixing.by[k]);
    const auto [place, is_new] = known.try_emplace(terms, static_cast<int>(plan.each.size()));
    if (is_new) plan.each.push_back({first, count, mixing.common[row]});
    plan.which.push_back(place->second);
  }
  return plan;
}

}  // namespace

Mixing mixing_of(const Job& job, const Matrix& matrix) {
  check_rows(job, job.out);
  Job inner = job;  // the rule's own: mixed rows, which have no address
  inner.rows.assign(static_cast<size_t>(std::max(0, matrix.num_mixed)), job.out);
  check(inner);
  const size_t rows = job.rows.size();
  if (matrix.weights.size() != inner.rows.size() * rows || matrix.scales.size() != rows) {
    throw std::invalid_argument(describe(job) + ": need a weight of every row for each of " +
                                std::to_string(matrix.num_mixed) + " mixed rows, and its scale");
  }
  const FloatState state;  // as for the kernels: whoever calls may flush small numbers to 0
  // As the arithmetic has it: a weight that is too small for it is none.
  const auto rounded = [&](double weight) {
    return job.dtype == DType::kFloat64 ? weight : static_cast<float>(weight);
  };
  Mixing mixing;
  mixing.starts.push_back(0);
  for (const double scale : matrix.scales) mixing.scales.push_back(rounded(scale));
  for (size_t mixed = 0; mixed < inner.rows.size(); ++mixed) {
    for (size_t row = 0; row < rows; ++row) {
      const double weight = rounded(matrix.weights[mixed * rows + row]);
      if (weight == 0 || mixing.scales[row] == 0) continue;
      mixing.from.push_back(static_cast<int>(row));
      mixing.by.push_back(weight);
    }
    const auto first = mixing.by.begin() + mixing.starts.back(), last = mixing.by.end();
    const bool is_common = std::adjacent_find(first, last, std::not_equal_to<>()) == last;
    mixing.common.push_back(first != last && is_common ? *first : 0);
    mixing.starts.push_back(static_cast<int>(mixing.from.size()));
  }
  return mixing;
}

void mix_cpu(const Job& job, const Matrix& matrix, const CpuOptions& options) {
  const Mixing mixing = mixing_of(job, matrix);
  const KernelTable& table = level_for(options.isa).kernels();
  const DType dtype = job.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Kernel kernel = table.kernels[!job.weights.empty()][static_cast<int>(dtype)];
  // The rows are the mixed ones, which the kernel makes.
  const Work work{nullptr,    job.weights_or_null(),      matrix.num_mixed, job.total_weight(),
                  job.params, static_cast<char*>(job.out)};
  const MixPlan plan = plan_of(mixing);
  const MixedRows mixed{job.row_addresses(),
                        job.num_rows(),
                        mixing.scales.data(),
                        mixing.from.data(),
                        mixing.by.data(),
                        plan.each.data(),
                        static_cast<int>(plan.each.size()),
                        plan.which.data(),
                        matrix.num_mixed};
  const auto run = [&](int64_t begin, int64_t end) {
    table.mix(job.dtype, mixed, work, kernel, begin, end);
  };
  DiagnosticBlocks samples(job, table, options);
  for_blocks(job.numel, job.coordinate_bytes(), options.threads, [&](int64_t begin, int64_t end) {
    samples.wants(begin) ? samples.run_mixed(begin, end, run) : run(begin, end);
  });
  samples.finish();
}

}  // namespace loft
