// Softmax cross-entropy with integer labels and its gradient, in three passes over each row.

#include <string>

#include "whale_ops/core/compute/cross_entropy.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

constexpr double kCycles = 4;  // cycles of an element

template <typename Label>
class CrossEntropyOp : public OpKernel {
 public:
  explicit CrossEntropyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& features = ctx->input(0);
    const Tensor& labels = ctx->input(1);
    OP_REQUIRES(ctx, features.dims() == 2 && labels.shape() == TensorShape({features.dim_size(0)}),
                invalid("WhaleSparseCrossEntropy has logits of shape ",
                        features.shape().DebugString(), " and labels of shape ",
                        labels.shape().DebugString(), "; expected [rows, classes] and [rows]"));
    const int64_t rows = features.dim_size(0), classes = features.dim_size(1);
    const auto numbers = labels.flat<Label>();
    for (int64_t row = 0; row < rows; ++row) {
      OP_REQUIRES(ctx, numbers(row) >= 0 && numbers(row) < classes,
                  invalid("Received a label value of ", numbers(row),
                          " which is outside the valid range of [0, ", classes, ")."));
    }
    Tensor *loss = nullptr, *gradient = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {rows}, &loss));
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 1, features.shape(), &gradient));
    const float* logits = features.flat<float>().data();
    float *losses = loss->flat<float>().data(), *to = gradient->flat<float>().data();
    const Eigen::TensorOpCost cost(sizeof(float) * classes, sizeof(float) * classes,
                                   kCycles * classes);
    ctx->eigen_cpu_device().parallelFor(rows, cost, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        losses[row] =
            whale::cross_entropy(logits + row * classes, classes, numbers(row), to + row * classes);
      }
    });
  }
};

}  // namespace

REGISTER_OP("WhaleSparseCrossEntropy")
    .Input("features: float")
    .Input("labels: Tlabels")
    .Output("loss: float")
    .Output("backprop: float")
    .Attr("Tlabels: {int32, int64} = DT_INT64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle features, labels;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &features));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &labels));
      c->set_output(0, c->Vector(c->Dim(features, 0)));
      c->set_output(1, features);
      return absl::OkStatus();
    })
    .Doc(
        "What SparseSoftmaxCrossEntropyWithLogits gives of [rows, classes] logits and [rows] "
        "labels.");

WHALE_CPU_KERNEL_FOR("WhaleSparseCrossEntropy", "Tlabels", int32_t, CrossEntropyOp);
WHALE_CPU_KERNEL_FOR("WhaleSparseCrossEntropy", "Tlabels", int64_t, CrossEntropyOp);

}  // namespace whale_ops
