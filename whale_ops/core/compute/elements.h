// Arithmetic on consecutive elements, by vectors of the processor, for run_loop.cc.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "whale_ops/core/compute/loop_program.h"

#define WHALE_INLINE __attribute__((always_inline)) inline

// Functions that take vectors are always inlined, so no calling convention for vectors is needed.
// (This has to hold at the end of the file as well, where templates are instantiated.)
#pragma GCC diagnostic ignored "-Wpsabi"

namespace whale {

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr int kFraction = 23;
  static constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: a sum with it has no bits for a fraction
  static constexpr float kLog2High = 0.693359375f, kLog2Low = -2.12194440e-4f;
  static constexpr float kSmallest = -87.3f, kLargest = 88.72283f;  // whose exponential is normal
  static constexpr float kTanhIsOne = 10.0f;
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr int kFraction = 52;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLog2High = 6.93147180369123816490e-01,
                          kLog2Low = 1.90821492927058770002e-10;
  static constexpr double kSmallest = -708.3, kLargest = 709.782712893384;
  static constexpr double kTanhIsOne = 20.0;
};

// Vectors of kBytes bytes, and of which integers and numbers they consist.
template <typename T, int kBytes>
struct Lanes {
  using Int = typename Bits<T>::Int;
  typedef T V __attribute__((vector_size(kBytes)));
  typedef Int I __attribute__((vector_size(kBytes)));
  static constexpr int kWidth = kBytes / sizeof(T);
  using B = Bits<T>;

  static WHALE_INLINE V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
  }
  static WHALE_INLINE void store(T* to, V v) { std::memcpy(to, &v, sizeof(V)); }
  static WHALE_INLINE V splat(T x) { return x - V{}; }  // which keeps the sign of a zero
  static WHALE_INLINE V pick(I mask, V a, V b) { return (V)(((I)a & mask) | ((I)b & ~mask)); }
  static WHALE_INLINE V one_if(I mask) { return (V)(mask & (I)splat(T(1))); }

  // exp(x) = 2^n exp(r) with |r| <= log(2) / 2, log(2) in two parts.
  struct Exponential {
    V less_one;  // exp(r) - 1
    I power;     // n, shifted to the bits of the exponent
  };
  static WHALE_INLINE Exponential exponential_of(V x) {
    const V rounded = x * T(1.44269504088896340736) + B::kRound;
    const V n = rounded - B::kRound;
    const V r = (x - n * B::kLog2High) - n * B::kLog2Low;
    V p;
    if constexpr (sizeof(T) == 4) {  // S. Moshier, Cephes, expf.c
      p = splat(T(1.9875691500e-4));
      p = p * r + T(1.3981999507e-3);
      p = p * r + T(8.3334519073e-3);
      p = p * r + T(4.1665795894e-2);
      p = p * r + T(1.6666665459e-1);
      p = p * r + T(5.0000001201e-1);
    } else {  // Taylor's series; its remainder is below 4e-18
      p = splat(T(1.0 / 6227020800.0));
      p = p * r + T(1.0 / 479001600.0);
      p = p * r + T(1.0 / 39916800.0);
      p = p * r + T(1.0 / 3628800.0);
      p = p * r + T(1.0 / 362880.0);
      p = p * r + T(1.0 / 40320.0);
      p = p * r + T(1.0 / 5040.0);
      p = p * r + T(1.0 / 720.0);
      p = p * r + T(1.0 / 120.0);
      p = p * r + T(1.0 / 24.0);
      p = p * r + T(1.0 / 6.0);
      p = p * r + T(0.5);
    }
    return {p * (r * r) + r, (I)rounded << B::kFraction};
  }

  static WHALE_INLINE V exp(V x) {
    const Exponential e = exponential_of(x);
    const V scaled = (V)((I)(e.less_one + T(1)) + e.power);
    const V in_range = pick(x >= B::kSmallest, scaled, V{});
    const V most = pick(x > B::kLargest, splat(std::numeric_limits<T>::infinity()), in_range);
    return pick(x != x, x, most);
  }
  // exp(x) - 1, for x whose power of two is a normal number.
  static WHALE_INLINE V exp_less_one(V x) {
    const Exponential e = exponential_of(x);
    const V scale = (V)((I)splat(T(1)) + e.power);
    return scale * e.less_one + (scale - T(1));
  }
  static WHALE_INLINE V tanh(V x) {
    const I sign = (I)x & (I)splat(T(-0.0));
    const V size = (V)((I)x ^ sign);
    const V bounded = pick(size < B::kTanhIsOne, size, splat(B::kTanhIsOne));
    const V e = exp_less_one(bounded + bounded);
    return pick(x != x, x, (V)((I)(e / (e + T(2))) | sign));
  }
  static WHALE_INLINE V sigmoid(V x) { return T(1) / (T(1) + exp(-x)); }
  static WHALE_INLINE V elu(V x) {
    const V bounded = pick(x > T(-40), x, splat(T(-40)));
    const V negative = exp_less_one(pick(bounded < T(0), bounded, V{}));
    return pick(x != x, x, pick(x > T(0), x, negative));
  }
  template <typename F>
  static WHALE_INLINE V each(V x, F f) {
    for (int i = 0; i < kWidth; ++i) x[i] = f(x[i]);
    return x;
  }
  static WHALE_INLINE V square_root(V x) {
    return each(x, [](T one) __attribute__((always_inline)) { return std::sqrt(one); });
  }

  template <typename F>
  static WHALE_INLINE void go(T* to, const T* a, const T* b, const T* c, int64_t n, F f) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(to + i, f(load(a + i), load(b + i), load(c + i)));
    if (i == n) return;
    T part[3][kWidth] = {};
    const T* from[] = {a, b, c};
    for (int k = 0; k < 3; ++k) std::memcpy(part[k], from[k] + i, (n - i) * sizeof(T));
    T result[kWidth];
    store(result, f(load(part[0]), load(part[1]), load(part[2])));
    std::memcpy(to + i, result, (n - i) * sizeof(T));
  }

#define WHALE_CASE(name, expression)                                                  \
  case LoopOp::name:                                                                  \
    return go(to, a, b, c, n,                                                         \
              [](const V& x, const V& y, const V& z) __attribute__((always_inline)) { \
                (void)x, (void)y, (void)z;                                            \
                return V(expression);                                                 \
              });

  // Computes `n` consecutive elements. Operands that the operation does not have may point to any
  // readable memory. `to` may be an operand.
  static WHALE_INLINE void apply(LoopOp op, T* to, const T* a, const T* b, const T* c, int64_t n) {
    switch (op) {
      case LoopOp::kCopy:
        if (to != a) std::memmove(to, a, n * sizeof(T));
        return;
        WHALE_CASE(kNeg, -x)
        WHALE_CASE(kAbs, (V)((I)x & ~(I)splat(T(-0.0))))
        WHALE_CASE(kSign, pick(x != x, x, one_if(x > T(0)) - one_if(x < T(0))))
        WHALE_CASE(kSquare, x * x)
        WHALE_CASE(kSqrt, square_root(x))
        WHALE_CASE(kRsqrt, T(1) / square_root(x))
        WHALE_CASE(kReciprocal, T(1) / x)
        WHALE_CASE(kExp, exp(x))
        WHALE_CASE(kLog, each(x, [](T one) { return std::log(one); }))
        WHALE_CASE(kLog1p, each(x, [](T one) { return std::log1p(one); }))
        WHALE_CASE(kTanh, tanh(x))
        WHALE_CASE(kSigmoid, sigmoid(x))
        WHALE_CASE(kRelu, pick(x != x, x, pick(x > T(0), x, V{})))
        WHALE_CASE(kRelu6, pick(x != x, x, pick(x > T(0), pick(x < T(6), x, splat(T(6))), V{})))
        WHALE_CASE(kElu, elu(x))
        WHALE_CASE(kSoftplus, each(x, [](T one) {
                     return one > T(0) ? one + std::log1p(std::exp(-one))
                                       : std::log1p(std::exp(one));
                   }))
        WHALE_CASE(kNot, one_if(x == T(0)))
        WHALE_CASE(kAdd, x + y)
        WHALE_CASE(kSub, x - y)
        WHALE_CASE(kMul, x * y)
        WHALE_CASE(kDiv, x / y)
        WHALE_CASE(kMax, pick(x != x, x, pick(x > y, x, y)))
        WHALE_CASE(kMin, pick(x != x, x, pick(x < y, x, y)))
        WHALE_CASE(kSquaredDifference, (x - y) * (x - y))
        WHALE_CASE(kTanhGrad, y * (T(1) - x * x))
        WHALE_CASE(kSigmoidGrad, y * x * (T(1) - x))
        WHALE_CASE(kSqrtGrad, y * T(0.5) / x)
        WHALE_CASE(kRsqrtGrad, y * T(-0.5) * x * x * x)
        WHALE_CASE(kReciprocalGrad, -y * x * x)
        WHALE_CASE(kReluGrad, pick(y > T(0), x, V{}))
        WHALE_CASE(kRelu6Grad, pick((y > T(0)) & (y < T(6)), x, V{}))
        WHALE_CASE(kEluGrad, pick(y < T(0), x * (y + T(1)), x))
        WHALE_CASE(kSoftplusGrad, x * sigmoid(y))
        WHALE_CASE(kLess, one_if(x < y))
        WHALE_CASE(kLessEqual, one_if(x <= y))
        WHALE_CASE(kEqual, one_if(x == y))
        WHALE_CASE(kNotEqual, one_if(x != y))
        WHALE_CASE(kAnd, one_if((x != T(0)) & (y != T(0))))
        WHALE_CASE(kOr, one_if((x != T(0)) | (y != T(0))))
        WHALE_CASE(kSelect, pick(x != T(0), y, z))
      default: return;
    }
  }
#undef WHALE_CASE
};

}  // namespace whale
