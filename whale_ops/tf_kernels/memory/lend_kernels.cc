// Values: reads many variables by one op. Lend: lets peers of the machine read tensors in place
// (core/transport/arena.h).
#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/core/transport/arena.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using whale::Arena;

absl::Status copy(OpKernelContext* ctx, const Tensor& from, Tensor* made) {
  if (!tensorflow::DataTypeCanUseMemcpy(from.dtype())) {
    return invalid("tensors of dtype ", tensorflow::DataTypeString(from.dtype()),
                   " cannot be copied byte by byte; expected numbers");
  }
  TF_RETURN_IF_ERROR(ctx->allocate_temp(from.dtype(), from.shape(), made));
  copy_elements(from, made);
  return absl::OkStatus();
}

// The same as TensorFlow's ReadVariableOp for many variables, since the executor's overhead for a
// node is larger than the work.
class ValuesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      VariablePtr variable;
      OP_REQUIRES_OK(ctx, find_variable(ctx, i, &variable));
      tensorflow::tf_shared_lock lock(*variable->mu());
      Tensor value = *variable->tensor();
      OP_REQUIRES(ctx, variable->is_initialized && value.dtype() == output_type(i),
                  absl::FailedPreconditionError(absl::StrCat(
                      "variable ", i, " of those that WhaleValues reads ",
                      variable->is_initialized ? "has another dtype than the op's output"
                                               : "has not been initialised")));
      // A variable that is updated row by row changes in place even if others refer to its memory,
      // so it is copied.
      if (variable->copy_on_read_mode.load())
        OP_REQUIRES_OK(ctx, copy(ctx, *variable->tensor(), &value));
      ctx->set_output(i, value);
    }
  }
};

// As long as the outputs live, peers may read the tensors at `places`.
class LendOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Arena* arena = Arena::instance();
    OP_REQUIRES(ctx, arena != nullptr,
                absl::FailedPreconditionError("this process cannot lend tensors to other ranks, "
                                              "since it shares no memory with them"));
    const int count = ctx->num_inputs();
    Tensor* places = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(count, TensorShape({count}), &places));
    for (int i = 0; i < count; ++i) {
      Tensor lent = ctx->input(i);
      if (!arena->holds(data_of(lent))) OP_REQUIRES_OK(ctx, copy(ctx, ctx->input(i), &lent));
      const char* data = data_of(lent);
      OP_REQUIRES(ctx, arena->holds(data),
                  invalid("a tensor of ", lent.TotalBytes(),
                          " bytes does not lie in the memory that ranks share; expected a tensor "
                          "of at least 256 KiB"));
      places->vec<int64_t>()(i) = static_cast<int64_t>(arena->offset_of(data));
      ctx->set_output(i, lent);
    }
  }
};

}  // namespace

REGISTER_OP("WhaleValues")
    .Input("variables: N * resource")
    .Output("values: T")
    .Attr("N: int >= 1")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc("What variables hold now.");

REGISTER_OP("WhaleLend")
    .Input("inputs: T")
    .Output("lent: T")
    .Output("places: int64")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      c->set_output(c->num_inputs(), c->Vector(c->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(
        "The inputs, of 256 KiB or more each, in memory that peers of the machine have mapped, and "
        "where they lie in it.");

WHALE_CPU_KERNEL("WhaleValues", ValuesOp);
WHALE_CPU_KERNEL("WhaleLend", LendOp);

}  // namespace whale_ops
