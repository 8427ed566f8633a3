// All turns of a loop as one op: a LoopProgram (core/compute) runs them one after the other.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "whale_ops/core/compute/run_loop.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using whale::LoopBuffer;

template <typename T>
class LoopKernel : public OpKernel {
 public:
  explicit LoopKernel(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> lines;
    read(ctx, "program", &lines, "turns", &turns_, "first", &first_, "step", &step_,
         "stacked_shapes", &stacked_shapes_, "X", &slices_, "W", &same_, "S", &states_);
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, to_tensorflow(whale::parse_loop(lines, &program_)));
    const int stacked = static_cast<int>(stacked_shapes_.size());
    const auto fits = [&](LoopBuffer kind, int given) { return program_.count(kind) <= given; };
    OP_REQUIRES(
        ctx,
        turns_ > 0 && fits(LoopBuffer::kSlice, slices_) && fits(LoopBuffer::kSame, same_) &&
            fits(LoopBuffer::kState, states_) && fits(LoopBuffer::kStacked, stacked) &&
            static_cast<int>(first_.size()) == slices_ && first_.size() == step_.size(),
        invalid("the inputs of WhaleLoop do not fit its program: ", turns_, " iterations of ",
                slices_, " sliced tensors with ", first_.size(), " first rows, ", same_,
                " tensors, ", states_, " states and ", stacked, " stacked results"));
    for (int i = 0; i < slices_; ++i) {
      OP_REQUIRES(ctx, first_[i] >= 0 && first_[i] + (turns_ - 1) * step_[i] >= 0,
                  invalid("WhaleLoop would read a negative row: sliced tensor ", i, " from row ",
                          first_[i], " on, by ", step_[i], " rows an iteration"));
    }
    for (const TensorShape& shape : stacked_shapes_) {
      OP_REQUIRES(ctx, shape.dims() > 0 && shape.dim_size(0) == turns_,
                  invalid("WhaleLoop has a stacked result of shape ", shape.DebugString(),
                          "; expected ", turns_, " rows, one for each iteration"));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    whale::LoopBuffers<T> buffers;
    int input = 0;
    for (int i = 0; i < slices_; ++i, ++input) {
      const Tensor& value = ctx->input(input);
      const int64_t rows = value.dims() > 0 ? value.dim_size(0) : 0,
                    last = std::max(first_[i], first_[i] + (turns_ - 1) * step_[i]);
      OP_REQUIRES(ctx, last < rows,
                  invalid("sliced tensor ", i, " of WhaleLoop has the shape ",
                          value.shape().DebugString(), "; expected more than ", last, " rows"));
      const int64_t own = value.NumElements() / rows;
      OP_REQUIRES_OK(ctx, check(LoopBuffer::kSlice, i, own));
      buffers.slices.push_back({value.flat<T>().data(), first_[i] * own, step_[i] * own});
    }
    for (int i = 0; i < same_; ++i, ++input) {
      const Tensor& value = ctx->input(input);
      OP_REQUIRES_OK(ctx, check(LoopBuffer::kSame, i, value.NumElements()));
      buffers.same.push_back(value.flat<T>().data());
    }
    for (int i = 0; i < states_; ++i, ++input) {
      const Tensor& value = ctx->input(input);
      Tensor* last = nullptr;
      OP_REQUIRES_OK(ctx, check(LoopBuffer::kState, i, value.NumElements()));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, value.shape(), &last));
      buffers.states.push_back(
          {value.flat<T>().data(), last->flat<T>().data(), value.NumElements()});
    }
    for (size_t i = 0; i < stacked_shapes_.size(); ++i) {
      Tensor* result = nullptr;
      const int64_t own = stacked_shapes_[i].num_elements() / turns_;
      OP_REQUIRES_OK(ctx, check(LoopBuffer::kStacked, i, own));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(states_ + i, stacked_shapes_[i], &result));
      buffers.stacked.push_back({result->flat<T>().data(), own});
    }
    const Eigen::ThreadPoolDevice& device = ctx->eigen_cpu_device();
    const bool alone = device.numThreads() == 1;
    whale::run_loop<T>(
        program_, buffers, turns_,
        [&](int64_t count, int64_t cycles, const std::function<void(int64_t, int64_t)>& work) {
          if (alone || count == 1) return work(0, count);
          device.parallelFor(count, Eigen::TensorOpCost(0, 0, static_cast<double>(cycles)), work);
        });
  }

 private:
  absl::Status check(LoopBuffer kind, size_t index, int64_t elements) const {
    const std::vector<int64_t>& expected = program_.elements[static_cast<int>(kind)];
    if (index >= expected.size() || expected[index] <= elements) return absl::OkStatus();
    return invalid("tensor ", index, " of kind '", std::string(1, letter(kind)),
                   "' (x: sliced, w: whole, s: state, y: stacked) of WhaleLoop has ", elements,
                   " elements an iteration; its program expects ", expected[index]);
  }

  static char letter(LoopBuffer kind) { return whale::kLoopLetters[static_cast<int>(kind)]; }

  whale::LoopProgram program_;
  int64_t turns_ = 0;
  std::vector<int64_t> first_, step_;  // of each sliced tensor, in rows
  std::vector<TensorShape> stacked_shapes_;
  int slices_ = 0, same_ = 0, states_ = 0;
};

}  // namespace

REGISTER_OP("WhaleLoop")
    .Input("slices: X * T")
    .Input("same: W * T")
    .Input("states: S * T")
    .Output("last: S * T")
    .Output("stacked: Y * T")
    .Attr("program: list(string)")
    .Attr("turns: int >= 1")
    .Attr("first: list(int)")
    .Attr("step: list(int)")
    .Attr("stacked_shapes: list(shape)")
    .Attr("flops: int >= 0 = 0")
    .Attr("scratch_bytes: int >= 0 = 0")
    .Attr("X: int >= 0")
    .Attr("W: int >= 0")
    .Attr("S: int >= 0")
    .Attr("Y: int >= 0")
    .Attr("T: {float, double}")
    .SetShapeFn([](InferenceContext* c) {
      int slices, same, states;
      std::vector<PartialTensorShape> stacked;
      TF_RETURN_IF_ERROR(c->GetAttr("X", &slices));
      TF_RETURN_IF_ERROR(c->GetAttr("W", &same));
      TF_RETURN_IF_ERROR(c->GetAttr("S", &states));
      TF_RETURN_IF_ERROR(c->GetAttr("stacked_shapes", &stacked));
      for (int i = 0; i < states; ++i) c->set_output(i, c->input(slices + same + i));
      for (int i = states; i < c->num_outputs(); ++i) {
        ShapeHandle shape;
        const size_t number = i - states;
        if (number >= stacked.size())
          return invalid(
              "the attribute stacked_shapes of WhaleLoop has fewer shapes than the op has stacked "
              "results");
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(stacked[number], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc(
        "Turns of a loop. slices: tensors of which turn t reads row first + t step; same: tensors "
        "that each turn reads whole; states: what the first turn begins with. last: the states "
        "after "
        "the last turn; stacked: what each turn gives, as rows. program: the steps of a turn "
        "(core/compute/loop_program.h). flops, scratch_bytes: of all turns, and of memory beside "
        "the "
        "results, for predictions.");

WHALE_CPU_KERNEL_FOR("WhaleLoop", "T", float, LoopKernel);
WHALE_CPU_KERNEL_FOR("WhaleLoop", "T", double, LoopKernel);

}  // namespace whale_ops
