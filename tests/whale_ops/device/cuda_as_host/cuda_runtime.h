// As much of CUDA as whale_ops/cuda/kernels.cu takes, for a compiler of the host: a launch runs the kernel for one thread after the other.
#pragma once

#include <cstdint>

#define __global__
#define __device__

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}  // NOLINT: as CUDA's
};

inline dim3 gridDim = {0}, blockDim = {0}, blockIdx = {0}, threadIdx = {0};

template <typename Kernel, typename... Arguments>
void launch_on_host(dim3 grid, dim3 block, Kernel kernel, Arguments... arguments) {
  gridDim = grid;
  blockDim = block;
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(arguments...);
    }
  }
}

#define WHALE_LAUNCH(grid, threads, stream, kernel, ...) launch_on_host(grid, threads, kernel, __VA_ARGS__)
