// The kernels of whale_ops/gpu as host code, which driver.cc launches.
#include <cstring>

#include "whale_ops/core/collective/reduce.h"

#define __global__ WHALE_EXPORT
#define __launch_bounds__(threads)
#define WHALE_ARGUMENT(Type) const Type&  // the driver has its address
#define WHALE_INLINE inline
#define WHALE_ROLLED

extern "C" {
struct Dim3 {
  unsigned x, y, z;
};
WHALE_EXPORT Dim3 gridDim, blockDim, blockIdx, threadIdx;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

namespace whale::cuda {
inline float widen_half(unsigned short x) {
  float wide = 0;
  whale::widen_floats(DType::kFloat16, reinterpret_cast<const char*>(&x), &wide, 1);
  return wide;
}
inline unsigned short round_to_half(float x) {
  unsigned short narrow = 0;
  whale::narrow_floats(DType::kFloat16, &x, reinterpret_cast<char*>(&narrow), 1);
  return narrow;
}
}  // namespace whale::cuda

#include "whale_ops/gpu/kernels.cu"

extern "C" {
WHALE_EXPORT size_t copy_argument_bytes = sizeof(whale::cuda::CopyArguments);
WHALE_EXPORT size_t reduce_argument_bytes = sizeof(whale::cuda::ReduceArguments);
}
