// Layer 4. In place of the AVX-512 kernels in builds with sanitizers, which run the other levels.

#include <stdexcept>

#include "cpu/dispatch.h"

namespace loft {
namespace avx512 {

const KernelTable& kernels() {
  throw std::invalid_argument("builds with sanitizers have no AVX-512 kernels; use isa=avx2");
}

}  // namespace avx512
}  // namespace loft
