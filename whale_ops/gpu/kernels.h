// Launches of the kernels that put tensors into one buffer, take them out of it, and add the
// buffers of several ranks (kernels.cu).
#pragma once

#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

// A tensor in device memory: `count` elements.
struct Span {
  void* data = nullptr;
  int64_t count = 0;
};

// Names of all kernels.
std::vector<std::string> kernel_names();

// Bytes of an element; 0 for dtypes without kernels.
size_t bytes_of(DType dtype);

// Whether the kernels support this pair: equal float dtypes, or float32 tensors with a float16 or
// bfloat16 buffer.
bool is_supported(DType tensor, DType buffer);

// The following need the GPU's context to be current.
//
// buffer = the tensors one after the other, multiplied by `scale`, rounded to the buffer's dtype.

// buffer = the tensors one after the other, times `scale`, rounded to the buffer's dtype.
Status pack(const Gpu& gpu, const std::vector<Span>& tensors, DType tensor, void* buffer,
            DType dtype, float scale, CUstream stream);
// The reverse of pack(); also multiplies by `scale`.
Status unpack(const Gpu& gpu, const void* buffer, DType dtype, const std::vector<Span>& tensors,
              DType tensor, float scale, CUstream stream);
// dst = sources[0] (op) sources[1] ... in this order, for `count` elements; 16-bit floats are
// rounded once.
Status reduce(const Gpu& gpu, const std::vector<const void*>& sources, void* dst, int64_t count,
              DType dtype, Reduction reduction, CUstream stream);

}  // namespace whale::cuda
