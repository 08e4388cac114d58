// Layer 4. Every CPU kernel of every instruction set that runs here against the plain form, over
// dtypes, rules, weights, rows, lengths, alignments, threads and diagnostics; distances of rows,
// mixed rows, averages and compact messages, too. Built with sanitizers it also shows that no path
// reads or writes out of its rows or computes what C++ leaves undefined.
//
//   check_cpu [LEVEL...]                   default: all levels that run here
//   check_cpu --random NUMBER [FIRST]      so many random cases instead, each from its number

#include "checks/plain.h"
#include "levels.h"
#include "wire/messages.h"

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

bool is_same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Squared distances: bit for bit, also those that are not finite, and for any number of threads.
template <DType kDType>
void check_distances(const Case<kDType>& made, const std::string& level) {
  const size_t side = static_cast<size_t>(made.job.num_rows() + 1);
  const std::vector<double> wanted = plain_distances<kDType>(made);
  for (int threads : {1, 3}) {
    const auto found = std::make_unique<double[]>(side * side);  // exactly sized
    distances_cpu(made.job, {threads, level, nullptr, 0}, found.get());
    for (size_t i = 0; i < side * side; ++i) {
      expect(is_same(found[i], wanted[i]), level, ", ", made.job, ", ", threads,
             " threads, distance of rows ", i / side, " and ", i % side, ": ", found[i], ", not ",
             wanted[i]);
    }
  }
}

// Mixed rows, aggregated by some rules.
template <DType kDType>
void check_mix(Case<kDType>& made, int num_mixed, bool is_weighted, const std::string& level,
               const std::vector<RuleParams>& rules) {
  constexpr DType kWide = kDType == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  using V = typename Stored<kDType>::Value;
  std::mt19937 random(static_cast<unsigned>(num_mixed + 7 * made.job.num_rows()));
  const Matrix matrix = matrix_for(made.job.num_rows(), num_mixed, random);
  made.job.weights.clear();
  for (int row = 0; is_weighted && row < num_mixed; ++row) {
    made.job.weights.push_back(1 + static_cast<int32_t>(random() % 5));
  }
  for (const RuleParams& rule : rules) {
    made.job.params = rule;
    made.poison();
    Diagnostics found, wanted(made.job.rows.size());
    mix_cpu(made.job, matrix, {3, level, &found, 1});
    for (int64_t i = 0; i < made.job.numel; ++i) {
      std::vector<V> column;
      for (auto bits : made.column(i)) column.push_back(value_of<kDType>(bits));
      std::vector<typename Stored<kWide>::Bits> mixed;
      for (V value : plain_mixed(column, matrix)) {
        mixed.push_back(bit_cast<typename Stored<kWide>::Bits>(value));  // with the sign of -0
      }
      const auto kept = plain_kept<kWide>(mixed, made.job.weights, rule);
      const auto bits = result_bits<kDType>(kept.result);
      expect(made.result(i) == bits, level, ", ", num_mixed, " mixed of ", made.job,
             ", coordinate ", i, ": ", std::hex, made.result(i), ", not ", bits);
      const V infinity = std::numeric_limits<V>::infinity();
      const V nan = std::numeric_limits<V>::quiet_NaN();  // no window: it is of mixed rows
      plain_diagnose<kDType>(made.column(i), {kept.result, -infinity, nan},
                             value_of<kDType>(made.result(i)), wanted);
    }
    check_diagnostics(made.job, level, found, wanted);
  }
}

// What rules that see rows are made of.
template <DType kDType>
void check_rows_seen(const std::string& level) {
  constexpr int kValue = sizeof(typename Stored<kDType>::Bits);
  unsigned seed = 500;
  for (int rows : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 33, 40, 65}) {
    for (int64_t numel : {0, 1, 99, 300}) {
      const Case<kDType> hard(rows, numel, kValue, false, ++seed);
      check_distances(hard, level);
      Case<kDType> made(rows, numel, rows % 2 * kValue, false, ++seed, true);  // even: lines
      check_distances(made, level);
      for (int num_mixed : {1, rows / 2, rows}) {
        if (num_mixed == 0) continue;
        check_mix(made, num_mixed, num_mixed % 2 == 0, level, rules_for(num_mixed));
      }
    }
  }
  const Case<kDType> blocks(20, 4 * kBlock + 77, 0, false, 11, true);  // several threads
  check_distances(blocks, level);
  Case<kDType> long_rows(30, 3 * kBlock + 5, 0, false, 12, true);
  check_mix(long_rows, 3, true, level, rules_for(3));
}

// --- compact messages

// A message in a block of just its size comes back as the values, bit for bit; what is no message
// is refused, and nothing outside of its room is read.
template <DType kDType>
void check_compact(const Case<kDType>& made, const std::string& level, std::mt19937& random) {
  const auto* values = static_cast<const char*>(made.job.rows[0]);
  const int64_t count = made.job.numel;
  const auto bytes = static_cast<size_t>(count) * sizeof(typename Stored<kDType>::Bits);
  std::vector<char> room(static_cast<size_t>(compact_room(count, kDType)));
  const int64_t length = compact_cpu(values, count, kDType, room.data(), level);
  expect(length <= static_cast<int64_t>(room.size()), level, ": ", length, " bytes of ", count,
         " values, in a room of ", room.size());
  const auto back = std::make_unique<char[]>(bytes);
  const auto expands = [&](const std::vector<char>& message) {
    const auto exact = std::make_unique<char[]>(message.size());
    std::copy(message.begin(), message.end(), exact.get());
    return expand_cpu(exact.get(), static_cast<int64_t>(message.size()), back.get(), count, kDType,
                      level);
  };
  const std::vector<char> message(room.begin(), room.begin() + length);
  expect(expands(message) && std::memcmp(back.get(), values, bytes) == 0, level, ", ", made.job,
         ": other values come back");
  // The same length in fewer bytes; then a shorter message, and a byte of the message changed.
  expect(!expands({message.begin(), message.end() - 1}), level, ", ", made.job, ": a byte is gone");
  for (int turn = 0; turn < 8; ++turn) {
    std::vector<char> wrong = message;
    const int64_t shorter = static_cast<int64_t>(random() % static_cast<size_t>(length));
    if (turn % 2) std::memcpy(wrong.data(), &shorter, sizeof(shorter));
    if (turn % 2) wrong.resize(std::max(sizeof(shorter), static_cast<size_t>(shorter)));
    if (turn % 2 == 0) wrong[random() % wrong.size()] ^= static_cast<char>(1 << random() % 8);
    const bool is_read = expands(wrong);
    if (turn % 2) expect(!is_read, level, ", ", made.job, ": ", shorter, " bytes are enough");
  }
}

template <DType kDType>
void check_messages(const std::string& level) {
  using Bits = typename Stored<kDType>::Bits;
  std::mt19937 random(600);
  for (int64_t count : {0, 1, 511, 512, 513, 1024, 5 * 512 + 77, 40'000}) {
    for (int offset : {0, static_cast<int>(sizeof(Bits))}) {
      const auto seed = static_cast<unsigned>(count + offset);
      check_compact(Case<kDType>(1, count, offset, false, seed), level, random);
      Case<kDType> made(2, count, offset, false, seed, true);
      made.fill([&] { return uint64_t{random()} << 32 | random(); });  // any bits
      check_compact(made, level, random);
      // Few exponents; those of zeros among them; one only.
      for (int halvings : {6, 20, 0}) {
        made.fill([&] {
          const bool is_zero = halvings == 20 && random() % 2;
          const int by = halvings == 0 ? 0 : static_cast<int>(random() % halvings);
          const float value = 1.0f + static_cast<float>(random() % 1000) / 1001.0f;
          return is_zero ? Bits{0} : bits_of<kDType>(std::ldexp(value, -by));
        });
        check_compact(made, level, random);
      }
    }
  }
}

// --- averages over time

// A gradient into an average, by one thread and by three: the average becomes what comes out if all
// of that is finite, else it stays. One value before each, so that none is aligned.
template <typename T>
void check_absorb(DType dtype, const std::string& level) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const double gain = 0.3, keep = 0.7;
  std::mt19937 random(700);
  for (int64_t count : {int64_t{1}, int64_t{7}, int64_t{33}, kBlock + 5, int64_t{600'001}}) {
    const auto size = static_cast<size_t>(count), bytes = size * sizeof(T);
    std::vector<T> gradient(size + 1), before(size + 1);
    for (T& value : gradient) value = static_cast<T>(random() % 2001) / T{7} - T{140};
    for (T& value : before) value = static_cast<T>(random() % 2001) / T{9} - T{110};
    enum Kind { kFinite, kNoGradient, kInPlace, kFirst, kMiddle, kLast };  // of infinite ones
    for (Kind kind : {kFinite, kNoGradient, kInPlace, kFirst, kMiddle, kLast}) {
      std::vector<T> given = gradient, average = before, apart(size + 1), wanted(size + 1);
      const size_t places[] = {1, (size + 1) / 2, size};
      if (kind >= kFirst) given[places[kind - kFirst]] = random() % 2 ? kInfinity : -kInfinity;
      for (size_t i = 1; i <= size; ++i) {
        const T own = kind == kNoGradient ? T{0} : given[i] * static_cast<T>(gain);
        wanted[i] = own + average[i] * static_cast<T>(keep);
      }
      const T* const from = kind == kNoGradient ? nullptr : given.data() + 1;
      T* const out = (kind == kInPlace ? given : apart).data() + 1;
      const AverageUpdate what{from, average.data() + 1, out, count, dtype, gain, keep};
      const bool is_kept = absorb_cpu(what, {kind == kFinite ? 1 : 3, level, nullptr, 0});
      const std::vector<T>& then = kind >= kFirst ? before : wanted;
      expect(is_kept == (kind < kFirst) && std::memcmp(out, wanted.data() + 1, bytes) == 0 &&
                 std::memcmp(average.data() + 1, then.data() + 1, bytes) == 0,
             level, ": ", count, " values into an average, kind ", int{kind}, ", kept ", is_kept);
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
  check_rows_seen<kDType>(level);
}

void check_level(const std::string& level) {
  check_messages<DType::kFloat32>(level);
  check_messages<DType::kFloat16>(level);
  check_messages<DType::kBFloat16>(level);
  check_absorb<double>(DType::kFloat64, level);
  check_absorb<float>(DType::kFloat32, level);
  check_dtype<DType::kFloat64>(level);
  check_dtype<DType::kFloat32>(level);
  check_dtype<DType::kFloat16>(level);
  check_dtype<DType::kBFloat16>(level);
  Case<DType::kFloat32> made(5, 1'037, 4, false, 9);  // the pass, for the sanitizers
  for (bool in_bursts : {false, true}) pass_cpu(made.job, {1, level, nullptr, 0}, in_bursts);
}

// --- random cases

RuleParams random_rule(int rows, std::mt19937& random) {
  const auto rule = static_cast<Rule>(random() % kNumRules);
  const auto kind = static_cast<MedianKind>(random() % 3);
  if (rule == Rule::kMedian) return {rule, kind, 0};
  return {rule, MedianKind::kMidpoint, static_cast<int>(random() % ((rows + 1) / 2))};
}

// Few rows and values mostly, as most paths are short; sometimes many of either.
int random_rows(std::mt19937& random) {
  if (random() % 100 == 0) return 65 + static_cast<int>(random() % 300);
  return 1 + static_cast<int>(random() % (random() % 2 ? 9 : 64));
}
int64_t random_numel(int rows, std::mt19937& random) {
  if (random() % 4000 == 0) return random() % 99'000;  // several blocks and threads
  if (random() % 500 == 0) return random() % (20'000 / (1 + rows / 8));
  return random() % (random() % 10 == 0 ? 700 : 70);
}

template <DType kDType>
void check_random(const std::string& level, std::mt19937& random) {
  using Bits = typename Stored<kDType>::Bits;
  const unsigned what = random() % 8, values = random() % 4;
  const int rows = what == 7 ? 1 + static_cast<int>(random() % 20) : random_rows(random);
  const int64_t numel = random_numel(rows, random);
  const int offset = static_cast<int>(random() % 9 * sizeof(Bits));
  const bool is_weighted = random() % 2, is_tame = values == 0;
  Case<kDType> made(rows, numel, offset, is_weighted && what < 6, random(), is_tame);
  if (values == 2) made.fill([&] { return uint64_t{random()} << 32 | random(); });  // any bits
  const Bits minus_0 = std::numeric_limits<Bits>::min();
  const Bits ties[] = {bits_of<kDType>(-1.0f), minus_0, 0, bits_of<kDType>(1.0f)};
  if (values == 3) made.fill([&] { return ties[random() % 4]; });
  if constexpr (kDType != DType::kFloat64) {
    if (random() % 8 == 0) check_compact(made, level, random);
  }
  if (what == 6) return check_distances(made, level);
  if (what == 7) {
    const int num_mixed = 1 + static_cast<int>(random() % rows);
    const std::vector<RuleParams> rules{random_rule(num_mixed, random)};
    return check_mix(made, num_mixed, is_weighted, level, rules);
  }
  made.job.params = random_rule(rows, random);
  const int threads = 1 + static_cast<int>(random() % 3);
  check_case(made, level, threads, random() % 2);
}

void check_randomly(int64_t number, int64_t first) {
  const std::vector<std::string> levels = isa_levels();
  for (int64_t seed = first; seed < first + number; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const std::string level = levels[random() % levels.size()];
    const int64_t before = failures;
    switch (static_cast<DType>(random() % 4)) {
      case DType::kFloat64: check_random<DType::kFloat64>(level, random); break;
      case DType::kFloat32: check_random<DType::kFloat32>(level, random); break;
      case DType::kFloat16: check_random<DType::kFloat16>(level, random); break;
      case DType::kBFloat16: check_random<DType::kBFloat16>(level, random); break;
    }
    if (failures != before) std::cout << "in case " << seed << std::endl;
  }
}

}  // namespace
}  // namespace loft::checks

int main(int argc, char** argv) {
  std::vector<std::string> levels(argv + 1, argv + argc);
  if (levels.size() > 1 && levels[0] == "--random") {
    const int64_t first = levels.size() > 2 ? std::stoll(levels[2]) : 0;
    loft::checks::check_randomly(std::stoll(levels[1]), first);
    return loft::checks::report(levels[1] + " cases from " + std::to_string(first));
  }
  if (levels.empty()) levels = loft::isa_levels();
  int status = 0;
  for (const std::string& level : levels) {
    loft::checks::check_level(level);
    status = loft::checks::report(level);
  }
  return status;
}
