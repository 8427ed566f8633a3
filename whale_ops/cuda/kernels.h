// Kernels that put tensors into one buffer, take them out of it, and add the buffers of several ranks.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale::cuda {

// A tensor in device memory: `count` elements.
struct Span {
  void* data = nullptr;
  int64_t count = 0;
};

// Whether the kernels know the pair: equal float dtypes, or float32 tensors with a float16 or bfloat16 buffer.
bool is_supported(DType tensor, DType buffer);

// buffer = the tensors one after the other, times `scale`, rounded to the buffer's dtype.
cudaError_t pack(const std::vector<Span>& tensors, DType tensor, void* buffer, DType dtype, float scale, cudaStream_t stream);
// The other way; `scale` again.
cudaError_t unpack(const void* buffer, DType dtype, const std::vector<Span>& tensors, DType tensor, float scale, cudaStream_t stream);
// dst = sources[0] (op) sources[1] ... in this order, for `count` elements; 16-bit floats are rounded once.
cudaError_t reduce(const std::vector<const void*>& sources, void* dst, int64_t count, DType dtype, Reduction reduction,
                   cudaStream_t stream);

}  // namespace whale::cuda
