// The kernels of whale_ops/cuda as host code (by the headers beside this), for tests/whale_ops/device/test_kernels.py: no part of the core's test.
#include "whale_ops/cuda/kernels.cu"

#include <vector>

namespace {

std::vector<whale::cuda::Span> spans(void** tensors, const int64_t* counts, int size) {
  std::vector<whale::cuda::Span> found;
  for (int i = 0; i < size; ++i) found.push_back({tensors[i], counts[i]});
  return found;
}

}  // namespace

extern "C" {

WHALE_EXPORT int host_pack(void** tensors, const int64_t* counts, int size, int tensor, void* buffer, int dtype, float scale) {
  return whale::cuda::pack(spans(tensors, counts, size), static_cast<whale::DType>(tensor), buffer, static_cast<whale::DType>(dtype), scale, nullptr);
}

WHALE_EXPORT int host_unpack(void** tensors, const int64_t* counts, int size, int tensor, void* buffer, int dtype, float scale) {
  return whale::cuda::unpack(buffer, static_cast<whale::DType>(dtype), spans(tensors, counts, size), static_cast<whale::DType>(tensor), scale, nullptr);
}

WHALE_EXPORT int host_reduce(void** sources, int size, void* dst, int64_t count, int dtype, int reduction) {
  const std::vector<const void*> all(sources, sources + size);
  return whale::cuda::reduce(all, dst, count, static_cast<whale::DType>(dtype), static_cast<whale::Reduction>(reduction), nullptr);
}

}  // extern "C"
