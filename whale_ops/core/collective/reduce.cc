#include "whale_ops/core/collective/reduce.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#include "whale_ops/core/base/bits.h"

namespace whale {
namespace {

// Storage types of the 16-bit floats; the bit patterns are IEEE binary16 and bfloat16.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline float widen(Half x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & (0x1fu << 23);
  uint32_t bits = magnitude + ((127u - 15u) << 23);
  if (exponent == (0x1fu << 23)) {
    bits += (128u - 16u) << 23;  // infinity and NaN keep an all-ones exponent
  } else if (exponent == 0) {
    // Subnormal: the subtraction renormalises the number.
    bits = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
  }
  return float_of(bits | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

inline void narrow(float value, BFloat16* out) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // a NaN must not round to infinity
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void narrow(float value, Half* out) {
  uint32_t bits = bits_of(value);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t half;
  if (bits >= ((127u + 16u) << 23)) {
    half = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < (113u << 23)) {
    // Subnormal or zero: adding this constant makes the FPU shift the mantissa and round it to
    // nearest even.
    const uint32_t magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    half = bits_of(float_of(bits) + float_of(magic)) - magic;
  } else {
    const uint32_t odd = (bits >> 13) & 1u;
    half = (bits + ((15u - 127u) << 23) + 0xfffu + odd) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | (sign >> 16));
}

template <typename T>
inline T widen(T x) {
  return x;
}
template <typename T>
inline void narrow(T value, T* out) {
  *out = value;
}

template <typename T>
using Accumulator = decltype(widen(std::declval<T>()));

template <typename T>
inline T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <typename T>
inline T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // In 64 bits, because a product of uint16_t would be promoted to a signed int, and overflow.
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename T>
inline T minimum(T a, T b) {
  return (a < b || a != a) ? a : b;
}

template <typename T>
inline T maximum(T a, T b) {
  return (a > b || a != a) ? a : b;
}

template <Reduction R, typename T>
inline T combine(T a, T b) {
  if constexpr (R == Reduction::kSum) return add(a, b);
  if constexpr (R == Reduction::kProd) return multiply(a, b);
  if constexpr (R == Reduction::kMin) return minimum(a, b);
  if constexpr (R == Reduction::kMax) return maximum(a, b);
}

// Elements that are reduced at a time, so that the accumulator stays in the first-level cache
// however many sources there are.
constexpr size_t kBlock = 1024;

template <Reduction R, typename T, typename Source>
void add_to(Accumulator<T>* accumulator, const Source* next, size_t n) {
  for (size_t i = 0; i < n; ++i)
    accumulator[i] = combine<R>(accumulator[i], static_cast<Accumulator<T>>(widen(next[i])));
}

template <Reduction R, typename T>
void reduce_typed(void* dst, bool dst_wide, const std::vector<Term>& sources, size_t count) {
  using A = Accumulator<T>;
  T* out = static_cast<T*>(dst);
  if constexpr (std::is_same_v<A, T>) {
    if (sources.size() == 2) {
      const T* a = static_cast<const T*>(sources[0].data);
      const T* b = static_cast<const T*>(sources[1].data);
      for (size_t i = 0; i < count; ++i) out[i] = combine<R>(a[i], b[i]);
      return;
    }
  }
  A accumulator[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    if (sources[0].wide) {
      std::memcpy(accumulator, static_cast<const A*>(sources[0].data) + begin, n * sizeof(A));
    } else {
      const T* first = static_cast<const T*>(sources[0].data) + begin;
      for (size_t i = 0; i < n; ++i) accumulator[i] = widen(first[i]);
    }
    for (size_t s = 1; s < sources.size(); ++s) {
      if (sources[s].wide) {
        add_to<R, T>(accumulator, static_cast<const A*>(sources[s].data) + begin, n);
      } else {
        add_to<R, T>(accumulator, static_cast<const T*>(sources[s].data) + begin, n);
      }
    }
    if (dst_wide) {
      std::memcpy(static_cast<A*>(dst) + begin, accumulator, n * sizeof(A));
    } else {
      for (size_t i = 0; i < n; ++i) narrow(accumulator[i], out + begin + i);
    }
  }
}

template <typename T>
void reduce_ordered(Reduction reduction, void* dst, bool dst_wide, const std::vector<Term>& sources,
                    size_t count) {
  switch (reduction) {
    case Reduction::kSum: return reduce_typed<Reduction::kSum, T>(dst, dst_wide, sources, count);
    case Reduction::kProd: return reduce_typed<Reduction::kProd, T>(dst, dst_wide, sources, count);
    case Reduction::kMin: return reduce_typed<Reduction::kMin, T>(dst, dst_wide, sources, count);
    case Reduction::kMax: return reduce_typed<Reduction::kMax, T>(dst, dst_wide, sources, count);
  }
}

}  // namespace

size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kRaw: return 0;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool: return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16: return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kComplex64: return 8;
    case DType::kComplex128: return 16;
  }
  return 0;
}

const char* name_of(DType dtype) {
  static const char* const names[] = {
      "raw",   "float16", "bfloat16", "float32", "float64", "int8", "int16",     "int32",
      "int64", "uint8",   "uint16",   "uint32",  "uint64",  "bool", "complex64", "complex128"};
  const auto index = static_cast<size_t>(dtype);
  return index < sizeof(names) / sizeof(names[0]) ? names[index] : "unknown dtype";
}

Status check_reduction(DType dtype, Reduction reduction) {
  if (dtype == DType::kRaw) {
    return Status::Error(
        Code::kInvalidArgument,
        "this dtype has no reduction; expected float16, bfloat16, float32, float64, an integer, "
        "bool, complex64 or complex128; cast the tensor first");
  }
  if ((dtype == DType::kComplex64 || dtype == DType::kComplex128) && reduction != Reduction::kSum) {
    return Status::Error(Code::kInvalidArgument, std::string("reduction '") + name_of(reduction) +
                                                     "' is not defined for " + name_of(dtype) +
                                                     "; expected 'sum'");
  }
  return Status::Ok();
}

void reduce(DType dtype, Reduction reduction, void* dst, bool dst_wide,
            const std::vector<Term>& sources, size_t count) {
  switch (dtype) {
    case DType::kFloat16: return reduce_ordered<Half>(reduction, dst, dst_wide, sources, count);
    case DType::kBFloat16:
      return reduce_ordered<BFloat16>(reduction, dst, dst_wide, sources, count);
    case DType::kFloat32: return reduce_ordered<float>(reduction, dst, dst_wide, sources, count);
    case DType::kFloat64: return reduce_ordered<double>(reduction, dst, dst_wide, sources, count);
    case DType::kInt8: return reduce_ordered<int8_t>(reduction, dst, dst_wide, sources, count);
    case DType::kInt16: return reduce_ordered<int16_t>(reduction, dst, dst_wide, sources, count);
    case DType::kInt32: return reduce_ordered<int32_t>(reduction, dst, dst_wide, sources, count);
    case DType::kInt64: return reduce_ordered<int64_t>(reduction, dst, dst_wide, sources, count);
    case DType::kUInt8: return reduce_ordered<uint8_t>(reduction, dst, dst_wide, sources, count);
    case DType::kUInt16: return reduce_ordered<uint16_t>(reduction, dst, dst_wide, sources, count);
    case DType::kUInt32: return reduce_ordered<uint32_t>(reduction, dst, dst_wide, sources, count);
    case DType::kUInt64: return reduce_ordered<uint64_t>(reduction, dst, dst_wide, sources, count);
    case DType::kBool: {
      // Bytes are 0 or 1, so "or" is max and "and" is min.
      const bool is_or = reduction == Reduction::kSum || reduction == Reduction::kMax;
      return reduce_ordered<uint8_t>(is_or ? Reduction::kMax : Reduction::kMin, dst, dst_wide,
                                     sources, count);
    }
    case DType::kComplex64:
      return reduce_typed<Reduction::kSum, float>(dst, dst_wide, sources, 2 * count);
    case DType::kComplex128:
      return reduce_typed<Reduction::kSum, double>(dst, dst_wide, sources, 2 * count);
    case DType::kRaw: return;  // refused by check_reduction before an operation starts
  }
}

namespace {

template <typename T>
void narrow_all(const float* from, void* dst, size_t count) {
  for (size_t i = 0; i < count; ++i) narrow(from[i], static_cast<T*>(dst) + i);
}

template <typename T>
void widen_all(const void* src, float* dst, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = widen(static_cast<const T*>(src)[i]);
}

}  // namespace

void narrow_floats(DType to, const float* from, void* dst, size_t count) {
  to == DType::kFloat16 ? narrow_all<Half>(from, dst, count)
                        : narrow_all<BFloat16>(from, dst, count);
}

void widen_floats(DType from, const void* src, float* dst, size_t count) {
  from == DType::kFloat16 ? widen_all<Half>(src, dst, count) : widen_all<BFloat16>(src, dst, count);
}

}  // namespace whale
