// Layer 3. Whether a job keeps the limits of rules.h, before any kernel sees it, on CPU and CUDA.

#include <stdexcept>

#include "aggregate.h"

namespace loft {

std::string describe(const Job& job) {
  return "rows=" + std::to_string(job.rows.size()) + ", numel=" + std::to_string(job.numel) +
         ", f=" + std::to_string(job.params.f);
}

void check(const Job& job) {
  const int64_t rows = static_cast<int64_t>(job.rows.size());
  if (rows < 1 || rows > kMaxRows) {
    throw std::invalid_argument(describe(job) + ": need 1 <= rows <= " + std::to_string(kMaxRows));
  }
  if (job.numel < 0 || job.params.f < 0 || 2 * int64_t{job.params.f} >= rows) {
    throw std::invalid_argument(describe(job) + ": need numel >= 0 and 0 <= 2*f < rows");
  }
  const auto null = std::find(job.rows.begin(), job.rows.end(), nullptr);
  if (job.numel > 0 && (job.out == nullptr || null != job.rows.end())) {
    const std::string which =
        job.out == nullptr ? "out" : "row " + std::to_string(null - job.rows.begin());
    throw std::invalid_argument(describe(job) + ": " + which + " has no address");
  }
  if (job.weights.empty()) return;
  if (*std::min_element(job.weights.begin(), job.weights.end()) < 1) {
    throw std::invalid_argument("weights must be >= 1; leave other rows out");
  }
  const int64_t total = job.total_weight();
  if (static_cast<int64_t>(job.weights.size()) != rows || total > kMaxTotalWeight) {
    throw std::invalid_argument(describe(job) + ": need one weight a row, in all at most " +
                                std::to_string(kMaxTotalWeight) + ", not " + std::to_string(total));
  }
}

void check_rows(const Job& job, void* out) {
  Job any = job;
  any.params = {};
  any.weights.clear();
  any.out = out;
  check(any);
}

}  // namespace loft
