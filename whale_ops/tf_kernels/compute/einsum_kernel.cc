// Batches of small matrix products that an equation describes, computed in place, without
// transposing the operands.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/core/compute/small_products.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using whale::ProductDim;

constexpr double kFlopsPerCycle = 16;
constexpr size_t kLineBytes = 64;  // size of a cache line
// Fewest rows of a part of a product, so that packing costs little in comparison.
constexpr int64_t kLeastRows = 32;

// An equation such as "abc,abd->acd", and the roles of its letters.
struct Equation {
  std::string left, right, out;
  std::string batch;         // letters of all three
  char row, column, summed;  // of left and out, of right and out, of left and right

  // Reads an equation that has one letter each for row, column and sum, with the column last; the
  // error says why it cannot.
  static absl::Status read(const std::string& text, Equation* found) {
    const size_t comma = text.find(','), arrow = text.find("->");
    const auto refused = [&](const char* why) {
      return invalid(
          "equation '", text, "': ", why,
          "; expected one like 'abc,abd->acd', with one letter of the left operand and the result, "
          "one, their last, of the right one and the result, and one of both operands");
    };
    if (comma == std::string::npos || arrow == std::string::npos || arrow < comma)
      return refused("the equation does not have two operands and '->'");
    *found = {text.substr(0, comma),
              text.substr(comma + 1, arrow - comma - 1),
              text.substr(arrow + 2),
              "",
              0,
              0,
              0};
    for (const std::string* term : {&found->left, &found->right, &found->out}) {
      for (const char letter : *term) {
        if (std::count(term->begin(), term->end(), letter) > 1)
          return refused("a letter stands twice in a term");
      }
    }
    const auto in = [](const std::string& term, char letter) {
      return term.find(letter) != std::string::npos;
    };
    const auto set = [](char letter, char* kind) { return std::exchange(*kind, letter) == 0; };
    for (const char letter : found->left) {
      const bool right = in(found->right, letter), out = in(found->out, letter);
      if (right && out) {
        found->batch += letter;
      } else if (!(right || out) || !set(letter, out ? &found->row : &found->summed)) {
        return refused(
            "the left operand has a letter of its own, or several letters of the result or of the "
            "right operand alone");
      }
    }
    for (const char letter : found->right) {
      if (in(found->left, letter)) continue;
      if (!in(found->out, letter) || !set(letter, &found->column))
        return refused(
            "the right operand has a letter of its own, or several letters of the result alone");
    }
    for (const char letter : found->out) {
      if (!in(found->left, letter) && !in(found->right, letter))
        return refused("a letter of the result is in neither operand");
    }
    if (found->row == 0 || found->summed == 0 || found->column == 0 ||
        found->out.back() != found->column) {
      return refused(
          "a letter is missing, or the result does not end with the right operand's letter");
    }
    return absl::OkStatus();
  }

  int64_t size_of(char letter, const Tensor& a, const Tensor& b) const {
    const size_t at = left.find(letter);
    return at != std::string::npos ? a.dim_size(at) : b.dim_size(right.find(letter));
  }
};

// Elements from one index of a letter to the next in a term; 0 if the term does not have the
// letter.
int64_t stride_of(char letter, const std::string& term, const TensorShape& shape) {
  const size_t at = term.find(letter);
  if (at == std::string::npos) return 0;
  int64_t stride = 1;
  for (size_t i = at + 1; i < term.size(); ++i) stride *= shape.dim_size(i);
  return stride;
}

template <typename T>
class EinsumOp : public OpKernel {
 public:
  explicit EinsumOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string text;
    read(ctx, "equation", &text);
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, Equation::read(text, &equation_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &left = ctx->input(0), &right = ctx->input(1);
    const Equation& e = equation_;
    bool fits = left.dims() == static_cast<int>(e.left.size()) &&
                right.dims() == static_cast<int>(e.right.size());
    for (size_t i = 0; fits && i < e.right.size(); ++i)
      fits = e.size_of(e.right[i], left, right) == right.dim_size(i);
    OP_REQUIRES(ctx, fits,
                invalid("WhaleEinsum has operands of the shapes ", left.shape().DebugString(),
                        " and ", right.shape().DebugString(), "; expected sizes as in ", e.left,
                        ",", e.right, "->", e.out));
    TensorShape shape;
    for (const char letter : e.out) shape.AddDim(e.size_of(letter, left, right));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    const auto dim = [&](char letter) {
      return ProductDim{e.size_of(letter, left, right), stride_of(letter, e.left, left.shape()),
                        stride_of(letter, e.right, right.shape()), stride_of(letter, e.out, shape)};
    };
    const whale::ProductSizes sizes{dim(e.row), dim(e.column), dim(e.summed)};
    std::vector<ProductDim> batch;
    int64_t products = 1;
    for (const char letter : e.batch) {
      batch.push_back(dim(letter));
      products *= batch.back().size;
    }
    if (out->NumElements() == 0) return;
    const T *a = left.flat<T>().data(), *b = right.flat<T>().data();
    T* to = out->flat<T>().data();
    // If there are few products, their rows are divided among threads as well.
    const int64_t threads = ctx->eigen_cpu_device().numThreads(), rows = sizes.rows.size;
    const int64_t parts =
        std::clamp<int64_t>(threads / products, 1, std::max<int64_t>(1, rows / kLeastRows));
    const double flops = 2.0 * rows * sizes.columns.size * sizes.summed.size / parts;
    const Eigen::TensorOpCost cost(0, 0, flops / kFlopsPerCycle);
    ctx->eigen_cpu_device().parallelFor(products * parts, cost, [&](int64_t begin, int64_t end) {
      // Not a std::vector, which would initialise its elements; aligned to a cache line, for loads
      // of vectors.
      const std::unique_ptr<T[]> memory(
          new T[whale::scratch_elements<T>(sizes) + kLineBytes / sizeof(T)]);
      const auto past = reinterpret_cast<uintptr_t>(memory.get()) % kLineBytes;
      T* const scratch = memory.get() + (kLineBytes - past) % kLineBytes / sizeof(T);
      for (int64_t one = begin; one < end; ++one) {
        const int64_t part = one % parts, first = rows * part / parts;
        whale::ProductSizes some = sizes;
        some.rows.size = rows * (part + 1) / parts - first;
        int64_t rest = one / parts, left_at = first * sizes.rows.left, right_at = 0,
                out_at = first * sizes.rows.out;
        for (auto dim = batch.rbegin(); dim != batch.rend(); ++dim) {
          const int64_t index = rest % dim->size;
          rest /= dim->size;
          left_at += index * dim->left;
          right_at += index * dim->right;
          out_at += index * dim->out;
        }
        whale::multiply<T>(some, a + left_at, b + right_at, to + out_at, scratch);
      }
    });
  }

 private:
  Equation equation_;
};

}  // namespace

REGISTER_OP("WhaleEinsum")
    .Input("left: T")
    .Input("right: T")
    .Output("output: T")
    .Attr("equation: string")
    .Attr("T: {float, double}")
    .SetShapeFn([](InferenceContext* c) {
      std::string text;
      TF_RETURN_IF_ERROR(c->GetAttr("equation", &text));
      Equation e;
      TF_RETURN_IF_ERROR(Equation::read(text, &e));
      ShapeHandle left, right;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), e.left.size(), &left));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), e.right.size(), &right));
      std::vector<DimensionHandle> dims;
      for (const char letter : e.out) {
        const size_t at = e.left.find(letter);
        dims.push_back(at != std::string::npos ? c->Dim(left, at)
                                               : c->Dim(right, e.right.find(letter)));
      }
      c->set_output(0, c->MakeShape(dims));
      return absl::OkStatus();
    })
    .Doc(
        "What Einsum gives of two operands whose equation has, beside letters that all terms have, "
        "one of left and output, one of right and output, with which output ends, and one of left "
        "and right: many products of small matrices, computed where these lie.");

WHALE_CPU_KERNEL_FOR("WhaleEinsum", "T", float, EinsumOp);
WHALE_CPU_KERNEL_FOR("WhaleEinsum", "T", double, EinsumOp);

}  // namespace whale_ops
