// Layer 0. Rules, their parameters and limits: the same as loft_hvd/aggregation/rules.py, but for
// the block, the tile and the lanes, which are those of distances.py.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LOFT_HOST_DEVICE __host__ __device__
#define LOFT_INLINE __host__ __device__ __forceinline__
#else
#define LOFT_HOST_DEVICE
#define LOFT_INLINE inline __attribute__((always_inline))
#endif
#define LOFT_INLINE_LAMBDA __attribute__((always_inline))
#if defined(LOFT_SANITIZED)  // not optimised: networks of calls compile in a fifteenth of the time
#undef LOFT_INLINE
#undef LOFT_INLINE_LAMBDA
#define LOFT_INLINE inline
#define LOFT_INLINE_LAMBDA
#endif

namespace loft {

constexpr int kMaxRows = 1024;
// Coordinates that diagnostics look at or leave out together; a CPU thread takes as many at a time.
constexpr int64_t kBlock = 16 * 1024;
// Sums of squares run over so many lanes and tiles of so many coordinates, on every machine.
constexpr int kSumLanes = 16, kSumTile = 256;
constexpr int64_t kMaxTotalWeight = (int64_t{1} << 30) - 1;  // twice the total fits an int32

enum class DType : int { kFloat64 = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3 };
enum class Rule : int { kMedian = 0, kTrimmedMean = 1, kMeanAroundMedian = 2, kPhocas = 3 };
constexpr int kNumRules = 4;  // of enum Rule, whose codes are 0 to 3
enum class MedianKind : int { kMidpoint = 0, kLower = 1, kUpper = 2 };

// The mean is the trimmed mean with f = 0.
struct RuleParams {
  Rule rule = Rule::kMedian;
  MedianKind kind = MedianKind::kMidpoint;
  int f = 0;  // rows dropped a side (trimmed mean), or left out in all (mean around median, Phocas)
};

inline int size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace loft
