// Layer 4. Every CPU kernel of every instruction set that runs here against the plain form, over
// dtypes, rules, weights, rows, lengths, alignments, threads and diagnostics. Built with sanitizers
// it also shows that no path reads or writes out of its rows or computes what C++ leaves undefined.
//
//   check_cpu [LEVEL...]   default: all levels that run here

#include "plain.h"

namespace loft::checks {
namespace {

bool is_alike(double found, double wanted) {
  return found == wanted || std::abs(found - wanted) <= 1e-12 * wanted;
}

// What every row did; `wanted` is added up in another order.
void check_diagnostics(const Job& job, const std::string& level, const Diagnostics& found,
                       const Diagnostics& wanted) {
  for (size_t row = 0; row < job.rows.size(); ++row) {
    const bool is_right = found.coordinates == wanted.coordinates &&
                          found.num_outside[row] == wanted.num_outside[row] &&
                          found.num_non_finite[row] == wanted.num_non_finite[row] &&
                          is_alike(found.squared_distance[row], wanted.squared_distance[row]);
    expect(is_right, level, ", ", job, ", row ", row, ": ", found.num_outside[row], " and ",
           wanted.num_outside[row], " of ", found.coordinates, " outside, ",
           found.squared_distance[row], " and ", wanted.squared_distance[row], " off");
  }
}

template <DType kDType>
void check_case(Case<kDType>& made, const std::string& level, int threads, bool diagnoses) {
  const Job& job = made.job;
  Diagnostics found, wanted(job.rows.size());
  made.poison();
  aggregate_cpu(job, {threads, level, diagnoses ? &found : nullptr, 1});
  const int64_t step = job.numel > 100'000 ? 61 : 1;  // coprime to every vector's lanes
  for (int64_t i = 0; i < job.numel; i += step) {
    const auto kept = plain_kept<kDType>(made.column(i), job.weights, job.params);
    const auto bits = result_bits<kDType>(kept.result);
    plain_diagnose<kDType>(made.column(i), kept, value_of<kDType>(made.result(i)), wanted);
    expect(made.result(i) == bits, level, ", ", job, ", coordinate ", i, ": ", std::hex,
           made.result(i), ", not ", bits);
  }
  if (diagnoses) check_diagnostics(job, level, found, wanted);
}

// Threads share the blocks; what they find is the same, the sums of squares bit for bit.
template <DType kDType>
void check_threads(Case<kDType>& made, const std::string& level) {
  Diagnostics alone, shared;
  aggregate_cpu(made.job, {1, level, &alone, 2});
  aggregate_cpu(made.job, {3, level, &shared, 2});
  const bool is_same = alone.coordinates == shared.coordinates &&
                       alone.num_outside == shared.num_outside &&
                       alone.num_non_finite == shared.num_non_finite &&
                       alone.squared_distance == shared.squared_distance;
  expect(is_same, level, ", ", made.job, ": threads find others");
}

template <DType kDType>
void check_rows(const std::string& level, int rows, bool is_weighted) {
  unsigned seed = static_cast<unsigned>(rows);
  for (int64_t numel : {0, 1, 99}) {
    for (int offset : {0, static_cast<int>(sizeof(typename Stored<kDType>::Bits))}) {
      // diagnostics take another way through rows and results that are finite all along
      const bool is_tame = offset == 0 && numel > 1;
      Case<kDType> made(rows, numel, offset, is_weighted, ++seed, is_tame);
      for (const RuleParams& rule : rules_for(rows)) {
        made.job.params = rule;
        check_case(made, level, 1, true);
      }
    }
  }
}

template <DType kDType>
void check_dtype(const std::string& level) {
  std::vector<int> counts{48, 63, 64, 65, 96, 100, 128, 129};
  for (int rows = 1; rows <= 34; ++rows) counts.push_back(rows);
  for (bool is_weighted : {false, true}) {
    for (int rows : counts) check_rows<kDType>(level, rows, is_weighted);
  }
  Case<kDType> many(1024, 300, 0, true, 7);  // the most rows; the shortest turns, three
  many.job.params = {Rule::kTrimmedMean, MedianKind::kMidpoint, 300};
  check_case(many, level, 1, true);
  // Turns of which the last is shorter. Without f, rows that are not finite go value by value.
  for (int rows : {3, 6, 9, 66}) {
    Case<kDType> turns(rows, rows > 9 ? 2'600 : 18'901, 0, false, static_cast<unsigned>(rows),
                       true);
    for (int f : {0, 1}) {
      turns.job.params = {Rule::kTrimmedMean, MedianKind::kMidpoint, f};
      check_case(turns, level, 1, true);
    }
  }
  Case<kDType> wide(3, 2'200'001, 0, false, 8);  // several blocks and threads
  wide.job.params = {Rule::kMedian, MedianKind::kMidpoint, 0};
  check_case(wide, level, 3, false);
  check_threads(wide, level);
}

void check_level(const std::string& level) {
  check_dtype<DType::kFloat64>(level);
  check_dtype<DType::kFloat32>(level);
  check_dtype<DType::kFloat16>(level);
  check_dtype<DType::kBFloat16>(level);
  Case<DType::kFloat32> made(5, 1'037, 4, false, 9);  // the pass, for the sanitizers
  for (bool in_bursts : {false, true}) pass_cpu(made.job, {1, level, nullptr, 0}, in_bursts);
}

}  // namespace
}  // namespace loft::checks

int main(int argc, char** argv) {
  std::vector<std::string> levels(argv + 1, argv + argc);
  if (levels.empty()) levels = loft::isa_levels();
  int status = 0;
  for (const std::string& level : levels) {
    loft::checks::check_level(level);
    status = loft::checks::report(level);
  }
  return status;
}
