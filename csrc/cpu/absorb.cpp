// Layer 2. A gradient into its average over time, on the vectors of one instruction set.
//
// One product of the gradient and one of the average, which are then added, each rounded to the
// type of the values: the same bits at every level. Plain torch (loft_hvd/pipeline/momentum.py) may
// round a product and a sum at once. One pass, where torch needs three: a product, a sum, and a
// look at what is finite.

#include "cpu/dispatch.h"
#include "cpu/vectors.h"

namespace loft::LOFT_ISA {
namespace {

template <typename T, bool kHasGradient>
bool absorb_of(const Absorbed& what, int64_t begin, int64_t end) {
  using V = Vector<T>;
  constexpr int64_t kLanes = kVectorBytes / sizeof(T);
  const T gain = static_cast<T>(what.gain), keep = static_cast<T>(what.keep);
  // x - x is 0 where x is finite, else NaN, which stays in every sum.
  V lost{};
  T lost_last = 0;
  const auto add = [&](auto& sum, int64_t at) {
    using Values = std::remove_reference_t<decltype(sum)>;
    const int64_t byte = at * static_cast<int64_t>(sizeof(T));
    Values made{};
    if constexpr (kHasGradient) made = load<Values>(what.gradient + byte) * gain;
    made = made + load<Values>(what.average + byte) * keep;
    store(what.out + byte, made);
    sum += made - made;
  };
  int64_t at = begin;
  for (; at + kLanes <= end; at += kLanes) add(lost, at);
  for (; at < end; ++at) add(lost_last, at);
  return !any_lane(lost != lost) && lost_last == lost_last;
}

template <typename T>
bool absorb_as(const Absorbed& what, int64_t begin, int64_t end) {
  return what.gradient ? absorb_of<T, true>(what, begin, end)
                       : absorb_of<T, false>(what, begin, end);
}

}  // namespace

bool absorb(DType dtype, const Absorbed& what, int64_t begin, int64_t end) {
  return dtype == DType::kFloat64 ? absorb_as<double>(what, begin, end)
                                  : absorb_as<float>(what, begin, end);
}

}  // namespace loft::LOFT_ISA
