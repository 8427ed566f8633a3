// AllReduce and ReduceScatter.
#include <mutex>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/tf_kernels/communication/reduction.h"

namespace whale_ops {
namespace {

class AllReduceOp : public CommunicationOp {
 public:
  explicit AllReduceOp(OpKernelConstruction* ctx) : CommunicationOp(ctx), attributes_(ctx) {}

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    const int n = ctx->num_inputs() - 1;
    int64_t elements = 0;
    std::string text = shapes_.of(ctx, 1, n);
    std::vector<const char*> sources(n);
    std::vector<Tensor> outputs(n);
    for (int i = 0; i < n; ++i) {
      // No copy of the Tensor is kept: a second reference would prevent its memory from being
      // reused below.
      const Tensor& input = ctx->input(i + 1);
      elements += input.NumElements();
      sources[i] = data_of(input);
    }
    for (int i = 0; i < n; ++i) {
      Tensor* output = nullptr;
      const TensorShape shape = ctx->input(i + 1).shape();
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({i + 1}, i, shape, &output));
      outputs[i] = *output;
    }
    whale::Request request =
        make_request(whale::OpKind::kAllReduce, attributes_.wire_dtype, std::move(text));
    request.reduction = attributes_.reduction;
    request.counts = {elements};
    if (attributes_.wire_dtype == attributes_.dtype) {
      for (int i = 0; i < n; ++i) {
        if (outputs[i].NumElements() == 0) continue;
        request.pieces.push_back({sources[i], data_of(outputs[i]), outputs[i].NumElements()});
        if (sources[i] != data_of(outputs[i])) outputs.push_back(ctx->input(i + 1));
      }
      request.owner = owner_of(std::move(outputs));
      return launch_last(ctx, group, std::move(request), std::move(*done));
    }
    // Elements that travel in another dtype than the tensors' go through a buffer that is kept from
    // step to step.
    const int64_t bytes = elements * static_cast<int64_t>(request.element_bytes);
    Tensor staging;
    TF_RETURN_IF_ERROR(take_staging(ctx, bytes, &staging));
    char* position = data_of(staging);
    for (int i = 0; i < n; ++i) position += pack(sources[i], outputs[i], position);
    request.input = request.output = data_of(staging);
    request.owner = owner_of(staging);
    std::function<void()> finish = [this, staging = std::move(staging),
                                    outputs = std::move(outputs)] {
      const char* from = data_of(staging);
      for (const Tensor& output : outputs) from += unpack(from, output);
      give_staging(staging);
    };
    return launch_last(ctx, group, std::move(request), std::move(*done), bytes, std::move(finish));
  }

 private:
  // Writes the tensor's elements in the wire dtype to `wire`, and returns their bytes.
  size_t pack(const char* source, const Tensor& like, char* wire) const {
    const auto elements = static_cast<size_t>(like.NumElements());
    whale::narrow_floats(to_core(attributes_.wire_dtype), reinterpret_cast<const float*>(source),
                         wire, elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(attributes_.wire_dtype));
  }
  size_t unpack(const char* wire, const Tensor& output) const {
    const auto elements = static_cast<size_t>(output.NumElements());
    whale::widen_floats(to_core(attributes_.wire_dtype), wire,
                        reinterpret_cast<float*>(data_of(output)), elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(attributes_.wire_dtype));
  }
  absl::Status take_staging(OpKernelContext* ctx, int64_t bytes, Tensor* staging) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (!free_.empty()) {
        *staging = std::move(free_.back());
        free_.pop_back();
        if (staging->NumElements() == bytes) return absl::OkStatus();
      }
    }
    return ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), staging);
  }
  void give_staging(const Tensor& staging) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(staging);
  }

  const ReduceAttributes attributes_;
  ShapeText shapes_;
  std::mutex mutex_;  // guards what follows
  std::vector<Tensor> free_;
};

class ReduceScatterOp : public TensorOp {
 public:
  explicit ReduceScatterOp(OpKernelConstruction* ctx)
      : TensorOp(ctx), division_(ctx, "axis", "sizes") {
    read_reduction(ctx, &reduction_);
  }

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    const Tensor& input = ctx->input(1);
    if (!division_.fits_whole(input.shape(), group.size)) {
      return refused(
          whale::OpKind::kReduceScatter, group, input,
          absl::StrCat(division_.text(), " for ", group.size,
                       " ranks; expected one size per rank that add up to the input's dimension"));
    }
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(0, division_.part(input.shape(), group.index), &output));
    const AxisView view(input.shape(), division_.axis);
    whale::Request request =
        request_of(whale::OpKind::kReduceScatter,
                   absl::StrCat(input.shape().DebugString(), " ", division_.text()));
    request.reduction = reduction_;
    request.counts = view.counts(division_.sizes);
    Tensor parts;
    TF_RETURN_IF_ERROR(in_parts(ctx, input, view, division_.sizes, &parts));
    request.input = data_of(parts);
    request.output = data_of(*output);
    request.owner = owner_of(*output, std::move(parts));
    return launch_last(ctx, group, std::move(request), std::move(*done));
  }

 private:
  const Division division_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
};

}  // namespace

WHALE_CPU_KERNEL("WhaleAllReduce", AllReduceOp);
WHALE_CPU_KERNEL("WhaleReduceScatter", ReduceScatterOp);

}  // namespace whale_ops
