// Kernels that put tensors into one buffer, take them out of it, and add the buffers of several
// ranks; a thread takes 16 bytes at a time where all addresses allow it. NVRTC compiles this for
// the very GPU (whale_ops/device_code.py), without any of CUDA's headers; tests compile it as host
// code (tests/host_gpu).
#include "whale_ops/gpu/kernel_arguments.h"

#ifdef __CUDACC__
#define WHALE_ARGUMENT(Type) const Type  // travels with the launch
#define WHALE_INLINE __device__ __forceinline__
// Blocks are many: longer code gains nothing, and takes the compiler seconds.
#define WHALE_ROLLED _Pragma("unroll 1")

namespace whale::cuda {
WHALE_INLINE float widen_half(unsigned short x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
}
WHALE_INLINE unsigned short round_to_half(float x) {
  unsigned short narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
  return narrow;
}
}  // namespace whale::cuda
#endif

namespace whale::cuda {

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

// 16-bit floats are computed with in float32.
WHALE_INLINE double widen(double x) { return x; }
WHALE_INLINE float widen(float x) { return x; }
WHALE_INLINE float widen(Half x) { return widen_half(x.bits); }
WHALE_INLINE float widen(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

WHALE_INLINE void narrow(double x, double* to) { *to = x; }
WHALE_INLINE void narrow(float x, float* to) { *to = x; }
WHALE_INLINE void narrow(float x, Half* to) { to->bits = round_to_half(x); }
// To the nearest, and to the even one of two. Not all GPUs have an instruction for it.
WHALE_INLINE void narrow(float x, BFloat16* to) {
  const unsigned bits = __float_as_uint(x);
  to->bits =
      static_cast<unsigned short>(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <typename T, int kSize>
struct alignas(16) Vector {
  T at[kSize];
};

// As many as fill 16 bytes of the narrower type.
template <typename A, typename B = A>
constexpr int kElementsAtATime =
    16 / static_cast<int>(sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));

WHALE_INLINE bool is_aligned(const void* data) {
  return reinterpret_cast<unsigned long long>(data) % 16 == 0;
}
WHALE_INLINE long long first_of_thread() {
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}
WHALE_INLINE long long threads_of_grid() { return static_cast<long long>(gridDim.x) * blockDim.x; }

template <typename From, typename To>
WHALE_INLINE void copy_scaled(const From* from, To* to, long long count, float scale) {
  constexpr int kSize = kElementsAtATime<From, To>;
  const long long vectors = is_aligned(from) && is_aligned(to) ? count / kSize : 0;
  WHALE_ROLLED
  for (long long i = first_of_thread(); i < vectors; i += threads_of_grid()) {
    const Vector<From, kSize> in = reinterpret_cast<const Vector<From, kSize>*>(from)[i];
    Vector<To, kSize> out;
    for (int j = 0; j < kSize; ++j) narrow(widen(in.at[j]) * scale, &out.at[j]);
    reinterpret_cast<Vector<To, kSize>*>(to)[i] = out;
  }
  WHALE_ROLLED
  for (long long i = vectors * kSize + first_of_thread(); i < count; i += threads_of_grid())
    narrow(widen(from[i]) * scale, &to[i]);
}

struct Sum {
  template <typename A>
  static WHALE_INLINE A combine(A a, A b) {
    return a + b;
  }
};
struct Prod {
  template <typename A>
  static WHALE_INLINE A combine(A a, A b) {
    return a * b;
  }
};
struct Min {  // NaN wins
  template <typename A>
  static WHALE_INLINE A combine(A a, A b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <typename A>
  static WHALE_INLINE A combine(A a, A b) {
    return a > b || a != a ? a : b;
  }
};

template <typename Reduction, typename T, int kSize>
WHALE_INLINE void reduce_at(const void* const* sources, int size, void* dst, long long i) {
  Vector<T, kSize> next = static_cast<const Vector<T, kSize>*>(sources[0])[i];
  decltype(widen(T{})) totals[kSize];
  for (int j = 0; j < kSize; ++j) totals[j] = widen(next.at[j]);
  for (int s = 1; s < size; ++s) {
    next = static_cast<const Vector<T, kSize>*>(sources[s])[i];
    for (int j = 0; j < kSize; ++j) totals[j] = Reduction::combine(totals[j], widen(next.at[j]));
  }
  for (int j = 0; j < kSize; ++j) narrow(totals[j], &next.at[j]);
  static_cast<Vector<T, kSize>*>(dst)[i] = next;
}

// The sources in their order; 16-bit floats are rounded once.
template <typename Reduction, typename T>
WHALE_INLINE void reduce_all(const void* const* sources, int size, T* dst, long long count) {
  constexpr int kSize = kElementsAtATime<T>;
  bool aligned = is_aligned(dst);
  WHALE_ROLLED
  for (int s = 0; s < size; ++s) aligned = aligned && is_aligned(sources[s]);
  const long long vectors = aligned ? count / kSize : 0;
  WHALE_ROLLED
  for (long long i = first_of_thread(); i < vectors; i += threads_of_grid())
    reduce_at<Reduction, T, kSize>(sources, size, dst, i);
  WHALE_ROLLED
  for (long long i = vectors * kSize + first_of_thread(); i < count; i += threads_of_grid()) {
    auto total = widen(static_cast<const T*>(sources[0])[i]);
    WHALE_ROLLED
    for (int s = 1; s < size; ++s)
      total = Reduction::combine(total, widen(static_cast<const T*>(sources[s])[i]));
    narrow(total, &dst[i]);
  }
}

}  // namespace whale::cuda

// Names as of kernel_names() in kernels.cc.
#define WHALE_COPIES(tensor, buffer_type, Tensor, Buffer)                                 \
  extern "C" __global__ void __launch_bounds__(whale::cuda::kThreads)                     \
      pack_##tensor##_##buffer_type(WHALE_ARGUMENT(whale::cuda::CopyArguments) it) {      \
    const whale::cuda::Piece piece = it.pieces[blockIdx.y];                               \
    whale::cuda::copy_scaled(static_cast<const Tensor*>(piece.data),                      \
                             static_cast<Buffer*>(it.buffer) + piece.offset, piece.count, \
                             it.scale);                                                   \
  }                                                                                       \
  extern "C" __global__ void __launch_bounds__(whale::cuda::kThreads)                     \
      unpack_##tensor##_##buffer_type(WHALE_ARGUMENT(whale::cuda::CopyArguments) it) {    \
    const whale::cuda::Piece piece = it.pieces[blockIdx.y];                               \
    whale::cuda::copy_scaled(static_cast<const Buffer*>(it.buffer) + piece.offset,        \
                             static_cast<Tensor*>(piece.data), piece.count, it.scale);    \
  }

#define WHALE_REDUCE(reduction, dtype, Reduction, T)                                       \
  extern "C" __global__ void __launch_bounds__(whale::cuda::kThreads)                      \
      reduce_##reduction##_##dtype(WHALE_ARGUMENT(whale::cuda::ReduceArguments) it) {      \
    whale::cuda::reduce_all<whale::cuda::Reduction, T>(it.sources, it.size,                \
                                                       static_cast<T*>(it.dst), it.count); \
  }

#define WHALE_REDUCES(dtype, T)      \
  WHALE_REDUCE(sum, dtype, Sum, T)   \
  WHALE_REDUCE(prod, dtype, Prod, T) \
  WHALE_REDUCE(min, dtype, Min, T)   \
  WHALE_REDUCE(max, dtype, Max, T)

WHALE_COPIES(float16, float16, whale::cuda::Half, whale::cuda::Half)
WHALE_COPIES(bfloat16, bfloat16, whale::cuda::BFloat16, whale::cuda::BFloat16)
WHALE_COPIES(float32, float32, float, float)
WHALE_COPIES(float64, float64, double, double)
WHALE_COPIES(float32, float16, float, whale::cuda::Half)
WHALE_COPIES(float32, bfloat16, float, whale::cuda::BFloat16)

WHALE_REDUCES(float16, whale::cuda::Half)
WHALE_REDUCES(bfloat16, whale::cuda::BFloat16)
WHALE_REDUCES(float32, float)
WHALE_REDUCES(float64, double)
