// AllGather and AllToAll, which arrange parts along a dimension.
#include <cstring>
#include <numeric>

#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

class AllGatherOp : public TensorOp {
 public:
  explicit AllGatherOp(OpKernelConstruction* ctx)
      : TensorOp(ctx), division_(ctx, "axis", "sizes") {}

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    if (ctx->num_outputs() > 1) return gather_several(ctx, group, done);
    const Tensor& input = ctx->input(1);
    if (!division_.is_in(input.shape())) {
      return refused(whale::OpKind::kAllGather, group, input,
                     absl::StrCat("axis ", division_.axis, "; expected one of its dimensions"));
    }
    if (!division_.sizes.empty()) return gather(ctx, group, division_, done);
    // Exchanges the sizes first. The numbers live until the network no longer needs them.
    struct Sizes {
      int64_t own;
      Division all;
    };
    auto sizes = std::make_shared<Sizes>(Sizes{input.dim_size(division_.axis), division_});
    sizes->all.sizes.assign(group.size, 0);
    whale::Request request = make_request(whale::OpKind::kAllGather, tensorflow::DT_INT64,
                                          absl::StrCat("sizes along axis ", division_.axis));
    request.key += "/sizes";
    request.counts.assign(group.size, 1);
    request.input = &sizes->own;
    request.output = sizes->all.sizes.data();
    request.owner = sizes;
    launch(ctx, group, std::move(request),
           [this, ctx, group, sizes, done = std::move(*done)](const whale::Status& status) {
             proceed(ctx, status, done,
                     [&](DoneCallback* own) { return gather(ctx, group, sizes->all, own); });
           });
    return absl::OkStatus();
  }

 private:
  absl::Status gather(OpKernelContext* ctx, const Group& group, const Division& division,
                      DoneCallback* done) {
    const Tensor& input = ctx->input(1);
    if (!division.fits_part(input.shape(), group.size, group.index)) {
      return refused(
          whale::OpKind::kAllGather, group, input,
          absl::StrCat(division.text(), " for ", group.size,
                       " ranks; expected one size per rank, this rank's own size at index ",
                       group.index));
    }
    const TensorShape shape = division.whole(input.shape());
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
    const AxisView view(shape, division.axis);
    whale::Request request = request_of(whale::OpKind::kAllGather,
                                        absl::StrCat(shape.DebugString(), " ", division.text()));
    request.counts = view.counts(division.sizes);
    Tensor received;
    std::function<void()> finish;
    TF_RETURN_IF_ERROR(for_parts(ctx, *output, view, division.sizes, &received, &finish));
    request.input = data_of(input);
    request.output = data_of(received);
    const auto finish_bytes = static_cast<int64_t>(received.TotalBytes());
    request.owner = owner_of(input, std::move(received));
    return launch_last(ctx, group, std::move(request), std::move(*done), finish_bytes,
                       std::move(finish));
  }

  // Gathers several tensors as one message, which contains this rank's part of each tensor. It lies
  // at this rank's place in the memory that receives the parts of all ranks, from where they are
  // copied to the tensors.
  absl::Status gather_several(OpKernelContext* ctx, const Group& group, DoneCallback* done) {
    const int n = ctx->num_outputs();
    std::vector<Dealt> tensors;
    std::vector<int64_t> counts(group.size, 0);
    uint64_t shapes = 0;
    for (int i = 0; i < n; ++i) {
      const Tensor& input = ctx->input(i + 1);
      if (!division_.fits_part(input.shape(), group.size, group.index)) {
        return refused(
            whale::OpKind::kAllGather, group, input,
            absl::StrCat("tensor ", i + 1, " of ", n, ", ", division_.text(), " for ", group.size,
                         " ranks; expected one size per rank, this rank's own size at index ",
                         group.index));
      }
      const TensorShape shape = division_.whole(input.shape());
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, shape, &output));
      tensors.push_back({*output, AxisView(shape, division_.axis)});
      const std::vector<int64_t> each = tensors.back().view.counts(division_.sizes);
      for (size_t rank = 0; rank < group.size; ++rank) counts[rank] += each[rank];
      const auto dims = shape.dim_sizes();
      shapes = whale::hash64(dims.data(), dims.size() * sizeof(dims[0]), shapes);
    }
    Tensor message;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype(), TensorShape({total(counts)}), &message));
    const int64_t element_bytes = tensorflow::DataTypeSize(dtype());
    char* own =
        data_of(message) +
        element_bytes * std::accumulate(counts.begin(), counts.begin() + group.index, int64_t{0});
    char* position = own;
    for (int i = 0; i < n; ++i) {
      const Tensor& input = ctx->input(i + 1);
      std::memcpy(position, data_of(input), input.TotalBytes());
      position += input.TotalBytes();
    }
    whale::Request request =
        request_of(whale::OpKind::kAllGather,
                   absl::StrCat(n, " tensors, ", division_.text(), ", shapes ", shapes));
    request.counts = counts;
    request.input = own;
    request.output = data_of(message);
    const auto finish_bytes = static_cast<int64_t>(message.TotalBytes());
    request.owner = owner_of(message);
    std::function<void()> finish = [tensors = std::move(tensors), message = std::move(message),
                                    sizes = division_.sizes, element_bytes] {
      const char* from = data_of(message);
      for (size_t rank = 0; rank < sizes.size(); ++rank) {
        for (const Dealt& one : tensors) from = one.deal(from, sizes, rank, element_bytes);
      }
    };
    return launch_last(ctx, group, std::move(request), std::move(*done), finish_bytes,
                       std::move(finish));
  }

  // A result, into which the ranks' parts are copied.
  struct Dealt {
    Tensor whole;
    AxisView view;

    // Copies the part of a rank, which begins at `from`, and returns the end of the part.
    const char* deal(const char* from, const std::vector<int64_t>& sizes, size_t rank,
                     int64_t element_bytes) const {
      const int64_t inner_bytes = view.inner * element_bytes;
      const int64_t run = sizes[rank] * inner_bytes;
      char* to = data_of(whole) +
                 inner_bytes * std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
      for (int64_t o = 0; o < view.outer; ++o, from += run, to += total(sizes) * inner_bytes)
        std::memcpy(to, from, static_cast<size_t>(run));
      return from;
    }
  };

  const Division division_;
};

class AllToAllOp : public TensorOp {
 public:
  explicit AllToAllOp(OpKernelConstruction* ctx) : TensorOp(ctx), redivision_(ctx) {}

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    const Tensor& input = ctx->input(1);
    const auto& [split, concat] = redivision_;
    if (!redivision_.fits(input.shape(), group.size, group.index)) {
      return refused(
          whale::OpKind::kAllToAll, group, input,
          absl::StrCat(redivision_.text(), " for ", group.size, " ranks; ", Redivision::kExpected));
    }
    const TensorShape whole = concat.whole(input.shape());
    const TensorShape shape = split.part(whole, group.index);
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
    whale::Request request = request_of(whale::OpKind::kAllToAll,
                                        absl::StrCat(whole.DebugString(), " ", redivision_.text()));
    const AxisView from(input.shape(), split.axis), to(shape, concat.axis);
    request.counts = from.counts(split.sizes);
    request.recv_counts = to.counts(concat.sizes);
    request.even = redivision_.is_even();
    Tensor sent, received;
    std::function<void()> finish;
    TF_RETURN_IF_ERROR(in_parts(ctx, input, from, split.sizes, &sent));
    TF_RETURN_IF_ERROR(for_parts(ctx, *output, to, concat.sizes, &received, &finish));
    request.input = data_of(sent);
    request.output = data_of(received);
    const auto finish_bytes = static_cast<int64_t>(received.TotalBytes());
    request.owner = owner_of(std::move(sent), std::move(received));
    return launch_last(ctx, group, std::move(request), std::move(*done), finish_bytes,
                       std::move(finish));
  }

 private:
  const Redivision redivision_;
};

}  // namespace

WHALE_CPU_KERNEL("WhaleAllGather", AllGatherOp);
WHALE_CPU_KERNEL("WhaleAllToAll", AllToAllOp);

}  // namespace whale_ops
