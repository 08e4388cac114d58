// Layer 4. The code of the CUDA threads, compiled for the host, against the CPU kernels bit by bit:
// exact and padded register kernels, two lanes, any rule, the sort in shared memory, distances of
// rows and mixed rows. Not run here is what only a GPU has: indices of threads, shuffles, barriers.
//
//   check_device [LEVEL]   instruction set of the CPU kernels; default: the best that runs here

#include "checks/plain.h"
#include "cuda/rows.h"

namespace loft::checks {
namespace {

CpuOptions cpu;
int num_quick = 0;  // mixed rows of matrices that all have a common weight

// Equal, or NaN both.
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

// Parts of a job: whole blocks one after the other, and their rows where they lie.
void check_parts() {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16}) {
    std::vector<double> memory(3 * 100);
    Job job;
    job.dtype = dtype;
    job.numel = 70;
    for (int row = 0; row < 2; ++row) job.rows.push_back(&memory[100 * row]);
    job.out = &memory[200];
    for (const int64_t most : {int64_t{32}, int64_t{35}, int64_t{69}, int64_t{70}}) {
      int64_t next = 0;
      for_parts(job, most, [&](const Job& part, int64_t first) {
        const auto is_at = [&](const void* from, const void* whole) {
          return from == static_cast<const char*>(whole) + first * size_of(dtype);
        };
        const bool is_right = first == next && part.numel > 0 && part.numel <= most &&
                              is_at(part.rows[0], job.rows[0]) &&
                              is_at(part.rows[1], job.rows[1]) && is_at(part.out, job.out) &&
                              part.dtype == dtype;
        expect(is_right, "part from ", first, " of ", job, " by ", most);
        next += part.numel;
      });
      expect(next == job.numel, "parts of ", job, " by ", most, " end at ", next);
    }
  }
}

// One coordinate's keys on kWires wires with `below` of padding at the lower end.
template <DType kDType, int kWires>
void load_wires(const Case<kDType>& made, int64_t i, int below,
                device::Wire<kDType> (&keys)[kWires], int first_wire = 0) {
  for (int wire = 0; wire < kWires; ++wire) {
    const int row = first_wire + wire - below;
    keys[wire] = row < 0                      ? device::wire_below<kDType>()
                 : row >= made.job.num_rows() ? device::wire_above<kDType>()
                                              : device::wire_of<kDType>(made.get(row, i));
  }
}

// register_kernel: all keys of a coordinate in one thread's registers, sorted by a network.
template <DType kDType, int kWires, bool kIsOdd>
void check_registers(const Case<kDType>& made, int64_t i) {
  const RuleParams& params = made.job.params;
  device::Wire<kDType> keys[kWires];
  load_wires(made, i, device::padding_below<kWires>(made.job.num_rows()), keys);
  compare(
      made, i,
      params.rule == Rule::kMedian
          ? device::median_of<kDType, kWires, kIsOdd>(keys, params.kind)
          : device::trimmed_mean_of<kDType, kWires, kIsOdd>(keys, made.job.num_rows(), params.f),
      "register_kernel");
}

// two_lane_kernel: two threads have 64 wires each, exchange them by a shuffle and keep the lower
// and the upper half. Here both threads' keys are at hand, so an exchange is a copy.
template <DType kDType, bool kIsRanked>
void check_two_lanes(const Case<kDType>& made, int64_t i) {
  using device::kHalf;
  const RuleParams& params = made.job.params;
  const int rows = made.job.num_rows();
  const int below = device::padding_below<2 * kHalf>(rows);
  device::Wire<kDType> keys[2][kHalf], other[2][kHalf];
  for (int side : {0, 1}) {
    load_wires(made, i, below, keys[side], side * kHalf);
    device::SortNetwork<kHalf>::apply(keys[side]);
  }
  for (int side : {0, 1}) {  // the shuffle
    for (int wire = 0; wire < kHalf; ++wire) other[side][wire] = keys[1 - side][kHalf - 1 - wire];
  }
  for (int side : {0, 1}) device::keep_half(keys[side], other[side], side);
  if (params.rule == Rule::kMedian && kIsRanked) {
    const auto lower = device::value_at<kDType>(device::edge_of(keys[0], 0));
    const auto upper = device::value_at<kDType>(device::edge_of(keys[1], 1));
    return compare(made, i, device::median_of_middle<kDType>(lower, upper, rows % 2, params.kind),
                   "two_lane_kernel");
  }
  for (int side : {0, 1}) device::sort_half(keys[side]);
  if constexpr (!kIsRanked) {  // ranks in shared memory, which any rule indexes
    const auto key = [&](int rank) -> device::Wire<kDType>& {
      return keys[(below + rank) / kHalf][(below + rank) % kHalf];
    };
    int32_t none = 0;
    const auto weight = [&](int) -> int32_t& { return none; };
    return compare(made, i, device::rule_of<kDType, false>(params, rows, 0, key, weight),
                   "two_lane_kernel, any rule");
  }
  typename Stored<kDType>::Value above[kHalf];
  for (int wire = 0; wire < kHalf; ++wire) above[wire] = device::value_at<kDType>(keys[1][wire]);
  compare(made, i, device::trimmed_mean_of_halves<kDType>(keys[0], above, rows, params.f),
          "two_lane_kernel");
}

// any_rule_kernel and mix_kernel with any rule: keys, and weights where there are any, in
// registers; the rule is no template. The first has the ranks in shared memory.
template <DType kDType, int kWires, bool kIsWeighted>
void check_any_rule(const Case<kDType>& made, int64_t i) {
  device::Wire<kDType> keys[kWires];
  int32_t weights[kWires] = {};
  load_wires(made, i, 0, keys);
  std::copy(made.job.weights.begin(), made.job.weights.end(), weights);
  const auto outcome = device::any_rule_of<kDType, kWires, kIsWeighted>(
      keys, weights, made.job.num_rows(), made.job.total_weight(), made.job.params);
  compare(made, i, outcome, "any_rule_kernel");
}

// shared_kernel: a block's threads sort columns in shared memory by Batcher's network, a comparator
// each between two barriers. Comparators of one (p, k) touch no wire twice, so their order is free.
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

// --- rules that see rows

// One block of threads, a step of all its threads after the other.
template <DType kDType, int kSide, bool kOneGroup>
void measure_block(const device::Distances<kDType, kSide, kOneGroup>& what, double* sums) {
  using Of = device::Distances<kDType, kSide, kOneGroup>;
  const auto shared = std::make_unique<typename Of::Shared>();
  std::vector<typename Of::Lanes> mine(device::kSlotThreads);
  const auto step = [&](const auto& body) {
    for (int thread = 0; thread < device::kSlotThreads; ++thread) body(thread);
  };
  for (int round = 0; round < what.rounds(); ++round) {
    step([&](int thread) { what.measure(thread, round, *shared); });
    step([&](int thread) { what.add(thread, *shared, mine[thread]); });
  }
  step([&](int thread) { what.gather(thread, mine[thread], *shared); });
  step([&](int thread) { what.finish(thread, *shared, sums); });
}

// The table of the CPU kernel, by groups of kSide rows, or by one group of them.
template <DType kDType, int kSide, bool kOneGroup = false>
void check_distances(const Case<kDType>& made) {
  if constexpr (!kOneGroup) {
    if (made.job.num_rows() <= kSide) check_distances<kDType, kSide, true>(made);
  }
  const int rows = made.job.num_rows(), groups = device::groups_of(rows, kSide);
  const size_t side = static_cast<size_t>(rows) + 1;
  std::vector<double> wanted(side * side);
  distances_cpu(made.job, cpu, wanted.data());
  const device::DistanceSums shape{rows, kSide, (made.job.numel + kBlock - 1) / kBlock};
  std::vector<double> sums(static_cast<size_t>(shape.blocks * shape.cells()), -1.0);
  std::vector<const void*> table = made.job.rows;  // and addresses for the rest of the last group
  table.resize(static_cast<size_t>(groups * kSide), made.job.rows[0]);
  for (int64_t item = 0; item < shape.blocks * shape.group_pairs(); ++item) {
    const auto groups_at = device::group_pair_at(item % shape.group_pairs(), groups);
    const int64_t begin = item / shape.group_pairs() * kBlock;
    measure_block<kDType, kSide, kOneGroup>(
        {table.data(), rows, groups_at, begin, std::min(begin + kBlock, made.job.numel)},
        &sums[static_cast<size_t>(item * kSide * kSide)]);
  }
  for (int row = 0; row < rows; ++row) {
    for (int other = row + 1; other <= rows; ++other) {
      double found = 0;
      for (int64_t block = 0; block < shape.blocks; ++block) {
        found += sums[static_cast<size_t>(block * shape.cells() + shape.cell(row, other))];
      }
      expect(is_same(found, wanted[row * side + other]), "distances_kernel, ", made.job,
             ", groups of ", kSide, ", rows ", row, " and ", other, ": ", found, ", not ",
             wanted[row * side + other]);
    }
  }
}

// What a mixed coordinate is, by every kernel that takes so many rows.
template <DType kDType, int kRows, int kWires, typename Ranked>
void check_mix_in_registers(const Case<kDType>& made, const Matrix& matrix) {
  using V = typename Stored<kDType>::Value;
  constexpr DType kOf = device::kWide<kDType>;
  constexpr int kTurns = 2;
  const Mixing mixing = mixing_of(made.job, matrix);
  const int below = Ranked::template below<kWires>(matrix.num_mixed);
  const auto table = device::mix_table_of<V, kRows, kWires>(mixing, below);
  for (double common : mixing.common) num_quick += common != 0 && table.is_quick;
  struct {
    int32_t at[kWires] = {};
  } weights;
  std::copy(made.job.weights.begin(), made.job.weights.end(), weights.at);
  for (int64_t i = 0; i + kTurns <= made.job.numel; i += kTurns) {
    V values[kTurns][kRows] = {};
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int row = 0; row < made.job.num_rows(); ++row) {
        values[turn][row] = value_of<kDType>(made.get(row, i + turn)) * table.scales[row];
      }
    }
    device::Wire<kOf> keys[kTurns][kWires];
    if constexpr (device::kIsInTurn<kWires>) {
      device::mix_keys_in_turn<kDType>(
          values, table, matrix.num_mixed, below,
          [&](int turn, int wire, auto key) { keys[turn][wire] = key; });
    } else {
      device::mix_keys<kDType, Ranked::kMindsZeros, kRows, kWires, kTurns>(
          values, table, matrix.num_mixed, below, keys);
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto found = device::narrowed<kDType>(Ranked::template apply<kOf>(
          keys[turn], weights, matrix.num_mixed, made.job.total_weight(), made.job.params));
      expect(found == made.result(i + turn), "mix_kernel, ", matrix.num_mixed, " mixed of ",
             made.job, ", ", kRows, " rows on ", kWires, " wires, coordinate ", i + turn, ": ",
             std::hex, found, ", not ", made.result(i + turn));
    }
  }
}

// The kernels that rows.cu may choose for a matrix, each on rows padded to kRows.
template <DType kDType, int kRows>
void check_mix_of(const Case<kDType>& made, const Matrix& matrix) {
  const Job& job = made.job;
  const bool is_odd = matrix.num_mixed % 2, has_weights = !job.weights.empty();
  using device::AnyRule;
  using device::RankedRule;
  if (matrix.num_mixed == 1) {
    check_mix_in_registers<kDType, kRows, 1, RankedRule<Rule::kMedian, true>>(made, matrix);
  }
  if (!has_weights && job.params.rule == Rule::kMedian) {
    constexpr Rule kRule = Rule::kMedian;
    const auto check = is_odd
                           ? check_mix_in_registers<kDType, kRows, kRows, RankedRule<kRule, true>>
                           : check_mix_in_registers<kDType, kRows, kRows, RankedRule<kRule, false>>;
    check(made, matrix);
  }
  if (!has_weights && job.params.rule == Rule::kTrimmedMean) {
    constexpr Rule kRule = Rule::kTrimmedMean;
    const auto check = is_odd
                           ? check_mix_in_registers<kDType, kRows, kRows, RankedRule<kRule, true>>
                           : check_mix_in_registers<kDType, kRows, kRows, RankedRule<kRule, false>>;
    check(made, matrix);
  }
  if constexpr (kRows <= 16) {
    if (!has_weights) check_mix_in_registers<kDType, kRows, kRows, AnyRule<false>>(made, matrix);
    if constexpr (kDType != DType::kFloat64) {
      if (has_weights) check_mix_in_registers<kDType, kRows, kRows, AnyRule<true>>(made, matrix);
    }
  }
}

// The matrix as it lies in the device's memory: what mix_shared_kernel mixes, some at a time.
template <DType kDType>
void check_mixed_values(const Case<kDType>& made, const Matrix& matrix) {
  using V = typename Stored<kDType>::Value;
  constexpr int kTogether = device::kMixedTogether;
  const int rows = made.job.num_rows(), num_mixed = matrix.num_mixed;
  const std::vector<char> bytes = device::mix_many_of<V>(mixing_of(made.job, matrix));
  std::vector<double> room(static_cast<size_t>(mix_cells(rows, num_mixed)));
  expect(bytes.size() <= room.size() * sizeof(double), "mix_cells, ", made.job, ": no room");
  std::memcpy(room.data(), bytes.data(), bytes.size());
  const auto table = device::mix_many_at<V>(room.data(), rows, num_mixed);
  for (int64_t i = 0; i < made.job.numel; ++i) {
    std::vector<V> column;
    for (int row = 0; row < rows; ++row) column.push_back(value_of<kDType>(made.get(row, i)));
    const std::vector<V> wanted = plain_mixed(column, matrix);
    const auto value = [&](int k) { return column[k] * table.scales[k]; };
    for (int first = 0; first < num_mixed; first += kTogether) {
      V found[kTogether];
      device::mix_many(table, first, value, found);
      for (int mixed = first; mixed < std::min(first + kTogether, num_mixed); ++mixed) {
        const V one = found[mixed - first];
        const bool is_right =
            is_same(one, wanted[mixed]) && std::signbit(one) == std::signbit(wanted[mixed]);
        expect(is_right || (one != one && wanted[mixed] != wanted[mixed]),
               "mix_shared_kernel, row ", mixed, " of ", made.job, ", coordinate ", i, ": ", one,
               ", not ", wanted[mixed]);
      }
    }
  }
}

// Mixed rows of a case, of every rule.
template <DType kDType>
void check_mix(int rows, int num_mixed, bool is_weighted, bool is_common) {
  Case<kDType> made(rows, 54, 0, false, static_cast<unsigned>(700 + rows), rows % 2);
  std::mt19937 random(static_cast<unsigned>(num_mixed + 7 * rows));
  const Matrix matrix = matrix_for(rows, num_mixed, random, is_common);
  for (const RuleParams& rule : rules_for(num_mixed)) {
    made.job.params = rule;
    made.job.weights.clear();
    for (int row = 0; is_weighted && row < num_mixed; ++row) {
      made.job.weights.push_back(1 + static_cast<int32_t>(random() % 5));
    }
    mix_cpu(made.job, matrix, cpu);
    if (rows <= 4) check_mix_of<kDType, 4>(made, matrix);
    if (rows <= 8) check_mix_of<kDType, 8>(made, matrix);
    if (rows <= 16) check_mix_of<kDType, 16>(made, matrix);
    if constexpr (kDType != DType::kFloat64) {
      if (rows <= 32) check_mix_of<kDType, 32>(made, matrix);
    }
  }
  check_mixed_values(made, matrix);
}

// Both sides of every limit between two kernels, and a tail of every kind.
template <DType kDType>
void check_rows_seen() {
  for (int rows : {1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 25, 32, 33, 70}) {
    for (int64_t numel : {1, 255, 2500}) {
      const unsigned seed = static_cast<unsigned>(rows + numel);
      const Case<kDType> made(rows, numel, 0, false, seed, numel > 300);  // with NaN in row 0 only
      check_distances<kDType, 4>(made);
      if constexpr (device::kMostSide<kDType> == 8) check_distances<kDType, 8>(made);
    }
    for (int num_mixed : {1, (rows + 1) / 2, rows}) {
      for (bool is_weighted : {false, true}) {
        check_mix<kDType>(rows, num_mixed, is_weighted, false);
        check_mix<kDType>(rows, num_mixed, is_weighted, true);
      }
    }
  }
  const Case<kDType> blocks(9, 2 * kBlock + 77, 0, false, 3, true);
  check_distances<kDType, device::kMostSide<kDType>>(blocks);
}

// 1 to 16 rows, which have networks of their own sizes.
template <DType kDType, int... kLess>
void check_exact(std::integer_sequence<int, kLess...>) {
  (for_results<kDType>(kLess + 1, false, true, check_registers<kDType, kLess + 1, kLess % 2 == 0>),
   ...);
}

// Rows on more wires than they need; see padding_below.
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
    if constexpr (kDType != DType::kFloat64 && kWires <= 32) {
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
    check_any_rules<kDType, 64>(33);
    check_padded<kDType, 24>(17);
    check_padded<kDType, 32>(25);
    check_padded<kDType, 48>(33);
    check_padded<kDType, 64>(49);
    for (int rows = 65; rows <= 128; ++rows) {
      for_results<kDType>(rows, false, true, check_two_lanes<kDType, true>);
      for_results<kDType>(rows, false, false, check_two_lanes<kDType, false>);
    }
  }
  for (int rows : {1, 2, 5, 40}) {
    for (bool is_weighted : {false, true}) check_sums<kDType>(rows, is_weighted);
  }
  check_rows_seen<kDType>();
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
  loft::checks::check_parts();
  loft::checks::check_dtype<loft::DType::kFloat64>();
  loft::checks::check_dtype<loft::DType::kFloat32>();
  loft::checks::check_dtype<loft::DType::kFloat16>();
  loft::checks::check_dtype<loft::DType::kBFloat16>();
  loft::checks::expect(loft::checks::num_quick > 1000, "few mixes by a common weight");
  return loft::checks::report("device code on the host");
}
