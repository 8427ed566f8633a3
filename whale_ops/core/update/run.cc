#include "whale_ops/core/update/run.h"

#include <algorithm>
#include <memory>

#define WHALE_INLINE __attribute__((always_inline)) inline

namespace whale {
namespace {

// A block of each temporary stays in the first level cache.
constexpr size_t kBlockBytes = 2048;

WHALE_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
WHALE_INLINE double square_root(double x) { return __builtin_sqrt(x); }
WHALE_INLINE float magnitude(float x) { return __builtin_fabsf(x); }
WHALE_INLINE double magnitude(double x) { return __builtin_fabs(x); }

// `to` may be an operand: an element is read before it is written, and no other element is.
template <typename T, typename F>
WHALE_INLINE void unary(T* to, const T* a, size_t n, F f) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) to[i] = f(a[i]);
}

template <typename T, typename F>
WHALE_INLINE void binary(T* to, const T* a, bool scalar_a, const T* b, bool scalar_b, size_t n, F f) {
  if (scalar_a) {
    const T x = *a;
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = f(x, b[i]);
  } else if (scalar_b) {
    const T y = *b;
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = f(a[i], y);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = f(a[i], b[i]);
  }
}

template <typename T>
WHALE_INLINE void apply(UpdateOp op, T* to, const T* a, bool sa, const T* b, bool sb, size_t n) {
  switch (op) {
    case UpdateOp::kCopy: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return x; });
    case UpdateOp::kNeg: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return -x; });
    case UpdateOp::kAbs: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return magnitude(x); });
    case UpdateOp::kSign:
      return unary(to, a, n, [](T x) __attribute__((always_inline)) { return x != x ? x : T(x > 0) - T(x < 0); });
    case UpdateOp::kSquare: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return x * x; });
    case UpdateOp::kSqrt: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return square_root(x); });
    case UpdateOp::kRsqrt: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return T(1) / square_root(x); });
    case UpdateOp::kReciprocal: return unary(to, a, n, [](T x) __attribute__((always_inline)) { return T(1) / x; });
    case UpdateOp::kAdd: return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x + y; });
    case UpdateOp::kSub: return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x - y; });
    case UpdateOp::kMul: return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x * y; });
    case UpdateOp::kDiv: return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x / y; });
    case UpdateOp::kMax:
      return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x != x ? x : (x > y ? x : y); });
    case UpdateOp::kMin:
      return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) { return x != x ? x : (x < y ? x : y); });
  }
}

template <typename T>
using Apply = void (*)(UpdateOp, T*, const T*, bool, const T*, bool, size_t);

template <typename T>
void apply_anywhere(UpdateOp op, T* to, const T* a, bool sa, const T* b, bool sb, size_t n) {
  apply(op, to, a, sa, b, sb, n);
}

#if defined(__x86_64__)
// Of the processor that is here: libraries are compiled for any.
template <typename T>
__attribute__((target("avx2"))) void apply_avx2(UpdateOp op, T* to, const T* a, bool sa, const T* b, bool sb, size_t n) {
  apply(op, to, a, sa, b, sb, n);
}

template <typename T>
Apply<T> best() {
  return __builtin_cpu_supports("avx2") ? apply_avx2<T> : apply_anywhere<T>;
}
#else
template <typename T>
Apply<T> best() {
  return apply_anywhere<T>;
}
#endif

// Where an operand's elements begin, whether it has one for each place, and after how many it begins again (0: never).
template <typename T>
struct Place {
  T* data = nullptr;
  bool moves = false;
  size_t period = 0;

  T* at(size_t element) const { return moves ? data + (period != 0 ? element % period : element) : data; }
};

template <typename T>
struct Step {
  UpdateOp op;
  Place<T> to, a, b;
};

}  // namespace

template <typename T>
void run_update(const UpdateProgram& program, const UpdateBuffers& buffers, size_t begin, size_t end) {
  static const Apply<T> apply_best = best<T>();
  constexpr size_t kBlock = kBlockBytes / sizeof(T);
  const std::unique_ptr<T[]> temporary(new T[program.count(OperandKind::kTemporary) * kBlock]);
  const auto place = [&](const Operand& operand) -> Place<T> {
    if (operand.kind == OperandKind::kTemporary) return {temporary.get() + operand.index * kBlock, false};
    T* data = static_cast<T*>(buffers.places[static_cast<int>(operand.kind)][operand.index]);
    return {data, operand.kind != OperandKind::kScalar,
            operand.kind == OperandKind::kRow ? buffers.row_elements[operand.index] : 0};
  };
  std::vector<Step<T>> steps;
  steps.reserve(program.instructions.size());
  for (const Instruction& one : program.instructions) {
    steps.push_back({one.op, place(one.to), place(one.a), is_binary(one.op) ? place(one.b) : Place<T>{}});
  }
  for (size_t at = begin, n = 0; at < end; at += n) {
    n = std::min(kBlock, end - at);
    for (const size_t period : buffers.row_elements) n = std::min(n, period - at % period);
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step<T>& step = steps[i];
      const Instruction& one = program.instructions[i];
      apply_best(step.op, step.to.at(at), step.a.at(at), one.a.kind == OperandKind::kScalar, step.b.at(at),
                 is_binary(one.op) && one.b.kind == OperandKind::kScalar, n);
    }
  }
}

template WHALE_EXPORT void run_update<float>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
template WHALE_EXPORT void run_update<double>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);

}  // namespace whale
