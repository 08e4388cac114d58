// Layer 4. The code of the CUDA threads, compiled for the host, against the CPU kernels bit by bit:
// exact and padded register kernels, two lanes, any rule, and the sort in shared memory. Not run
// here is what only a GPU has: indices of threads, shuffles, barriers.
//
//   check_device [LEVEL]   instruction set of the CPU kernels; default: the best that runs here

#include "cuda/coordinate.h"
#include "plain.h"

namespace loft::checks {
namespace {

CpuOptions cpu;

template <typename V>
bool is_same(V a, V b) {
  return a == b || (a != a && b != b);
}

// The result against the CPU kernel's, its window against the plain form's.
template <DType kDType>
void compare(const Case<kDType>& made, int64_t i, const device::Outcome<kDType>& found,
             const char* kernel) {
  const auto kept = plain_kept<kDType>(made.column(i), made.job.weights, made.job.params);
  const bool has_window = is_same(found.low, kept.low) && is_same(found.high, kept.high);
  expect(found.result == made.result(i) && has_window, kernel, ", ", made.job, ", coordinate ", i,
         ": ", std::hex, found.result, " of ", found.low, " to ", found.high, ", not ",
         made.result(i), " of ", kept.low, " to ", kept.high);
}

// What a row's values add up to, against the plain form: one job of every rule.
template <DType kDType>
void check_sums(int rows, bool is_weighted) {
  Case<kDType> made(rows, 211, 0, is_weighted, static_cast<unsigned>(300 + rows));
  for (const RuleParams& rule : rules_for(rows)) {
    made.job.params = rule;
    aggregate_cpu(made.job, cpu);
    Diagnostics wanted(made.job.rows.size());  // added in the same order
    std::vector<device::RowSums> found(rows, device::RowSums{});
    for (int64_t i = 0; i < made.job.numel; ++i) {
      const auto kept = plain_kept<kDType>(made.column(i), made.job.weights, rule);
      const auto result = value_of<kDType>(made.result(i));
      plain_diagnose<kDType>(made.column(i), kept, static_cast<double>(result), wanted);
      for (int row = 0; row < rows; ++row) {
        device::RowSums one{};
        one.add(value_of<kDType>(made.get(row, i)), result, kept.low, kept.high);
        found[row].add(one);
      }
    }
    for (int row = 0; row < rows; ++row) {
      const device::RowSums& sums = found[row];
      const bool is_right = sums.outside == static_cast<double>(wanted.num_outside[row]) &&
                            sums.non_finite == static_cast<double>(wanted.num_non_finite[row]) &&
                            sums.squared == wanted.squared_distance[row];
      expect(is_right, "compare_kernel, ", made.job, ", row ", row, ": ", sums.outside,
             " outside, ", sums.non_finite, " not finite, distance ", sums.squared);
    }
  }
}

// Every coordinate that is looked at has one place of its own, and they fill the room.
void check_places() {
  float low = 0;
  for (const int64_t numel : {int64_t{1}, 3 * kBlock, 7 * kBlock + 5}) {
    for (const int every : {1, 2, 16}) {
      const device::Windows<DType::kFloat32> windows{&low, nullptr, every};
      int64_t next = 0;
      for (int64_t i = 0; i < numel; ++i) {
        const bool is_looked_at = i / kBlock % every == 0;
        expect(windows.place(i) == (is_looked_at ? next : -1), "coordinate ", i, " of ", numel,
               " by ", every, ": no place");
        next += is_looked_at;
      }
      const int64_t room = device::blocks_looked_at(numel, every) * kBlock;
      expect(next <= room && room < next + kBlock, "room of ", room, " for ", next, " windows");
      const device::Windows<DType::kFloat32> none{nullptr, nullptr, every};
      expect(none.place(0) == -1, "a place where nobody asks");
    }
  }
}

// One coordinate's keys on kWires wires with `below` of padding at the lower end.
template <DType kDType, int kWires>
void load_wires(const Case<kDType>& made, int64_t i, int below, device::Key<kDType> (&keys)[kWires],
                int first_wire = 0) {
  for (int wire = 0; wire < kWires; ++wire) {
    const int row = first_wire + wire - below;
    keys[wire] = row < 0 ? device::kFirst<kDType>
                 : row >= made.job.num_rows()
                     ? device::kLast<kDType>
                     : static_cast<device::Key<kDType>>(key_of<kDType>(made.get(row, i)));
  }
}

template <DType kDType, int kWires, bool kIsOdd>
void check_registers(const Case<kDType>& made, int64_t i) {
  const RuleParams& params = made.job.params;
  device::Key<kDType> keys[kWires];
  load_wires(made, i, device::padding_below<kWires>(made.job.num_rows()), keys);
  compare(
      made, i,
      params.rule == Rule::kMedian
          ? device::median_of<kDType, kWires, kIsOdd>(keys, params.kind)
          : device::trimmed_mean_of<kDType, kWires, kIsOdd>(keys, made.job.num_rows(), params.f),
      "register_kernel");
}

template <DType kDType>
void check_two_lanes(const Case<kDType>& made, int64_t i) {
  using device::kHalf;
  const RuleParams& params = made.job.params;
  const int rows = made.job.num_rows();
  const int below = device::padding_below<2 * kHalf>(rows);
  device::Key<kDType> keys[2][kHalf], other[2][kHalf];
  for (int side : {0, 1}) {
    load_wires(made, i, below, keys[side], side * kHalf);
    device::SortNetwork<kHalf>::apply(keys[side]);
  }
  for (int side : {0, 1}) {  // the shuffle
    for (int wire = 0; wire < kHalf; ++wire) other[side][wire] = keys[1 - side][kHalf - 1 - wire];
  }
  for (int side : {0, 1}) device::keep_half(keys[side], other[side], side);
  if (params.rule == Rule::kMedian) {
    const auto lower = device::value_at<kDType>(device::edge_of(keys[0], 0));
    const auto upper = device::value_at<kDType>(device::edge_of(keys[1], 1));
    return compare(made, i, device::median_of_middle<kDType>(lower, upper, rows % 2, params.kind),
                   "two_lane_kernel");
  }
  for (int side : {0, 1}) device::sort_half(keys[side]);
  typename Stored<kDType>::Value above[kHalf];
  for (int wire = 0; wire < kHalf; ++wire) above[wire] = device::value_at<kDType>(keys[1][wire]);
  compare(made, i, device::trimmed_mean_of_halves<kDType>(keys[0], above, rows, params.f),
          "two_lane_kernel");
}

template <DType kDType, int kWires, bool kIsWeighted>
void check_any_rule(const Case<kDType>& made, int64_t i) {
  device::Key<kDType> keys[kWires];
  int32_t weights[kWires] = {};
  load_wires(made, i, 0, keys);
  std::copy(made.job.weights.begin(), made.job.weights.end(), weights);
  const auto outcome = device::any_rule_of<kDType, kWires, kIsWeighted>(
      keys, weights, made.job.num_rows(), made.job.total_weight(), made.job.params);
  compare(made, i, outcome, "any_rule_kernel");
}

template <DType kDType, bool kIsWeighted>
void check_shared(const Case<kDType>& made, int64_t i) {
  const int rows = made.job.num_rows();
  std::vector<device::Key<kDType>> keys;
  for (auto bits : made.column(i)) keys.push_back(key_of<kDType>(bits));
  std::vector<int32_t> weights = made.job.weights;
  const int64_t total = made.job.total_weight();
  for (int p = 1; p < rows; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int low = 0; low < rows; ++low) {
        if (!device::is_batcher_low(low, rows, p, k)) continue;
        const bool is_tie = kIsWeighted && keys[low] == keys[low + k];
        if (is_tie ? weights[low] <= weights[low + k] : keys[low] <= keys[low + k]) continue;
        std::swap(keys[low], keys[low + k]);
        if (kIsWeighted) std::swap(weights[low], weights[low + k]);
      }
    }
  }
  const auto key = [&](int rank) -> device::Key<kDType>& { return keys[rank]; };
  const auto weight = [&](int rank) -> int32_t& { return weights[rank]; };
  compare(made, i, device::rule_of<kDType, kIsWeighted>(made.job.params, rows, total, key, weight),
          "shared_kernel");
}

// Calls check(made, i) for every rule of `rows` rows and every coordinate.
template <DType kDType, typename Check>
void for_results(int rows, bool is_weighted, bool is_ranked, const Check& check) {
  Case<kDType> made(rows, 53, 0, is_weighted, static_cast<unsigned>(100 + rows));
  for (const RuleParams& rule : rules_for(rows)) {
    if (is_ranked && rule.rule != Rule::kMedian && rule.rule != Rule::kTrimmedMean) continue;
    made.job.params = rule;
    aggregate_cpu(made.job, cpu);
    for (int64_t i = 0; i < made.job.numel; ++i) check(made, i);
  }
}

template <DType kDType, int... kLess>
void check_exact(std::integer_sequence<int, kLess...>) {
  (for_results<kDType>(kLess + 1, false, true, check_registers<kDType, kLess + 1, kLess % 2 == 0>),
   ...);
}

template <DType kDType, int kWires>
void check_padded(int least) {
  for (int rows = least; rows <= kWires; ++rows) {
    for_results<kDType>(
        rows, false, true,
        rows % 2 ? check_registers<kDType, kWires, true> : check_registers<kDType, kWires, false>);
  }
}

template <DType kDType, int kWires>
void check_any_rules(int least) {
  for (int rows = least; rows <= kWires; ++rows) {
    for_results<kDType>(rows, false, false, check_any_rule<kDType, kWires, false>);
    if constexpr (kDType != DType::kFloat64) {
      for_results<kDType>(rows, true, false, check_any_rule<kDType, kWires, true>);
    }
  }
}

template <DType kDType>
void check_dtype() {
  check_exact<kDType>(std::make_integer_sequence<int, 16>{});
  check_any_rules<kDType, 4>(1);
  check_any_rules<kDType, 8>(5);
  check_any_rules<kDType, 16>(9);
  if constexpr (kDType != DType::kFloat64) {
    check_any_rules<kDType, 32>(17);
    check_padded<kDType, 24>(17);
    check_padded<kDType, 32>(25);
    check_padded<kDType, 48>(33);
    check_padded<kDType, 64>(49);
    for (int rows = 65; rows <= 128; ++rows) {
      for_results<kDType>(rows, false, true, check_two_lanes<kDType>);
    }
  }
  for (int rows : {1, 2, 5, 40}) {
    for (bool is_weighted : {false, true}) check_sums<kDType>(rows, is_weighted);
  }
  for (int rows : {1, 2, 3, 7, 16, 33, 64, 100, 129, 200, 1024}) {
    for_results<kDType>(rows, false, false, check_shared<kDType, false>);
    for_results<kDType>(rows, true, false, check_shared<kDType, true>);
  }
}

}  // namespace
}  // namespace loft::checks

int main(int argc, char** argv) {
  if (argc > 1) loft::checks::cpu.isa = argv[1];
  loft::checks::check_places();
  loft::checks::check_dtype<loft::DType::kFloat64>();
  loft::checks::check_dtype<loft::DType::kFloat32>();
  loft::checks::check_dtype<loft::DType::kFloat16>();
  loft::checks::check_dtype<loft::DType::kBFloat16>();
  return loft::checks::report("device code on the host");
}
