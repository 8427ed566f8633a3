#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "whale_ops/cuda/kernels.h"

#ifndef WHALE_LAUNCH  // tests compile this file as host code, and launch otherwise
#define WHALE_LAUNCH(grid, threads, stream, kernel, ...) kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace whale::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;  // per tensor; a thread takes several elements of a large one
constexpr int kPieces = 128;      // of one launch: they travel as the kernel's argument, which may have 4 KB
constexpr int kMaxSources = 64;

// A tensor and where it lies in the buffer.
struct Piece {
  void* data;
  int64_t offset;
  int64_t count;
};

struct Pieces {
  Piece at[kPieces];
};

struct Sources {
  const void* at[kMaxSources];
};

// 16-bit floats are computed with in float32.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ Wide<T> widen(T x) {
  return static_cast<Wide<T>>(x);
}

template <bool kPack, typename Tensor, typename Buffer>
__global__ void copy(const Pieces pieces, Buffer* buffer, float scale) {
  const Piece piece = pieces.at[blockIdx.y];
  auto* tensor = static_cast<Tensor*>(piece.data);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < piece.count; i += stride) {
    if constexpr (kPack) {
      buffer[piece.offset + i] = static_cast<Buffer>(widen(tensor[i]) * scale);
    } else {
      tensor[i] = static_cast<Tensor>(widen(buffer[piece.offset + i]) * scale);
    }
  }
}

template <Reduction R, typename A>
__device__ A combine(A a, A b) {
  if constexpr (R == Reduction::kSum) return a + b;
  if constexpr (R == Reduction::kProd) return a * b;
  if constexpr (R == Reduction::kMin) return a < b || a != a ? a : b;  // NaN wins
  if constexpr (R == Reduction::kMax) return a > b || a != a ? a : b;
}

template <Reduction R, typename T>
__global__ void reduce_all(const Sources sources, int count_of_sources, T* dst, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    Wide<T> total = widen(static_cast<const T*>(sources.at[0])[i]);
    for (int s = 1; s < count_of_sources; ++s) total = combine<R>(total, widen(static_cast<const T*>(sources.at[s])[i]));
    dst[i] = static_cast<T>(total);
  }
}

int blocks_for(int64_t count) { return static_cast<int>(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks)); }

template <bool kPack, typename Tensor, typename Buffer>
cudaError_t copy_all(const std::vector<Span>& tensors, void* buffer, float scale, cudaStream_t stream) {
  int64_t offset = 0;
  for (size_t begin = 0; begin < tensors.size(); begin += kPieces) {
    const size_t end = std::min(begin + kPieces, tensors.size());
    Pieces pieces = {};
    int64_t largest = 0;
    for (size_t i = begin; i < end; ++i) {
      pieces.at[i - begin] = {tensors[i].data, offset, tensors[i].count};
      offset += tensors[i].count;
      largest = std::max(largest, tensors[i].count);
    }
    const dim3 grid(blocks_for(largest), static_cast<unsigned>(end - begin));
    WHALE_LAUNCH(grid, kThreads, stream, (copy<kPack, Tensor, Buffer>), pieces, static_cast<Buffer*>(buffer), scale);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <bool kPack>
cudaError_t copy_typed(const std::vector<Span>& tensors, DType tensor, void* buffer, DType dtype, float scale, cudaStream_t stream) {
  if (!is_supported(tensor, dtype)) return cudaErrorInvalidValue;
  if (tensor == DType::kFloat64) return copy_all<kPack, double, double>(tensors, buffer, scale, stream);
  if (tensor == DType::kFloat16) return copy_all<kPack, __half, __half>(tensors, buffer, scale, stream);
  if (tensor == DType::kBFloat16) return copy_all<kPack, __nv_bfloat16, __nv_bfloat16>(tensors, buffer, scale, stream);
  if (dtype == DType::kFloat16) return copy_all<kPack, float, __half>(tensors, buffer, scale, stream);
  if (dtype == DType::kBFloat16) return copy_all<kPack, float, __nv_bfloat16>(tensors, buffer, scale, stream);
  return copy_all<kPack, float, float>(tensors, buffer, scale, stream);
}

template <typename T>
cudaError_t reduce_typed(const Sources& sources, int size, void* dst, int64_t count, Reduction reduction, cudaStream_t stream) {
  auto* out = static_cast<T*>(dst);
  const int blocks = blocks_for(count);
  switch (reduction) {
    case Reduction::kSum: WHALE_LAUNCH(blocks, kThreads, stream, (reduce_all<Reduction::kSum, T>), sources, size, out, count); break;
    case Reduction::kProd: WHALE_LAUNCH(blocks, kThreads, stream, (reduce_all<Reduction::kProd, T>), sources, size, out, count); break;
    case Reduction::kMin: WHALE_LAUNCH(blocks, kThreads, stream, (reduce_all<Reduction::kMin, T>), sources, size, out, count); break;
    case Reduction::kMax: WHALE_LAUNCH(blocks, kThreads, stream, (reduce_all<Reduction::kMax, T>), sources, size, out, count); break;
  }
  return cudaGetLastError();
}

}  // namespace

bool is_supported(DType tensor, DType buffer) {
  const bool narrow = buffer == DType::kFloat16 || buffer == DType::kBFloat16;
  if (tensor == DType::kFloat32) return narrow || buffer == tensor;
  return tensor == buffer && (narrow || tensor == DType::kFloat64);
}

cudaError_t pack(const std::vector<Span>& tensors, DType tensor, void* buffer, DType dtype, float scale, cudaStream_t stream) {
  return copy_typed<true>(tensors, tensor, buffer, dtype, scale, stream);
}

cudaError_t unpack(const void* buffer, DType dtype, const std::vector<Span>& tensors, DType tensor, float scale, cudaStream_t stream) {
  return copy_typed<false>(tensors, tensor, const_cast<void*>(buffer), dtype, scale, stream);
}

cudaError_t reduce(const std::vector<const void*>& sources, void* dst, int64_t count, DType dtype, Reduction reduction,
                   cudaStream_t stream) {
  if (sources.empty() || sources.size() > kMaxSources) return cudaErrorInvalidValue;
  Sources all = {};
  std::copy(sources.begin(), sources.end(), all.at);
  const int size = static_cast<int>(sources.size());
  switch (dtype) {
    case DType::kFloat16: return reduce_typed<__half>(all, size, dst, count, reduction, stream);
    case DType::kBFloat16: return reduce_typed<__nv_bfloat16>(all, size, dst, count, reduction, stream);
    case DType::kFloat32: return reduce_typed<float>(all, size, dst, count, reduction, stream);
    case DType::kFloat64: return reduce_typed<double>(all, size, dst, count, reduction, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace whale::cuda
