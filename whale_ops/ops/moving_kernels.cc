// AllGather and AllToAll: laying out parts along a dimension.
#include "whale_ops/ops/common.h"

namespace whale_ops {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class AllGatherOp : public CommunicationOp {
 public:
  explicit AllGatherOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    size_t bytes;
    OP_REQUIRES_OK(ctx, fixed_element_bytes(dtype_, &bytes));
  }

 protected:
  void start(OpKernelContext* ctx, const EndpointPtr& endpoint, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    OP_REQUIRES_ASYNC(ctx, axis_ >= 0 && axis_ < input.dims(),
                      absl::InvalidArgumentError(absl::StrCat("AllGather '", key(), "': axis is ", axis_, " for an input of shape ",
                                                              input.shape().DebugString(), "; expected one of its dimensions")),
                      done);
    if (!sizes_.empty()) {
      gather(ctx, endpoint, sizes_, std::move(done));
      return;
    }
    // Sizes first. The exchanged numbers live until the network has let go of them.
    struct Sizes {
      int64_t own;
      std::vector<int64_t> all;
    };
    auto sizes = std::make_shared<Sizes>();
    sizes->own = input.dim_size(axis_);
    sizes->all.assign(group_size(*endpoint), 0);
    whale::Request request = make_request(whale::OpKind::kAllGather, tensorflow::DT_INT64, absl::StrCat("sizes along axis ", axis_));
    request.key += "/sizes";
    request.counts.assign(sizes->all.size(), 1);
    request.input = &sizes->own;
    request.output = sizes->all.data();
    launch_with(
        ctx, endpoint,
        [endpoint, sizes, shared = std::make_shared<whale::Request>(std::move(request))](uint64_t id, auto finished) {
          shared->owner = sizes;
          shared->done = [finished = std::move(finished)](const whale::Status& status) { finished(status, {}); };
          endpoint->submit(id, std::move(*shared));
        },
        [this, ctx, endpoint, sizes, done = std::move(done)](const whale::Status& status, std::vector<std::string>) {
          if (status.ok()) {
            gather(ctx, endpoint, sizes->all, done);
          } else {
            ctx->SetStatus(to_tensorflow(status));
            done();
          }
        });
  }

 private:
  void gather(OpKernelContext* ctx, const EndpointPtr& endpoint, const std::vector<int64_t>& sizes, DoneCallback done) {
    const Tensor& input = ctx->input(1);
    const int index = group_index(*endpoint);
    OP_REQUIRES_ASYNC(ctx, sizes.size() == group_size(*endpoint) && sizes[index] == input.dim_size(axis_),
                      absl::InvalidArgumentError(absl::StrCat(
                          "AllGather '", key(), "' on rank ", endpoint->rank(), ": input of shape ", input.shape().DebugString(),
                          " along axis ", axis_, ", sizes ", join_sizes(sizes), " for ", group_size(*endpoint),
                          " ranks; expected one size per rank, this rank's own at index ", index)),
                      done);
    TensorShape shape = input.shape();
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    shape.set_dim(axis_, sum);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    const AxisView view = view_around(input.shape(), axis_);
    whale::Request request = make_request(whale::OpKind::kAllGather, dtype_,
                                          absl::StrCat(shape.DebugString(), " axis ", axis_, " sizes ", join_sizes(sizes)));
    const int64_t inner_bytes = view.inner * static_cast<int64_t>(request.element_bytes);
    for (const int64_t size : sizes) request.counts.push_back(view.outer * size * view.inner);
    request.input = data_of(input);
    if (view.outer == 1) {
      request.output = data_of(*output);
      launch_last(ctx, endpoint, std::move(request), together(input, *output), 0, nullptr, std::move(done));
      return;
    }
    Tensor parts;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_temp(dtype_, TensorShape({shape.num_elements()}), &parts), done);
    request.output = data_of(parts);
    const auto parts_bytes = static_cast<int64_t>(parts.TotalBytes());
    std::vector<Tensor> tensors = together(input, parts);
    std::function<void()> finish = [parts = std::move(parts), whole = *output, view, sizes, inner_bytes] {
      unpack_parts(data_of(parts), data_of(whole), view.outer, sizes, inner_bytes);
    };
    launch_last(ctx, endpoint, std::move(request), std::move(tensors), parts_bytes, std::move(finish), std::move(done));
  }

  int axis_ = 0;
  std::vector<int64_t> sizes_;
  DataType dtype_;
};

class AllToAllOp : public CommunicationOp {
 public:
  explicit AllToAllOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("split_axis", &split_axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("split_sizes", &split_sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("concat_axis", &concat_axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("concat_sizes", &concat_sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    size_t bytes;
    OP_REQUIRES_OK(ctx, fixed_element_bytes(dtype_, &bytes));
  }

 protected:
  void start(OpKernelContext* ctx, const EndpointPtr& endpoint, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    const size_t members = group_size(*endpoint);
    const int index = group_index(*endpoint);
    int64_t split_sum = 0, concat_sum = 0;
    for (const int64_t size : split_sizes_) split_sum += size;
    for (const int64_t size : concat_sizes_) concat_sum += size;
    const bool axes_fit = split_axis_ >= 0 && split_axis_ < input.dims() && concat_axis_ >= 0 && concat_axis_ < input.dims() &&
                          split_axis_ != concat_axis_;
    OP_REQUIRES_ASYNC(ctx,
                      axes_fit && split_sizes_.size() == members && concat_sizes_.size() == members &&
                          input.dim_size(split_axis_) == split_sum && input.dim_size(concat_axis_) == concat_sizes_[index],
                      absl::InvalidArgumentError(absl::StrCat(
                          "AllToAll '", key(), "' on rank ", endpoint->rank(), ": input of shape ", input.shape().DebugString(),
                          ", split axis ", split_axis_, " sizes ", join_sizes(split_sizes_), ", concat axis ", concat_axis_,
                          " sizes ", join_sizes(concat_sizes_), " for ", members,
                          " ranks; expected all of the split axis and this rank's share of the concat axis")),
                      done);
    TensorShape whole = input.shape(), shape = input.shape();
    whole.set_dim(concat_axis_, concat_sum);
    shape.set_dim(split_axis_, split_sizes_[index]);
    shape.set_dim(concat_axis_, concat_sum);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    whale::Request request =
        make_request(whale::OpKind::kAllToAll, dtype_,
                     absl::StrCat(whole.DebugString(), " split axis ", split_axis_, " sizes ", join_sizes(split_sizes_),
                                  " concat axis ", concat_axis_, " sizes ", join_sizes(concat_sizes_)));
    const AxisView from = view_around(input.shape(), split_axis_);
    const AxisView to = view_around(shape, concat_axis_);
    const auto element_bytes = static_cast<int64_t>(request.element_bytes);
    for (size_t i = 0; i < members; ++i) {
      request.counts.push_back(from.outer * split_sizes_[i] * from.inner);
      request.recv_counts.push_back(to.outer * concat_sizes_[i] * to.inner);
    }
    Tensor sent = input, received = *output;
    if (from.outer > 1) {
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_temp(dtype_, TensorShape({input.NumElements()}), &sent), done);
      pack_parts(data_of(input), data_of(sent), from.outer, split_sizes_, from.inner * element_bytes);
    }
    std::function<void()> finish;
    if (to.outer > 1) {
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_temp(dtype_, TensorShape({shape.num_elements()}), &received), done);
      finish = [received, result = *output, to, sizes = concat_sizes_, element_bytes] {
        unpack_parts(data_of(received), data_of(result), to.outer, sizes, to.inner * element_bytes);
      };
    }
    request.input = data_of(sent);
    request.output = data_of(received);
    const auto finish_bytes = static_cast<int64_t>(received.TotalBytes());
    launch_last(ctx, endpoint, std::move(request), together(std::move(sent), std::move(received)), finish_bytes,
                std::move(finish), std::move(done));
  }

 private:
  int split_axis_ = 0;
  int concat_axis_ = 0;
  std::vector<int64_t> split_sizes_;
  std::vector<int64_t> concat_sizes_;
  DataType dtype_;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("WhaleAllGather").Device(tensorflow::DEVICE_CPU), AllGatherOp);
REGISTER_KERNEL_BUILDER(Name("WhaleAllToAll").Device(tensorflow::DEVICE_CPU), AllToAllOp);

}  // namespace whale_ops
