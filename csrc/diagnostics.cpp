// Layer 2. Which row was off.

#include "diagnostics.h"

#include <algorithm>

#include "keys.h"

namespace loft {
namespace {

constexpr int kLanes = 8;  // fixed, so that sums do not depend on the machine's vectors
constexpr int64_t kPart =
    1024;  // coordinates aggregated before they are compared: rows stay cached

template <DType kDType>
struct Comparison {
  using Bits = typename Stored<kDType>::Bits;
  using Value = typename Stored<kDType>::Value;
  int64_t num_outside = 0, num_non_finite = 0;
  double squared_distance = 0;

  void run(const Bits* row, const Bits* result, const Value* low, const Value* high,
           int64_t count) {
    int64_t outside[kLanes] = {}, non_finite[kLanes] = {};
    double squared[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        add(row[i + lane], result[i + lane], low[i + lane], high[i + lane], outside[lane],
            non_finite[lane], squared[lane]);
      }
    }
    for (int lane = 0; i + lane < count; ++lane) {
      add(row[i + lane], result[i + lane], low[i + lane], high[i + lane], outside[lane],
          non_finite[lane], squared[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      num_outside += outside[lane];
      num_non_finite += non_finite[lane];
      squared_distance += squared[lane];
    }
  }

  static inline void add(Bits stored, Bits result, Value low, Value high, int64_t& outside,
                         int64_t& non_finite, double& squared) {
    const Value value = value_of<kDType>(stored);
    const bool is_nan = value != value;
    const bool is_below = low != low ? !is_nan : value < low;
    const bool is_above = is_nan ? high == high : value > high;  // NaN orders above +inf
    const bool is_finite = value - value == 0;
    const double distance =
        static_cast<double>(value) - static_cast<double>(value_of<kDType>(result));
    const bool counts = is_finite && distance - distance == 0;
    outside += is_below || is_above;
    non_finite += !is_finite;
    squared += counts ? distance * distance : 0.0;
  }
};

template <DType kDType, typename Tally>
void compare_part(const Job& job, const void* low, const void* high, int64_t begin, int64_t count,
                  Tally* tallies) {
  using Bits = typename Stored<kDType>::Bits;
  using Value = typename Stored<kDType>::Value;
  for (size_t row = 0; row < job.rows.size(); ++row) {
    Comparison<kDType> comparison;
    comparison.run(static_cast<const Bits*>(job.rows[row]) + begin,
                   static_cast<const Bits*>(job.out) + begin, static_cast<const Value*>(low),
                   static_cast<const Value*>(high), count);
    tallies[row].coordinates += count;
    tallies[row].num_outside += comparison.num_outside;
    tallies[row].num_non_finite += comparison.num_non_finite;
    tallies[row].squared_distance += comparison.squared_distance;
  }
}

}  // namespace

void start(Diagnostics& diagnostics, size_t rows) {
  diagnostics.coordinates = 0;
  diagnostics.num_outside.assign(rows, 0);
  diagnostics.num_non_finite.assign(rows, 0);
  diagnostics.squared_distance.assign(rows, 0.0);
}

DiagnosticBlocks::DiagnosticBlocks(size_t rows, int64_t blocks, int every)
    : rows_(rows), every_(std::max(1, every)) {
  if (rows) tallies_.resize(static_cast<size_t>((blocks + every_ - 1) / every_) * rows);
}

void DiagnosticBlocks::run(const Job& job, const Work& work, Kernel kernel, int64_t block,
                           int64_t begin, int64_t end) {
  alignas(64) double low[kPart + kLanes], high[kPart + kLanes];  // wide enough for either type
  Tally* tallies = tallies_.data() + static_cast<size_t>(block / every_) * rows_;
  Work part = work;
  part.low = low;
  part.high = high;
  for (int64_t at = begin; at < end; at += kPart) {
    const int64_t count = std::min(kPart, end - at);
    kernel(part, at, at + count);
    switch (job.dtype) {
      case DType::kFloat64:
        compare_part<DType::kFloat64>(job, low, high, at, count, tallies);
        break;
      case DType::kFloat32:
        compare_part<DType::kFloat32>(job, low, high, at, count, tallies);
        break;
      case DType::kFloat16:
        compare_part<DType::kFloat16>(job, low, high, at, count, tallies);
        break;
      case DType::kBFloat16:
        compare_part<DType::kBFloat16>(job, low, high, at, count, tallies);
        break;
    }
  }
}

void DiagnosticBlocks::add_to(Diagnostics& diagnostics) const {
  for (size_t i = 0; i < tallies_.size(); ++i) {
    const size_t row = i % rows_;
    if (row == 0) diagnostics.coordinates += tallies_[i].coordinates;
    diagnostics.num_outside[row] += tallies_[i].num_outside;
    diagnostics.num_non_finite[row] += tallies_[i].num_non_finite;
    diagnostics.squared_distance[row] += tallies_[i].squared_distance;
  }
}

}  // namespace loft
