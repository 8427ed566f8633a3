// AllGather and AllToAll: laying out parts along a dimension.
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class AllGatherOp : public TensorOp {
 public:
  explicit AllGatherOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read(ctx, "axis", &axis_, "sizes", &sizes_);
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    OP_REQUIRES_ASYNC(ctx, axis_ >= 0 && axis_ < input.dims(),
                      absl::InvalidArgumentError(absl::StrCat(
                          "AllGather '", key(), "': axis is ", axis_, " for an input of shape ",
                          input.shape().DebugString(), "; expected one of its dimensions")),
                      done);
    if (!sizes_.empty()) {
      gather(ctx, group, sizes_, std::move(done));
      return;
    }
    // Sizes first. The exchanged numbers live until the network has let go of them.
    struct Sizes {
      int64_t own;
      std::vector<int64_t> all;
    };
    auto sizes = std::make_shared<Sizes>();
    sizes->own = input.dim_size(axis_);
    sizes->all.assign(group.size, 0);
    whale::Request request = make_request(whale::OpKind::kAllGather, tensorflow::DT_INT64,
                                          absl::StrCat("sizes along axis ", axis_));
    request.key += "/sizes";
    request.counts.assign(sizes->all.size(), 1);
    request.input = &sizes->own;
    request.output = sizes->all.data();
    request.owner = sizes;
    launch(ctx, group, std::move(request),
           [this, ctx, group, sizes, done = std::move(done)](const whale::Status& status) {
             status.ok() ? gather(ctx, group, sizes->all, done) : end(ctx, status, done);
           });
  }

 private:
  void gather(OpKernelContext* ctx, const Group& group, const std::vector<int64_t>& sizes,
              DoneCallback done) {
    const Tensor& input = ctx->input(1);
    OP_REQUIRES_ASYNC(
        ctx, sizes.size() == group.size && sizes[group.index] == input.dim_size(axis_),
        absl::InvalidArgumentError(absl::StrCat(
            "AllGather '", key(), "' on rank ", group.endpoint->rank(), ": input of shape ",
            input.shape().DebugString(), " along axis ", axis_, ", sizes ", join_sizes(sizes),
            " for ", group.size, " ranks; expected one size per rank, this rank's own at index ",
            group.index)),
        done);
    TensorShape shape = input.shape();
    shape.set_dim(axis_, total(sizes));
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    const AxisView view(shape, axis_);
    whale::Request request = request_of(
        whale::OpKind::kAllGather,
        absl::StrCat(shape.DebugString(), " axis ", axis_, " sizes ", join_sizes(sizes)));
    request.counts = view.counts(sizes);
    Tensor received;
    std::function<void()> finish;
    OP_REQUIRES_OK_ASYNC(ctx, for_parts(ctx, *output, view, sizes, &received, &finish), done);
    request.input = data_of(input);
    request.output = data_of(received);
    const auto finish_bytes = static_cast<int64_t>(received.TotalBytes());
    request.owner = owner_of(input, std::move(received));
    launch_last(ctx, group, std::move(request), std::move(done), finish_bytes, std::move(finish));
  }

  int axis_ = 0;
  std::vector<int64_t> sizes_;
};

class AllToAllOp : public TensorOp {
 public:
  explicit AllToAllOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read(ctx, "split_axis", &split_axis_, "split_sizes", &split_sizes_);
    read(ctx, "concat_axis", &concat_axis_, "concat_sizes", &concat_sizes_);
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    const bool axes_fit = split_axis_ >= 0 && split_axis_ < input.dims() && concat_axis_ >= 0 &&
                          concat_axis_ < input.dims() && split_axis_ != concat_axis_;
    OP_REQUIRES_ASYNC(
        ctx,
        axes_fit && split_sizes_.size() == group.size && concat_sizes_.size() == group.size &&
            input.dim_size(split_axis_) == total(split_sizes_) &&
            input.dim_size(concat_axis_) == concat_sizes_[group.index],
        absl::InvalidArgumentError(absl::StrCat(
            "AllToAll '", key(), "' on rank ", group.endpoint->rank(), ": input of shape ",
            input.shape().DebugString(), ", split axis ", split_axis_, " sizes ",
            join_sizes(split_sizes_), ", concat axis ", concat_axis_, " sizes ",
            join_sizes(concat_sizes_), " for ", group.size,
            " ranks; expected all of the split axis and this rank's share of the concat axis")),
        done);
    TensorShape whole = input.shape(), shape = input.shape();
    whole.set_dim(concat_axis_, total(concat_sizes_));
    shape.set_dim(split_axis_, split_sizes_[group.index]);
    shape.set_dim(concat_axis_, total(concat_sizes_));
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    whale::Request request = request_of(
        whale::OpKind::kAllToAll, absl::StrCat(whole.DebugString(), " split axis ", split_axis_,
                                               " sizes ", join_sizes(split_sizes_), " concat axis ",
                                               concat_axis_, " sizes ", join_sizes(concat_sizes_)));
    const AxisView from(input.shape(), split_axis_), to(shape, concat_axis_);
    request.counts = from.counts(split_sizes_);
    request.recv_counts = to.counts(concat_sizes_);
    Tensor sent, received;
    std::function<void()> finish;
    OP_REQUIRES_OK_ASYNC(ctx, in_parts(ctx, input, from, split_sizes_, &sent), done);
    OP_REQUIRES_OK_ASYNC(ctx, for_parts(ctx, *output, to, concat_sizes_, &received, &finish), done);
    request.input = data_of(sent);
    request.output = data_of(received);
    const auto finish_bytes = static_cast<int64_t>(received.TotalBytes());
    request.owner = owner_of(std::move(sent), std::move(received));
    launch_last(ctx, group, std::move(request), std::move(done), finish_bytes, std::move(finish));
  }

 private:
  int split_axis_ = 0;
  int concat_axis_ = 0;
  std::vector<int64_t> split_sizes_;
  std::vector<int64_t> concat_sizes_;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("WhaleAllGather").Device(tensorflow::DEVICE_CPU), AllGatherOp);
REGISTER_KERNEL_BUILDER(Name("WhaleAllToAll").Device(tensorflow::DEVICE_CPU), AllToAllOp);

}  // namespace whale_ops
