#include "whale_ops/core/compute/run_update.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "whale_ops/core/compute/processor.h"

#define WHALE_INLINE __attribute__((always_inline)) inline

namespace whale {
namespace {

// Bytes of each temporary that are computed at a time, so that they stay in the first-level cache.
constexpr size_t kBlockBytes = 2048;

WHALE_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
WHALE_INLINE double square_root(double x) { return __builtin_sqrt(x); }
WHALE_INLINE float magnitude(float x) { return __builtin_fabsf(x); }
WHALE_INLINE double magnitude(double x) { return __builtin_fabs(x); }

// Written so that it compiles to a vector instruction, unlike the conversion of a bool. It pays
// only in a product of two such factors: a single choice between g and 0 * g becomes a branch in
// GCC.
template <typename T>
WHALE_INLINE T one_if(bool holds) {
  return holds ? T(1) : T(0);
}

// `to` may be an operand: an element is read before it is written, and no other element is touched.
template <typename T, typename F>
WHALE_INLINE void unary(T* to, const T* a, bool scalar, size_t n, F f) {
  if (scalar) {
    std::fill_n(to, n, f(*a));
    return;
  }
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) to[i] = f(a[i]);
}

template <typename T, typename F>
WHALE_INLINE void binary(T* to, const T* a, bool scalar_a, const T* b, bool scalar_b, size_t n,
                         F f) {
  if (scalar_a && scalar_b) {
    std::fill_n(to, n, f(*a, *b));
  } else if (scalar_a) {
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
    case UpdateOp::kCopy:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return x; });
    case UpdateOp::kNeg:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return -x; });
    case UpdateOp::kAbs:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return magnitude(x); });
    case UpdateOp::kSign:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) {
        return x != x ? x : one_if<T>(x > 0) - one_if<T>(x < 0);
      });
    case UpdateOp::kSquare:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return x * x; });
    case UpdateOp::kSqrt:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return square_root(x); });
    case UpdateOp::kRsqrt:
      return unary(to, a, sa, n,
                   [](T x) __attribute__((always_inline)) { return T(1) / square_root(x); });
    case UpdateOp::kReciprocal:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) { return T(1) / x; });
    case UpdateOp::kRelu:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) {
        return x != x ? x : (x > 0 ? x : T(0));
      });
    case UpdateOp::kRelu6:
      return unary(to, a, sa, n, [](T x) __attribute__((always_inline)) {
        return x != x ? x : (x > 0 ? (x < 6 ? x : T(6)) : T(0));
      });
    case UpdateOp::kSum:
    case UpdateOp::kMean: return;  // not here: sums are made by Collected
    case UpdateOp::kAdd:
      return binary(to, a, sa, b, sb, n,
                    [](T x, T y) __attribute__((always_inline)) { return x + y; });
    case UpdateOp::kSub:
      return binary(to, a, sa, b, sb, n,
                    [](T x, T y) __attribute__((always_inline)) { return x - y; });
    case UpdateOp::kMul:
      return binary(to, a, sa, b, sb, n,
                    [](T x, T y) __attribute__((always_inline)) { return x * y; });
    case UpdateOp::kDiv:
      return binary(to, a, sa, b, sb, n,
                    [](T x, T y) __attribute__((always_inline)) { return x / y; });
    case UpdateOp::kMax:
      return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) {
        return x != x ? x : (x > y ? x : y);
      });
    case UpdateOp::kMin:
      return binary(to, a, sa, b, sb, n, [](T x, T y) __attribute__((always_inline)) {
        return x != x ? x : (x < y ? x : y);
      });
    case UpdateOp::kReluGrad:
      return binary(to, a, sa, b, sb, n, [](T g, T x) __attribute__((always_inline)) {
        return g * (one_if<T>(x > 0) * one_if<T>(x == x));
      });
    case UpdateOp::kRelu6Grad:
      return binary(to, a, sa, b, sb, n, [](T g, T x) __attribute__((always_inline)) {
        return g * (one_if<T>(x > 0) * one_if<T>(x < 6));
      });
  }
}

template <typename T>
using Apply = void (*)(UpdateOp, T*, const T*, bool, const T*, bool, size_t);

template <typename T>
void apply_anywhere(UpdateOp op, T* to, const T* a, bool sa, const T* b, bool sb, size_t n) {
  apply(op, to, a, sa, b, sb, n);
}

#if defined(__x86_64__)
// Compiled for AVX2, and called only if the processor has it: the library itself runs anywhere.
template <typename T>
__attribute__((target("avx2"))) void apply_avx2(UpdateOp op, T* to, const T* a, bool sa, const T* b,
                                                bool sb, size_t n) {
  apply(op, to, a, sa, b, sb, n);
}

template <typename T>
Apply<T> choose_apply() {
  return has_avx2() ? apply_avx2<T> : apply_anywhere<T>;
}
#else
template <typename T>
Apply<T> choose_apply() {
  return apply_anywhere<T>;
}
#endif

// Where an operand's elements begin, and how the elements of a block are found.
template <typename T>
struct Place {
  T* data = nullptr;
  bool moves = false;  // whether different places have different elements
  size_t period = 0;   // after how many places its elements repeat; 0: never
  size_t run = 1;      // number of places for which each of its elements stands

  T* at(size_t element) const {
    return moves ? data + (period != 0 ? element % period : element / run) : data;
  }
};

template <typename T>
struct Step {
  UpdateOp op;
  Place<T> to, a, b;
  bool scalar_a, scalar_b;
  int sum;  // number of the sum that it adds to
};

// A sum under construction. Blocks are added to `recent` first, and only then to the total: short
// chains of additions lose less to rounding than one long chain.
template <typename T>
class Collected {
 public:
  Collected(T* places, size_t width) : places_(places), recent_(width) {}

  void add(Apply<T> apply_best, size_t at, const T* values, size_t n) {
    const size_t width = recent_.size();
    for (size_t done = 0, many = 0; done < n; done += many) {
      const size_t place = (at + done) % width;
      many = std::min(n - done, width - place);
      T* to = recent_.data() + place;
      apply_best(UpdateOp::kAdd, to, to, false, values + done, false, many);
    }
    added_ += n;
    if (added_ >= kChain * width) flush(apply_best);
  }

  void flush(Apply<T> apply_best) {
    apply_best(UpdateOp::kAdd, places_, places_, false, recent_.data(), false, recent_.size());
    std::fill(recent_.begin(), recent_.end(), T(0));
    added_ = 0;
  }

 private:
  static constexpr size_t kChain = 64;

  T* places_;
  std::vector<T> recent_;
  size_t added_ = 0;
};

bool same_for_a_block(const Operand& operand) {
  return operand.kind == OperandKind::kScalar || operand.kind == OperandKind::kColumn;
}

}  // namespace

template <typename T>
void run_update(const UpdateProgram& program, const UpdateBuffers& buffers, size_t begin,
                size_t end) {
  static const Apply<T> apply_best = choose_apply<T>();
  constexpr size_t kBlock = kBlockBytes / sizeof(T);
  const std::unique_ptr<T[]> temporary(new T[program.count(OperandKind::kTemporary) * kBlock]);
  // A row that is shorter than a block is repeated in memory, so that blocks need not end where the
  // row does.
  std::vector<std::vector<T>> repeated(buffers.row_elements.size());
  const auto whole_row = [&](int index) -> T* {
    T* data = static_cast<T*>(buffers.places[static_cast<int>(OperandKind::kRow)][index]);
    const size_t period = buffers.row_elements[index];
    if (period >= kBlock) return data;
    std::vector<T>& row = repeated[index];
    if (row.empty()) {
      row.resize(std::min(kBlock, end - begin) + period);
      for (size_t i = 0; i < row.size(); ++i) row[i] = i < period ? data[i] : row[i - period];
    }
    return row.data();
  };
  const auto place = [&](const Operand& operand) -> Place<T> {
    if (operand.kind == OperandKind::kTemporary) return {temporary.get() + operand.index * kBlock};
    if (operand.kind == OperandKind::kRow)
      return {whole_row(operand.index), true, buffers.row_elements[operand.index]};
    T* data = static_cast<T*>(buffers.places[static_cast<int>(operand.kind)][operand.index]);
    if (operand.kind == OperandKind::kColumn)
      return {data, true, 0, buffers.column_runs[operand.index]};
    return {data, operand.kind != OperandKind::kScalar};
  };
  std::vector<Collected<T>> sums;
  for (size_t i = 0; i < buffers.sum_elements.size(); ++i) {
    sums.emplace_back(static_cast<T*>(buffers.places[static_cast<int>(OperandKind::kSum)][i]),
                      sum_width<T>(buffers.sum_elements[i]));
  }
  std::vector<Step<T>> steps;
  steps.reserve(program.instructions.size());
  for (const Instruction& one : program.instructions) {
    const bool binary = is_binary(one.op);
    steps.push_back({one.op, is_sum(one.op) ? Place<T>{} : place(one.to), place(one.a),
                     binary ? place(one.b) : Place<T>{}, same_for_a_block(one.a),
                     binary && same_for_a_block(one.b), one.to.index});
  }
  for (size_t at = begin, n = 0; at < end; at += n) {
    n = std::min(kBlock, end - at);
    for (const size_t period : buffers.row_elements) {
      if (period >= kBlock) n = std::min(n, period - at % period);
    }
    for (const size_t run : buffers.column_runs) n = std::min(n, run - at % run);
    for (const Step<T>& step : steps) {
      if (is_sum(step.op)) {
        sums[step.sum].add(apply_best, at, step.a.at(at), n);
        continue;
      }
      apply_best(step.op, step.to.at(at), step.a.at(at), step.scalar_a, step.b.at(at),
                 step.scalar_b, n);
    }
  }
  for (Collected<T>& sum : sums) sum.flush(apply_best);
}

template <typename T>
size_t sum_width(size_t elements) {
  constexpr size_t kBlock = kBlockBytes / sizeof(T);
  return elements < kBlock ? elements * (kBlock / elements) : elements;
}

template <typename T>
void fold_sum(const T* places, size_t parts, size_t elements, T count, T* sum) {
  std::fill_n(sum, elements, T(0));
  for (size_t at = 0; at < parts * sum_width<T>(elements); at += elements) {
    for (size_t i = 0; i < elements; ++i) sum[i] += places[at + i];
  }
  for (size_t i = 0; count != 1 && i < elements; ++i) sum[i] /= count;
}

template WHALE_EXPORT void run_update<float>(const UpdateProgram&, const UpdateBuffers&, size_t,
                                             size_t);
template WHALE_EXPORT void run_update<double>(const UpdateProgram&, const UpdateBuffers&, size_t,
                                              size_t);
template WHALE_EXPORT size_t sum_width<float>(size_t);
template WHALE_EXPORT size_t sum_width<double>(size_t);
template WHALE_EXPORT void fold_sum<float>(const float*, size_t, size_t, float, float*);
template WHALE_EXPORT void fold_sum<double>(const double*, size_t, size_t, double, double*);

}  // namespace whale
