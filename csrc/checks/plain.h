// Layer 4. The rules once more, one coordinate at a time and in the plainest form, and jobs with
// hard values in exactly sized heap blocks: what the checks compare the kernels with. The same
// definition as loft_hvd/aggregation/reference.py. Not part of the extension.
#pragma once

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "aggregate.h"
#include "keys.h"

namespace loft::checks {

inline std::ostream& operator<<(std::ostream& out, const Job& job) {
  return out << describe(job) << ", dtype " << static_cast<int>(job.dtype) << ", rule "
             << static_cast<int>(job.params.rule) << ", kind " << static_cast<int>(job.params.kind)
             << (job.weights.empty() ? "" : ", weighted");
}

// What a program of checks has counted; the first twenty failures are printed.
inline int64_t compared = 0, failures = 0;

// Counts a result; where it is wrong prints `parts`, one behind the other.
template <typename... Parts>
void expect(bool is_right, const Parts&... parts) {
  ++compared;
  if (is_right || ++failures > 20) return;
  (std::cout << ... << parts) << std::dec << std::endl;
}

// Prints what was counted until now; returns a program's exit status.
inline int report(const std::string& what) {
  std::cout << what << ": " << compared << " results, " << failures << " differ" << std::endl;
  return failures == 0 ? 0 : 1;
}

// Sum of pairs from the middle outwards, then a binary tree that carries an odd one up. Of a to e:
// leaves c, b + d, a + e; then c + (b + d) and a + e; then the sum of those two.
template <typename V>
V plain_sum(const std::vector<V>& values) {
  const size_t half = values.size() / 2, odd = values.size() % 2;
  std::vector<V> leaves;
  if (odd) leaves.push_back(values[half]);
  for (size_t k = 0; k < half; ++k) leaves.push_back(values[half - 1 - k] + values[half + odd + k]);
  while (leaves.size() > 1) {  // a level of the tree a round
    std::vector<V> next;
    for (size_t i = 0; i + 1 < leaves.size(); i += 2) next.push_back(leaves[i] + leaves[i + 1]);
    if (leaves.size() % 2) next.push_back(leaves.back());
    leaves = next;
  }
  return leaves[0];
}

// The values of one coordinate in ascending order, NaN last, and the weights of their rows.
template <typename V>
struct Ranked {
  std::vector<V> values;
  std::vector<int64_t> weights;
};

// The mean of `count` ranks from `first` on, weighted or not. A sum that overflows although all
// values are finite is formed once more of values times 2^-64. The mean never leaves their range.
template <typename V>
V plain_mean(const Ranked<V>& ranked, size_t first, size_t count, bool by_weight) {
  std::vector<V> products;
  std::vector<double> scaled;  // for a sum that overflows
  int64_t total = 0;
  V low = ranked.values[first], high = low;
  for (size_t i = first; i < first + count; ++i) {
    const int64_t weight = by_weight ? ranked.weights[i] : 1;
    const V value = ranked.values[i];
    total += weight;
    products.push_back(value * static_cast<V>(weight));
    scaled.push_back(std::ldexp(static_cast<double>(value), -64) * static_cast<double>(weight));
    if (!(value >= low)) low = value;  // NaN stays
    if (!(value <= high)) high = value;
  }
  const V sum = plain_sum(products);
  V mean = sum / static_cast<V>(total);
  if (!std::isfinite(sum) && std::isfinite(low) && std::isfinite(high)) {
    mean = static_cast<V>(std::ldexp(plain_sum(scaled) / static_cast<double>(total), 64));
  }
  if (mean < low) mean = low;
  return mean > high ? high : mean;
}

// A result and the window of values that were kept for it.
template <typename V>
struct Kept {
  V result, low, high;
};

// The middle rank, or what `kind` makes of the two that share the middle.
template <typename V>
Kept<V> plain_median(const Ranked<V>& ranked, MedianKind kind, bool by_weight) {
  const size_t rows = ranked.values.size();
  size_t first = (rows - 1) / 2, last = rows / 2;  // the middle two ranks, which may be one
  if (by_weight) {
    int64_t total = 0, below = 0;
    for (int64_t weight : ranked.weights) total += weight;
    first = last = rows;
    for (size_t i = 0; i < rows; ++i) {
      below += ranked.weights[i];
      if (first == rows && 2 * below >= total) first = i;
      if (last == rows && 2 * below > total) last = i;
    }
  }
  const V lower = ranked.values[first], upper = ranked.values[last];
  if (kind == MedianKind::kLower || lower == upper) return {lower, lower, upper};
  const bool is_upper = kind == MedianKind::kUpper || first == last;
  return {is_upper ? upper : lower / 2 + upper / 2, lower, upper};
}

// Any rule. Those around a centre begin with the lowest rows - f ranks and move the window up by
// one while the rank that leaves is farther from the centre than the one that enters.
template <typename V>
Kept<V> plain_rule(Ranked<V> ranked, const RuleParams& params) {
  const size_t rows = ranked.values.size(), f = static_cast<size_t>(params.f), keep = rows - f;
  if (params.rule == Rule::kMedian) return plain_median(ranked, params.kind, true);
  if (params.rule == Rule::kTrimmedMean) {
    const V mean = plain_mean(ranked, f, rows - 2 * f, true);
    return {mean, ranked.values[f], ranked.values[keep - 1]};
  }
  const V centre = params.rule == Rule::kPhocas
                       ? plain_mean(ranked, f, rows - 2 * f, false)
                       : plain_median(ranked, MedianKind::kMidpoint, false).result;
  const Ranked<V> all = ranked;
  size_t first = 0;
  for (size_t i = 0; i < f; ++i) {
    const V leaving = all.values[i], entering = all.values[i + keep];
    const bool is_tie = centre - leaving == entering - centre;  // also of two infinite distances
    const bool gives_way = is_tie && std::isinf(leaving) && std::isfinite(entering);
    if (gives_way || centre - leaving > entering - centre) {
      ranked.values[i % keep] = all.values[i + keep];
      ranked.weights[i % keep] = all.weights[i + keep];
      first = i + 1;
    }
  }
  const V mean = plain_mean(ranked, 0, keep, true);
  return {centre == centre ? mean : centre, all.values[first], all.values[first + keep - 1]};
}

// `stored` are the bits of one coordinate, a value a row.
template <DType kDType>
Kept<typename Stored<kDType>::Value> plain_kept(
    const std::vector<typename Stored<kDType>::Bits>& stored, const std::vector<int32_t>& weights,
    const RuleParams& params) {
  std::vector<std::pair<typename Stored<kDType>::Bits, int64_t>> order;
  for (size_t row = 0; row < stored.size(); ++row) {
    order.emplace_back(key_of<kDType>(stored[row]), weights.empty() ? 1 : weights[row]);
  }
  std::sort(order.begin(), order.end());  // by key, ties by weight
  Ranked<typename Stored<kDType>::Value> ranked;
  for (const auto& [key, weight] : order) {
    ranked.values.push_back(value_of<kDType>(flip_bits(key)));
    ranked.weights.push_back(weight);
  }
  return plain_rule(ranked, params);
}

// Adds what every row did in one coordinate.
template <DType kDType>
void plain_diagnose(const std::vector<typename Stored<kDType>::Bits>& stored,
                    const Kept<typename Stored<kDType>::Value>& kept, double result,
                    Diagnostics& sums) {
  ++sums.coordinates;
  for (size_t row = 0; row < stored.size(); ++row) {
    const auto value = value_of<kDType>(stored[row]);
    const bool is_nan = std::isnan(value);  // orders above +inf
    const bool is_below = value < kept.low || (std::isnan(kept.low) && !is_nan);
    const bool is_above = value > kept.high || (is_nan && !std::isnan(kept.high));
    const double distance = static_cast<double>(value) - result;
    sums.num_outside[row] += is_below || is_above;
    sums.num_non_finite[row] += !std::isfinite(value);
    if (std::isfinite(distance)) sums.squared_distance[row] += distance * distance;
  }
}

// The table of distances_cpu, [rows + 1, rows + 1], above its diagonal; other entries are 0.
template <DType kDType, typename Rows>
std::vector<double> plain_distances(const Rows& made) {
  using V = typename Stored<kDType>::Value;
  const int rows = made.job.num_rows();
  const int64_t numel = made.job.numel;
  std::vector<double> table(static_cast<size_t>((rows + 1) * (rows + 1)));
  const auto value = [&](int row, int64_t i) {  // behind the end, and of row `rows`: 0
    return row < rows && i < numel ? value_of<kDType>(made.get(row, i)) : V{0};
  };
  for (int a = 0; a < rows; ++a) {
    for (int b = a + 1; b <= rows; ++b) {
      for (int64_t block = 0; block < numel; block += kBlock) {
        double lanes[kSumLanes] = {}, sum = 0;
        for (int64_t tile = block; tile < std::min(numel, block + kBlock); tile += kSumTile) {
          for (int lane = 0; lane < kSumLanes; ++lane) {
            V squares = 0;
            for (int64_t i = tile + lane; i < tile + kSumTile; i += kSumLanes) {
              const V away = value(b, i) - value(a, i);
              squares += away * away;
            }
            lanes[lane] += static_cast<double>(squares);
          }
        }
        for (double lane : lanes) sum += lane;
        table[a * (rows + 1) + b] += sum;
      }
    }
  }
  return table;
}

// One coordinate of the mixed rows, [num_mixed]; `column` are the given rows' values.
template <typename V>
std::vector<V> plain_mixed(const std::vector<V>& column, const Matrix& matrix) {
  std::vector<V> mixed;
  for (int row = 0; row < matrix.num_mixed; ++row) {
    std::vector<V> values, weights;
    for (size_t k = 0; k < column.size(); ++k) {
      const V weight = static_cast<V>(matrix.weights[row * column.size() + k]);
      const V scale = static_cast<V>(matrix.scales[k]);
      if (weight == 0 || scale == 0) continue;
      values.push_back(scale == 1 ? column[k] : column[k] * scale);
      weights.push_back(weight);
    }
    bool is_common = true;
    for (V weight : weights) is_common = is_common && weight == weights[0];
    V sum = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      const V term = is_common ? values[k] : values[k] * weights[k];
      sum = k == 0 ? term : sum + term;
    }
    mixed.push_back(is_common && !values.empty() ? sum * weights[0] : sum);
  }
  return mixed;
}

// Weights of rows with zeros, with lines that are all the same or begin alike, and with no row; or,
// with `is_common`, lines of one weight each, as of nearest neighbours.
inline Matrix matrix_for(int rows, int num_mixed, std::mt19937& random, bool is_common = false) {
  Matrix matrix{num_mixed, {}, {}};
  const double scales[] = {1, 1, 0.3, 0, 1e-60};  // the last one is 0 for all but float64
  for (int row = 0; row < rows; ++row) matrix.scales.push_back(scales[random() % 5]);
  if (is_common) matrix.scales.back() = 1;
  for (int mixed = 0; mixed < num_mixed && is_common; ++mixed) {
    for (int row = 0; row < rows; ++row) {
      const bool is_named = row + 1 == rows || random() % 4 != 0;
      matrix.weights.push_back(is_named ? 1.0 / (1 + mixed) : 0);
    }
  }
  for (int mixed = 0; mixed < num_mixed && !is_common; ++mixed) {
    const unsigned kind = random() % 4;
    for (int row = 0; row < rows; ++row) {
      const double weight = kind == 0 ? 1.0 / rows : (random() % 1000) / 700.0 - 0.2;
      matrix.weights.push_back(kind == 3 || random() % 4 == 0 ? 0 : weight);
    }
    // Some begin as the one before does, or are the same.
    const int alike = mixed > 0 && random() % 2 ? static_cast<int>(random() % (rows + 1)) : 0;
    const auto line = matrix.weights.end() - rows;
    if (alike > 0) std::copy_n(line - rows, alike, line);
  }
  return matrix;
}

// Rows and result of one job, each in a heap block of just its size, `offset` bytes behind the
// start of a cache line. Behind the first vectors only row 0 is not finite everywhere; in a tame
// case that is NaN, nothing else.
template <DType kDType>
class Case {
 public:
  using Bits = typename Stored<kDType>::Bits;

  Case(int rows, int64_t numel, int offset, bool is_weighted, unsigned seed, bool is_tame = false)
      : bytes_(static_cast<size_t>(numel) * sizeof(Bits)), offset_(static_cast<size_t>(offset)) {
    std::mt19937 random(seed);
    job.numel = numel;
    job.dtype = kDType;
    for (int row = 0; row <= rows; ++row) {  // the last one takes the result
      blocks_.emplace_back(static_cast<char*>(::operator new(bytes_ + offset_, kLine)));
      for (int64_t i = 0; i < numel; ++i) {
        const bool is_hard = row == 0 || (i < kHard && !is_tame);
        const Bits bits = is_hard ? hard_value(random, i % 4 ? 32 : 8) : tame_value(random);
        const bool is_finite =
            (bits & std::numeric_limits<Bits>::max()) < Stored<kDType>::kInfinity;
        put(row, i, is_tame && !is_finite ? Stored<kDType>::kNaN : bits);
      }
      if (row < rows) job.rows.push_back(blocks_.back().get() + offset_);
    }
    job.out = blocks_.back().get() + offset_;
    for (int row = 0; is_weighted && row < rows; ++row) {
      job.weights.push_back(1 + static_cast<int32_t>(random() % 5));
    }
  }

  Bits get(int row, int64_t i) const {
    Bits bits;
    std::memcpy(&bits, blocks_[row].get() + offset_ + i * sizeof(Bits), sizeof(Bits));
    return bits;
  }
  Bits result(int64_t i) const { return get(job.num_rows(), i); }
  std::vector<Bits> column(int64_t i) const {
    std::vector<Bits> column;
    for (int row = 0; row < job.num_rows(); ++row) column.push_back(get(row, i));
    return column;
  }
  // Other values: draw() for each, as stored bits.
  template <typename Draw>
  void fill(const Draw& draw) {
    for (int row = 0; row < job.num_rows(); ++row) {
      for (int64_t i = 0; i < job.numel; ++i) put(row, i, static_cast<Bits>(draw()));
    }
  }
  void poison() { std::memset(job.out, 0x5a, bytes_); }

  Job job;

 private:
  static constexpr int64_t kHard = 32;
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* block) const { ::operator delete(block, kLine); }
  };

  static Bits tame_value(std::mt19937& random) {
    const float value = std::ldexp(static_cast<float>(random() % 4096) - 2048.0f,
                                   static_cast<int>(random() % 8) - 12);
    switch (random() % 16) {
      case 0: return std::numeric_limits<Bits>::min();  // -0
      case 1: return 1;                                 // the smallest subnormal
      case 2: return bits_of<kDType>(1.0f);             // ties
      default: return bits_of<kDType>(value);
    }
  }
  static Bits hard_value(std::mt19937& random, unsigned kinds) {
    const Bits sign = std::numeric_limits<Bits>::min();
    const Bits largest = Stored<kDType>::kInfinity - 1;  // the finite one
    const Bits signalling = static_cast<Bits>(Stored<kDType>::kInfinity + 1) | sign;
    const Bits hard[] = {Stored<kDType>::kNaN,
                         signalling,
                         Stored<kDType>::kInfinity,
                         Stored<kDType>::kInfinity | sign,
                         largest,
                         largest | sign};
    const size_t kind = random() % kinds;
    return kind < std::size(hard) ? hard[kind] : tame_value(random);
  }
  void put(int row, int64_t i, Bits bits) {
    std::memcpy(blocks_[row].get() + offset_ + i * sizeof(Bits), &bits, sizeof(Bits));
  }

  size_t bytes_, offset_;
  std::vector<std::unique_ptr<char[], Free>> blocks_;
};

// Every rule that `rows` rows allow, with no f, one, some and the most.
inline std::vector<RuleParams> rules_for(int rows) {
  std::vector<RuleParams> rules;
  for (int kind : {0, 1, 2}) rules.push_back({Rule::kMedian, static_cast<MedianKind>(kind), 0});
  const int most = (rows - 1) / 2;
  std::vector<int> trims{0, std::min(1, most), most / 2, most};
  trims.erase(std::unique(trims.begin(), trims.end()), trims.end());
  for (int f : trims) {
    for (Rule rule : {Rule::kTrimmedMean, Rule::kMeanAroundMedian, Rule::kPhocas}) {
      rules.push_back({rule, MedianKind::kMidpoint, f});
    }
  }
  return rules;
}

}  // namespace loft::checks
