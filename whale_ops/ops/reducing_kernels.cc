// AllReduce, in the host's memory and in a device's, and ReduceScatter.
#include <mutex>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/device/device_rank.h"
#include "whale_ops/ops/common.h"
#if __has_include("xla/stream_executor/stream.h")
#include "xla/stream_executor/stream.h"
#else
#include "tensorflow/compiler/xla/stream_executor/stream.h"  // TensorFlow 2.15
#endif

namespace whale_ops {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// All shapes of a kernel's inputs in words; of the last call where they are the same, since a hundred of them take long to write.
class ShapeText {
 public:
  // `first`: index of the first of `n` inputs.
  std::string of(OpKernelContext* ctx, int first, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool same = shapes_.size() == static_cast<size_t>(n);
    for (int i = 0; i < n && same; ++i) same = ctx->input(first + i).shape() == shapes_[i];
    if (same) return text_;
    shapes_.clear();
    text_.clear();
    int64_t elements = 0;
    for (int i = 0; i < n; ++i) {
      shapes_.push_back(ctx->input(first + i).shape());
      elements += shapes_.back().num_elements();
      text_ += (i > 0 ? " " : "") + shapes_.back().DebugString();
    }
    if (text_.size() > 200) {
      text_ = absl::StrCat(n, " tensors ", text_.substr(0, 160), "..., ", elements, " elements, shapes ", whale::hash64(text_));
    }
    return text_;
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::vector<TensorShape> shapes_;
  std::string text_;
};

// What kernels that add up tensors are told: how, of which dtype, and of which one while they travel.
struct Reducing {
  explicit Reducing(OpKernelConstruction* ctx) {
    std::string wire, key;
    read_reduction(ctx, &reduction);
    read(ctx, "T", &dtype, "wire_dtype", &wire, "key", &key);
    OP_REQUIRES(ctx, wire.empty() || dtype == tensorflow::DT_FLOAT,
                absl::InvalidArgumentError(absl::StrCat("AllReduce '", key, "': wire_dtype is ", wire, " and the tensors are ",
                                                        tensorflow::DataTypeString(dtype), "; expected float32 tensors")));
    wire_dtype = wire.empty() ? dtype : wire == "float16" ? tensorflow::DT_HALF : tensorflow::DT_BFLOAT16;
  }

  whale::Reduction reduction = whale::Reduction::kSum;
  DataType dtype = tensorflow::DT_INVALID;
  DataType wire_dtype = tensorflow::DT_INVALID;
};

class AllReduceOp : public CommunicationOp {
 public:
  explicit AllReduceOp(OpKernelConstruction* ctx) : CommunicationOp(ctx), reducing_(ctx) {}

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const int n = ctx->num_inputs() - 1;
    int64_t elements = 0;
    std::string text = shapes_.of(ctx, 1, n);
    std::vector<const char*> sources(n);
    std::vector<Tensor> outputs(n);
    for (int i = 0; i < n; ++i) {
      const Tensor& input = ctx->input(i + 1);  // not kept: a second reference would keep its memory from being taken over below
      elements += input.NumElements();
      sources[i] = data_of(input);
    }
    for (int i = 0; i < n; ++i) {
      Tensor* output = nullptr;
      const TensorShape shape = ctx->input(i + 1).shape();
      OP_REQUIRES_OK_ASYNC(ctx, ctx->forward_input_or_allocate_output({i + 1}, i, shape, &output), done);
      outputs[i] = *output;
    }
    whale::Request request = make_request(whale::OpKind::kAllReduce, reducing_.wire_dtype, std::move(text));
    request.reduction = reducing_.reduction;
    request.counts = {elements};
    if (reducing_.wire_dtype == reducing_.dtype) {
      for (int i = 0; i < n; ++i) {
        if (outputs[i].NumElements() == 0) continue;
        request.pieces.push_back({sources[i], data_of(outputs[i]), outputs[i].NumElements()});
        if (sources[i] != data_of(outputs[i])) outputs.push_back(ctx->input(i + 1));
      }
      request.owner = owner_of(std::move(outputs));
      return launch_last(ctx, group, std::move(request), std::move(done));
    }
    // What goes out in another dtype than the tensors have goes through a buffer that is reused from step to step.
    const int64_t bytes = elements * static_cast<int64_t>(request.element_bytes);
    Tensor staging;
    OP_REQUIRES_OK_ASYNC(ctx, take_staging(ctx, bytes, &staging), done);
    char* position = data_of(staging);
    for (int i = 0; i < n; ++i) position += pack(sources[i], outputs[i], position);
    request.input = request.output = data_of(staging);
    request.owner = owner_of(staging);
    std::function<void()> finish = [this, staging = std::move(staging), outputs = std::move(outputs)] {
      const char* from = data_of(staging);
      for (const Tensor& output : outputs) from += unpack(from, output);
      give_staging(staging);
    };
    launch_last(ctx, group, std::move(request), std::move(done), bytes, std::move(finish));
  }

 private:
  // Bytes of the tensor on the wire, which are at `wire` afterwards.
  size_t pack(const char* source, const Tensor& like, char* wire) const {
    const auto elements = static_cast<size_t>(like.NumElements());
    whale::narrow_floats(to_core(reducing_.wire_dtype), reinterpret_cast<const float*>(source), wire, elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(reducing_.wire_dtype));
  }
  size_t unpack(const char* wire, const Tensor& output) const {
    const auto elements = static_cast<size_t>(output.NumElements());
    whale::widen_floats(to_core(reducing_.wire_dtype), wire, reinterpret_cast<float*>(data_of(output)), elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(reducing_.wire_dtype));
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

  const Reducing reducing_;
  ShapeText shapes_;
  std::mutex mutex_;  // guards what follows
  std::vector<Tensor> free_;
};

// The same in a device's memory, which takes part by its rank's DeviceRank.
class DeviceAllReduceOp : public tensorflow::AsyncOpKernel {
 public:
  explicit DeviceAllReduceOp(OpKernelConstruction* ctx)
      : AsyncOpKernel(ctx), placed_on_(ctx->device_type().type_string()), reducing_(ctx) {
    read(ctx, "communicator", &communicator_, "rank", &rank_, "key", &key_);
  }
  bool IsExpensive() override { return false; }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    whale::Status status;
    const auto device = whale::DeviceRank::find(communicator_, rank_, &status);
    OP_REQUIRES_ASYNC(ctx, device != nullptr, to_tensorflow(status), done);
    OP_REQUIRES_ASYNC(ctx, placed_on_ == device->device().kind(),
                      absl::InvalidArgumentError(absl::StrCat(
                          "the tensors of AllReduce '", key_, "' lie on a ", placed_on_, ", and communication.backend adds up what lies on a ",
                          device->device().kind(), "; compute the step there (remove tf.device), or leave communication.backend out")),
                      done);
    const int n = ctx->num_inputs();
    const std::string text = absl::StrCat(whale::name_of(reducing_.reduction), " of ", tensorflow::DataTypeString(reducing_.dtype), " as ",
                                          tensorflow::DataTypeString(reducing_.wire_dtype), ": ", shapes_.of(ctx, 0, n));
    whale::DeviceReduction what{{}, to_core(reducing_.dtype), to_core(reducing_.wire_dtype), reducing_.reduction};
    for (int i = 0; i < n; ++i) {
      const Tensor& input = ctx->input(i);  // not kept: a second reference would keep its memory from being taken over below
      const TensorShape shape = input.shape();
      const char* source = data_of(input);
      Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(ctx, ctx->forward_input_or_allocate_output({i}, i, shape, &output), done);
      what.tensors.push_back({source, data_of(*output), output->NumElements()});
    }
    // The mark is behind whatever used the outputs' memory before. TensorFlow queues what reads them only after `done`, which comes
    // when they are written: what does not depend on them is computed meanwhile.
    const auto* context = ctx->op_device_context();
    void* stream = context == nullptr || context->stream() == nullptr ? nullptr : context->stream()->platform_specific_handle().stream;
    const Cancellation cancellation(ctx);
    const auto cancelled = whale::Status::Error(whale::Code::kCancelled, "TensorFlow cancelled the step in AllReduce '" + key_ + "'");
    const bool attached = cancellation.attach([endpoint = device->endpoint(), cancelled] { endpoint->abort(cancelled); });
    OP_REQUIRES_ASYNC(ctx, attached, to_tensorflow(cancelled), done);
    device->all_reduce(key_, text, std::move(what), stream, [ctx, cancellation, done](const whale::Status& outcome) {
      cancellation.detach();
      end(ctx, outcome, done);
    });
  }

 private:
  const std::string placed_on_;
  std::string communicator_, key_;
  int rank_ = 0;
  const Reducing reducing_;
  ShapeText shapes_;
};

class ReduceScatterOp : public TensorOp {
 public:
  explicit ReduceScatterOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read_reduction(ctx, &reduction_);
    read(ctx, "axis", &axis_, "sizes", &sizes_);
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    OP_REQUIRES_ASYNC(ctx,
                      axis_ >= 0 && axis_ < input.dims() && sizes_.size() == group.size && input.dim_size(axis_) == total(sizes_),
                      absl::InvalidArgumentError(absl::StrCat(
                          "ReduceScatter '", key(), "' on rank ", group.endpoint->rank(), ": input of shape ", input.shape().DebugString(),
                          ", axis ", axis_, ", sizes ", join_sizes(sizes_), " for ", group.size,
                          " ranks; expected one size per rank that add up to the input's dimension")),
                      done);
    TensorShape shape = input.shape();
    shape.set_dim(axis_, sizes_[group.index]);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    const AxisView view(input.shape(), axis_);
    whale::Request request = request_of(whale::OpKind::kReduceScatter,
                                        absl::StrCat(input.shape().DebugString(), " axis ", axis_, " sizes ", join_sizes(sizes_)));
    request.reduction = reduction_;
    request.counts = view.counts(sizes_);
    Tensor parts;
    OP_REQUIRES_OK_ASYNC(ctx, in_parts(ctx, input, view, sizes_, &parts), done);
    request.input = data_of(parts);
    request.output = data_of(*output);
    request.owner = owner_of(*output, std::move(parts));
    launch_last(ctx, group, std::move(request), std::move(done));
  }

 private:
  int axis_ = 0;
  std::vector<int64_t> sizes_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("WhaleAllReduce").Device(tensorflow::DEVICE_CPU), AllReduceOp);
REGISTER_KERNEL_BUILDER(Name("WhaleDeviceAllReduce").Device(tensorflow::DEVICE_GPU), DeviceAllReduceOp);
// Where somebody has placed it there, to be told what is wrong.
REGISTER_KERNEL_BUILDER(Name("WhaleDeviceAllReduce").Device(tensorflow::DEVICE_CPU), DeviceAllReduceOp);
REGISTER_KERNEL_BUILDER(Name("WhaleReduceScatter").Device(tensorflow::DEVICE_CPU), ReduceScatterOp);

}  // namespace whale_ops
