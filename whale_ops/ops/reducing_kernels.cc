// AllReduce, in the host's memory and in a device's, and ReduceScatter.
#include <cstring>
#include <mutex>

#include "tensorflow/core/framework/cancellation.h"
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

// The reduction, T and wire_dtype of a kernel that reduces tensors.
absl::Status read_attributes(OpKernelConstruction* ctx, whale::Reduction* reduction, DataType* dtype, DataType* wire_dtype) {
  std::string name, wire, key;
  TF_RETURN_IF_ERROR(ctx->GetAttr("reduction", &name));
  TF_RETURN_IF_ERROR(parse_reduction(name, reduction));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", dtype));
  TF_RETURN_IF_ERROR(ctx->GetAttr("wire_dtype", &wire));
  TF_RETURN_IF_ERROR(ctx->GetAttr("key", &key));
  if (!wire.empty() && *dtype != tensorflow::DT_FLOAT) {
    return absl::InvalidArgumentError(absl::StrCat("AllReduce '", key, "': wire_dtype is ", wire, " and the tensors are ",
                                                   tensorflow::DataTypeString(*dtype), "; expected float32 tensors"));
  }
  *wire_dtype = wire.empty() ? *dtype : wire == "float16" ? tensorflow::DT_HALF : tensorflow::DT_BFLOAT16;
  return absl::OkStatus();
}

class AllReduceOp : public CommunicationOp {
 public:
  explicit AllReduceOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    OP_REQUIRES_OK(ctx, read_attributes(ctx, &reduction_, &dtype_, &wire_dtype_));
  }

 protected:
  void start(OpKernelContext* ctx, const EndpointPtr& endpoint, DoneCallback done) override {
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
    whale::Request request = make_request(whale::OpKind::kAllReduce, wire_dtype_, std::move(text));
    request.reduction = reduction_;
    request.counts = {elements};
    if (wire_dtype_ == dtype_) {
      for (int i = 0; i < n; ++i) {
        if (outputs[i].NumElements() == 0) continue;
        request.pieces.push_back({sources[i], data_of(outputs[i]), outputs[i].NumElements()});
        if (sources[i] != data_of(outputs[i])) outputs.push_back(ctx->input(i + 1));
      }
      launch_last(ctx, endpoint, std::move(request), std::move(outputs), 0, nullptr, std::move(done));
      return;
    }
    // What goes out in another dtype than the tensors have goes through a buffer that is reused from step to step.
    const int64_t bytes = elements * static_cast<int64_t>(request.element_bytes);
    Tensor staging;
    OP_REQUIRES_OK_ASYNC(ctx, take_staging(ctx, bytes, &staging), done);
    char* position = data_of(staging);
    for (int i = 0; i < n; ++i) {
      position += pack(sources[i], outputs[i], position);
    }
    request.input = request.output = data_of(staging);
    std::vector<Tensor> tensors = together(staging);
    std::function<void()> finish = [this, staging = std::move(staging), outputs = std::move(outputs)] {
      const char* from = data_of(staging);
      for (const Tensor& output : outputs) from += unpack(from, output);
      give_staging(staging);
    };
    launch_last(ctx, endpoint, std::move(request), std::move(tensors), bytes, std::move(finish), std::move(done));
  }

 private:
  // Bytes of the tensor on the wire, which are at `wire` afterwards.
  size_t pack(const char* source, const Tensor& like, char* wire) const {
    const auto elements = static_cast<size_t>(like.NumElements());
    whale::narrow_floats(to_core(wire_dtype_), reinterpret_cast<const float*>(source), wire, elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(wire_dtype_));
  }
  size_t unpack(const char* wire, const Tensor& output) const {
    const auto elements = static_cast<size_t>(output.NumElements());
    whale::widen_floats(to_core(wire_dtype_), wire, reinterpret_cast<float*>(data_of(output)), elements);
    return elements * static_cast<size_t>(tensorflow::DataTypeSize(wire_dtype_));
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

  DataType dtype_;
  DataType wire_dtype_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
  ShapeText shapes_;
  std::mutex mutex_;  // guards what follows
  std::vector<Tensor> free_;
};

// The same in a device's memory, which takes part by its rank's DeviceRank.
class DeviceAllReduceOp : public tensorflow::AsyncOpKernel {
 public:
  explicit DeviceAllReduceOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), placed_on_(ctx->device_type().type_string()) {
    OP_REQUIRES_OK(ctx, read_attributes(ctx, &reduction_, &dtype_, &wire_dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("communicator", &communicator_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key", &key_));
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
    const std::string text = absl::StrCat(whale::name_of(reduction_), " of ", tensorflow::DataTypeString(dtype_), " as ",
                                          tensorflow::DataTypeString(wire_dtype_), ": ", shapes_.of(ctx, 0, n));
    whale::DeviceReduction what{{}, to_core(dtype_), to_core(wire_dtype_), reduction_};
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
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    const tensorflow::CancellationToken token = manager == nullptr ? 0 : manager->get_cancellation_token();
    const auto cancelled = whale::Status::Error(whale::Code::kCancelled, "TensorFlow cancelled the step in AllReduce '" + key_ + "'");
    const bool registered =
        manager == nullptr || manager->RegisterCallback(token, [endpoint = device->endpoint(), cancelled] { endpoint->abort(cancelled); });
    OP_REQUIRES_ASYNC(ctx, registered, to_tensorflow(cancelled), done);
    device->all_reduce(key_, text, std::move(what), stream, [ctx, manager, token, done](const whale::Status& outcome) {
      if (manager != nullptr) manager->TryDeregisterCallback(token);
      if (!outcome.ok()) ctx->SetStatus(to_tensorflow(outcome));
      done();
    });
  }

 private:
  const std::string placed_on_;
  std::string communicator_, key_;
  int rank_ = 0;
  DataType dtype_;
  DataType wire_dtype_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
  ShapeText shapes_;
};

class ReduceScatterOp : public CommunicationOp {
 public:
  explicit ReduceScatterOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    std::string reduction;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reduction", &reduction));
    OP_REQUIRES_OK(ctx, parse_reduction(reduction, &reduction_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

 protected:
  void start(OpKernelContext* ctx, const EndpointPtr& endpoint, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    int64_t sum = 0;
    for (const int64_t size : sizes_) sum += size;
    OP_REQUIRES_ASYNC(ctx,
                      axis_ >= 0 && axis_ < input.dims() && sizes_.size() == group_size(*endpoint) && input.dim_size(axis_) == sum,
                      absl::InvalidArgumentError(absl::StrCat(
                          "ReduceScatter '", key(), "' on rank ", endpoint->rank(), ": input of shape ", input.shape().DebugString(),
                          ", axis ", axis_, ", sizes ", join_sizes(sizes_), " for ", group_size(*endpoint),
                          " ranks; expected one size per rank that add up to the input's dimension")),
                      done);
    const int index = group_index(*endpoint);
    TensorShape shape = input.shape();
    shape.set_dim(axis_, sizes_[index]);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, shape, &output), done);
    const AxisView view = view_around(input.shape(), axis_);
    whale::Request request = make_request(
        whale::OpKind::kReduceScatter, dtype_,
        absl::StrCat(input.shape().DebugString(), " axis ", axis_, " sizes ", join_sizes(sizes_)));
    request.reduction = reduction_;
    for (const int64_t size : sizes_) request.counts.push_back(view.outer * size * view.inner);
    Tensor parts = input;
    if (view.outer > 1) {
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_temp(dtype_, TensorShape({input.NumElements()}), &parts), done);
      pack_parts(data_of(input), data_of(parts), view.outer, sizes_, view.inner * static_cast<int64_t>(request.element_bytes));
    }
    request.input = data_of(parts);
    request.output = data_of(*output);
    launch_last(ctx, endpoint, std::move(request), together(*output, std::move(parts)), 0, nullptr, std::move(done));
  }

 private:
  int axis_ = 0;
  std::vector<int64_t> sizes_;
  DataType dtype_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("WhaleAllReduce").Device(tensorflow::DEVICE_CPU), AllReduceOp);
REGISTER_KERNEL_BUILDER(Name("WhaleDeviceAllReduce").Device(tensorflow::DEVICE_GPU), DeviceAllReduceOp);
// Where somebody has placed it there, to be told what is wrong.
REGISTER_KERNEL_BUILDER(Name("WhaleDeviceAllReduce").Device(tensorflow::DEVICE_CPU), DeviceAllReduceOp);
REGISTER_KERNEL_BUILDER(Name("WhaleReduceScatter").Device(tensorflow::DEVICE_CPU), ReduceScatterOp);

}  // namespace whale_ops
