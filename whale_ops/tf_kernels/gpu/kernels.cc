// Kernels that exchange tensors in GPU memory, through their rank's DeviceRank.
// Decision: 0026 (docs/decisions).
#include <algorithm>
#include <numeric>

#include "whale_ops/core/device/device_rank.h"
#include "whale_ops/tf_kernels/communication/reduction.h"
#if __has_include("xla/stream_executor/stream.h")
#include "xla/stream_executor/stream.h"
#else
#include "tensorflow/compiler/xla/stream_executor/stream.h"  // TensorFlow 2.15
#endif

namespace whale_ops {
namespace {

using whale::DeviceOperation;
using whale::OpKind;

// Most dimensions of tensors whose shape is sent along; TensorFlow's GPU kernels support no more.
constexpr int kMostDims = 8;

// What a kernel has prepared for its operation. The tensors that `call` refers to are kept alive by
// `held` until the operation has ended.
struct PreparedCall {
  whale::DeviceCall call;
  std::vector<Tensor> held;
};

// Base class of the kernels, with attributes `communicator`, `rank` and `key`.
class DeviceOp : public tensorflow::AsyncOpKernel {
 public:
  DeviceOp(OpKernelConstruction* ctx, const char* name)
      : AsyncOpKernel(ctx), name_(name), placed_on_(ctx->device_type().type_string()) {
    read(ctx, "communicator", &communicator_, "rank", &rank_, "key", &key_, "T", &dtype_);
    OP_REQUIRES_OK(ctx, check_fixed_size(dtype_));
  }
  bool IsExpensive() override { return false; }  // as in CommunicationOp

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    whale::Status status;
    const auto device = whale::DeviceRank::find(communicator_, rank_, &status);
    OP_REQUIRES_ASYNC(ctx, device != nullptr, exchange_error(status), done);
    OP_REQUIRES_ASYNC(
        ctx, placed_on_ == device->device().kind(),
        invalid("the tensors of ", name_, " '", key_, "' lie on a ", placed_on_,
                ", and communication.backend exchanges what lies on a ", device->device().kind(),
                "; compute the step there (remove tf.device), or leave communication.backend out"),
        done);
    auto prepared = std::make_shared<PreparedCall>();
    whale::DeviceCall& call = prepared->call;
    call.what.dtype = call.what.wire = to_core(dtype_);
    call.what.element_bytes = static_cast<size_t>(tensorflow::DataTypeSize(dtype_));
    call.what.group = group_of(device->endpoint()->size());
    const auto own = std::find(call.what.group.begin(), call.what.group.end(), rank_);
    OP_REQUIRES_ASYNC(ctx, own != call.what.group.end(),
                      refused_rank(absl::StrCat(name_, " '", key_, "'"), rank_, call.what.group),
                      done);
    call.what.index = static_cast<int>(own - call.what.group.begin());
    call.what.key = key_for(call.what.group);
    OP_REQUIRES_OK_ASYNC(ctx, prepare(ctx, prepared.get()), done);
    call.in_stream = in_stream();
    call.text = absl::StrCat(name_, " of ", tensorflow::DataTypeString(dtype_), ": ", call.text);
    // The mark is behind everything that used the outputs' memory before. TensorFlow queues readers
    // of the outputs only after `done`, which is called when they are written; independent ops run
    // meanwhile. With in_stream, `done` is called when TensorFlow's stream waits for the outputs.
    const auto* context = ctx->op_device_context();
    call.stream = context == nullptr || context->stream() == nullptr
                      ? nullptr
                      : context->stream()->platform_specific_handle().stream;
    const Cancellation cancellation(ctx);
    const auto cancelled = whale::Status::Error(
        whale::Code::kCancelled,
        absl::StrCat("TensorFlow cancelled the step in ", name_, " '", key_, "'"));
    const bool attached = cancellation.attach(
        [endpoint = device->endpoint(), cancelled] { endpoint->abort(cancelled); });
    OP_REQUIRES_ASYNC(ctx, attached, exchange_error(cancelled), done);
    auto held = std::make_shared<std::vector<Tensor>>(std::move(prepared->held));
    call.done = [ctx, cancellation, held, done](const whale::Status& outcome) {
      cancellation.detach();
      held->clear();  // ops that follow may reuse their memory at once
      end(ctx, outcome, done);
    };
    device->start(std::move(call));
  }

 protected:
  virtual bool in_stream() const { return false; }
  // Returns the ranks that take part, in group order.
  virtual std::vector<int> group_of(int size) const = 0;
  virtual std::string key_for(const std::vector<int>& group) const { return key_; }
  // Fills in `call.what`, `call.text` and what else the operation needs.
  virtual absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) = 0;

  DataType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  const std::string& key() const { return key_; }
  absl::Status refused(const Tensor& input, const std::string& why) const {
    return whale_ops::refused(name_, key_, rank_, input, why);
  }

 private:
  const std::string name_, placed_on_;
  std::string communicator_, key_;
  int rank_ = 0;
  DataType dtype_ = tensorflow::DT_INVALID;
};

// Base class of the kernels of group operations, with attributes `ranks` and `in_stream`.
class DeviceGroupOp : public DeviceOp {
 public:
  DeviceGroupOp(OpKernelConstruction* ctx, const char* name) : DeviceOp(ctx, name) {
    read(ctx, "ranks", &ranks_, "in_stream", &in_stream_);
  }

 protected:
  bool in_stream() const override { return in_stream_; }
  std::vector<int> group_of(int size) const override {
    if (!ranks_.empty()) return ranks_;
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

 private:
  std::vector<int> ranks_;
  bool in_stream_ = false;
};

class DeviceAllReduceOp : public DeviceGroupOp {
 public:
  explicit DeviceAllReduceOp(OpKernelConstruction* ctx)
      : DeviceGroupOp(ctx, "AllReduce"), attributes_(ctx) {}

 protected:
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    DeviceOperation& what = prepared->call.what;
    const int n = ctx->num_inputs();
    what.kind = OpKind::kAllReduce;
    what.reduction = attributes_.reduction;
    what.wire = to_core(attributes_.wire_dtype);
    prepared->call.text = absl::StrCat(whale::name_of(attributes_.reduction), " as ",
                                       tensorflow::DataTypeString(attributes_.wire_dtype), " of ",
                                       shapes_.of(ctx, 0, n));
    for (int i = 0; i < n; ++i) {
      // No copy of the Tensor is kept: a second reference would prevent its memory from being
      // reused below.
      const Tensor& input = ctx->input(i);
      const TensorShape shape = input.shape();
      const char* source = data_of(input);
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({i}, i, shape, &output));
      what.tensors.push_back({source, data_of(*output), output->NumElements()});
    }
    return absl::OkStatus();
  }

 private:
  const ReduceAttributes attributes_;
  ShapeText shapes_;
};

// Returns copies, one for each part, between a tensor and its parts, which are contiguous in memory
// of their own.
std::vector<whale::DeviceCopy> copies_of_parts(const Tensor& whole, const Tensor& parts,
                                               const AxisView& view,
                                               const std::vector<int64_t>& sizes, bool apart) {
  std::vector<whale::DeviceCopy> copies;
  const auto element_bytes = static_cast<size_t>(tensorflow::DataTypeSize(whole.dtype()));
  const size_t inner_bytes = static_cast<size_t>(view.inner) * element_bytes,
               row_bytes = static_cast<size_t>(total(sizes)) * inner_bytes;
  const auto rows = static_cast<size_t>(view.outer);
  char *in_whole = data_of(whole), *in_parts = data_of(parts);
  for (const int64_t size : sizes) {
    const size_t width = static_cast<size_t>(size) * inner_bytes;
    copies.push_back(apart ? whale::DeviceCopy{in_whole, in_parts, row_bytes, width, width, rows}
                           : whale::DeviceCopy{in_parts, in_whole, width, row_bytes, width, rows});
    in_whole += width;
    in_parts += width * rows;
  }
  return copies;
}

// Returns where the parts of `whole` are contiguous: in the tensor itself, or in memory from or to
// which `copies` copies them.
absl::Status side_by_side(OpKernelContext* ctx, const Tensor& whole, const AxisView& view,
                          const std::vector<int64_t>& sizes, bool apart, PreparedCall* prepared,
                          std::vector<whale::DeviceCopy>* copies, char** data) {
  *data = data_of(whole);
  if (view.outer <= 1) return absl::OkStatus();
  Tensor parts;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(whole.dtype(), TensorShape({whole.NumElements()}), &parts));
  *copies = copies_of_parts(whole, parts, view, sizes, apart);
  *data = data_of(parts);
  prepared->held.push_back(std::move(parts));
  return absl::OkStatus();
}

class DeviceAllGatherOp : public DeviceGroupOp {
 public:
  explicit DeviceAllGatherOp(OpKernelConstruction* ctx)
      : DeviceGroupOp(ctx, "AllGather"), division_(ctx, "axis", "sizes") {}

 protected:
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    const Tensor& input = ctx->input(0);
    DeviceOperation& what = prepared->call.what;
    if (!division_.fits_part(input.shape(), what.size(), what.index)) {
      return refused(input, absl::StrCat(division_.text(),
                                         "; expected this rank's own size at index ", what.index));
    }
    const TensorShape shape = division_.whole(input.shape());
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
    const AxisView view(shape, division_.axis);
    what.kind = OpKind::kAllGather;
    what.counts = view.counts(division_.sizes);
    prepared->call.text = absl::StrCat(shape.DebugString(), " ", division_.text());
    char* data = nullptr;
    TF_RETURN_IF_ERROR(
        side_by_side(ctx, *output, view, division_.sizes, false, prepared, &what.after, &data));
    what.tensors = {{data_of(input), data, input.NumElements()}};
    return absl::OkStatus();
  }

 private:
  const Division division_;
};

class DeviceReduceScatterOp : public DeviceGroupOp {
 public:
  explicit DeviceReduceScatterOp(OpKernelConstruction* ctx)
      : DeviceGroupOp(ctx, "ReduceScatter"), division_(ctx, "axis", "sizes") {
    read_reduction(ctx, &reduction_);
  }

 protected:
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    const Tensor& input = ctx->input(0);
    DeviceOperation& what = prepared->call.what;
    if (!division_.fits_whole(input.shape(), what.size())) {
      return refused(
          input, absl::StrCat(division_.text(), "; expected sizes that add up to its dimension"));
    }
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, division_.part(input.shape(), what.index), &output));
    const AxisView view(input.shape(), division_.axis);
    what.kind = OpKind::kReduceScatter;
    what.reduction = reduction_;
    what.counts = view.counts(division_.sizes);
    prepared->call.text = absl::StrCat(whale::name_of(reduction_), " of ",
                                       input.shape().DebugString(), " ", division_.text());
    char* data = nullptr;
    TF_RETURN_IF_ERROR(
        side_by_side(ctx, input, view, division_.sizes, true, prepared, &what.before, &data));
    what.tensors = {{data, data_of(*output), input.NumElements()}};
    return absl::OkStatus();
  }

 private:
  const Division division_;
  whale::Reduction reduction_ = whale::Reduction::kSum;
};

class DeviceAllToAllOp : public DeviceGroupOp {
 public:
  explicit DeviceAllToAllOp(OpKernelConstruction* ctx)
      : DeviceGroupOp(ctx, "AllToAll"), redivision_(ctx) {}

 protected:
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    const Tensor& input = ctx->input(0);
    const auto& [split, concat] = redivision_;
    DeviceOperation& what = prepared->call.what;
    if (!redivision_.fits(input.shape(), what.size(), what.index)) {
      return refused(input, absl::StrCat(redivision_.text(), "; ", Redivision::kExpected));
    }
    const TensorShape whole = concat.whole(input.shape());
    const TensorShape shape = split.part(whole, what.index);
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
    const AxisView from(input.shape(), split.axis), to(shape, concat.axis);
    what.kind = OpKind::kAllToAll;
    what.counts = from.counts(split.sizes);
    what.recv_counts = to.counts(concat.sizes);
    what.largest = *std::max_element(split.sizes.begin(), split.sizes.end()) *
                   *std::max_element(concat.sizes.begin(), concat.sizes.end());
    for (int d = 0; d < input.dims(); ++d) {
      what.largest *= d == split.axis || d == concat.axis ? 1 : input.dim_size(d);
    }
    prepared->call.text = absl::StrCat(whole.DebugString(), " ", redivision_.text());
    char *sent = nullptr, *received = nullptr;
    TF_RETURN_IF_ERROR(
        side_by_side(ctx, input, from, split.sizes, true, prepared, &what.before, &sent));
    TF_RETURN_IF_ERROR(
        side_by_side(ctx, *output, to, concat.sizes, false, prepared, &what.after, &received));
    what.tensors = {{sent, received, input.NumElements()}};
    return absl::OkStatus();
  }

 private:
  const Redivision redivision_;
};

class DeviceBroadcastOp : public DeviceGroupOp {
 public:
  explicit DeviceBroadcastOp(OpKernelConstruction* ctx) : DeviceGroupOp(ctx, "Broadcast") {
    std::vector<PartialTensorShape> declared;
    read(ctx, "root", &root_, "shapes", &declared);
    for (const PartialTensorShape& shape : declared) {
      TensorShape full;
      OP_REQUIRES(ctx, shape.AsTensorShape(&full),
                  invalid("Broadcast '", key(), "' has an unknown shape ", shape.DebugString(),
                          "; give whole shapes, or use the op without Device in its name"));
      shapes_.push_back(full);
    }
  }

 protected:
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    DeviceOperation& what = prepared->call.what;
    if (root_ < 0 || root_ >= static_cast<int>(what.size()))
      return refused(ctx->input(0),
                     absl::StrCat("the root is ", root_, "; expected an index into the group"));
    what.kind = OpKind::kBroadcast;
    what.root = root_;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const int number = static_cast<int>(i);
      absl::StrAppend(&prepared->call.text, shapes_[i].DebugString(), " ");
      Tensor* output = nullptr;
      if (what.index == root_) {
        const Tensor& input = ctx->input(number);
        if (input.shape() != shapes_[i])
          return refused(input, absl::StrCat("the declared shape is ", shapes_[i].DebugString(),
                                             "; correct the attribute 'shapes'"));
        ctx->set_output(number, input);
        what.tensors.push_back({data_of(input), data_of(input), input.NumElements()});
        continue;
      }
      TF_RETURN_IF_ERROR(ctx->allocate_output(number, shapes_[i], &output));
      what.tensors.push_back({nullptr, data_of(*output), output->NumElements()});
    }
    return absl::OkStatus();
  }

 private:
  int root_ = 0;
  std::vector<TensorShape> shapes_;
};

// Sender and receiver tell each other a shape; only the sender's is used.
class DeviceSendOp : public DeviceOp {
 public:
  explicit DeviceSendOp(OpKernelConstruction* ctx) : DeviceOp(ctx, "Send") {
    read(ctx, "peer", &peer_);
  }

 protected:
  std::vector<int> group_of(int) const override { return {rank(), peer_}; }
  std::string key_for(const std::vector<int>& group) const override {
    return absl::StrCat(key(), "/", group[0], "to", group[1]);
  }
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    const Tensor& input = ctx->input(0);
    if (input.dims() > kMostDims)
      return refused(input,
                     absl::StrCat("it has more than ", kMostDims, " dimensions; reshape it"));
    prepared->call.what.kind = OpKind::kSend;
    prepared->call.what.tensors = {{data_of(input), nullptr, input.NumElements()}};
    prepared->call.tells.assign(1 + kMostDims, 0);
    prepared->call.tells[0] = input.dims();
    for (int d = 0; d < input.dims(); ++d) prepared->call.tells[1 + d] = input.dim_size(d);
    return absl::OkStatus();
  }

 private:
  int peer_ = 0;
};

class DeviceRecvOp : public DeviceOp {
 public:
  explicit DeviceRecvOp(OpKernelConstruction* ctx) : DeviceOp(ctx, "Send") {
    read(ctx, "peer", &peer_, "shape", &shape_);
  }

 protected:
  std::vector<int> group_of(int) const override { return {peer_, rank()}; }
  std::string key_for(const std::vector<int>& group) const override {
    return absl::StrCat(key(), "/", group[0], "to", group[1]);
  }
  absl::Status prepare(OpKernelContext* ctx, PreparedCall* prepared) override {
    prepared->call.what.kind = OpKind::kRecv;
    prepared->call.tells.assign(1 + kMostDims, 0);
    prepared->call.complete = [this, ctx](const whale::LaunchOrder::Told& told,
                                          DeviceOperation* what) {
      TensorShape sent;
      for (int64_t d = 0; d < told[0]; ++d) sent.AddDim(told[1 + d]);
      const whale::Status fits = check_sent(key(), peer_, sent, shape_);
      if (!fits.ok()) return fits;
      Tensor* output = nullptr;
      const absl::Status status = ctx->allocate_output(0, sent, &output);
      if (!status.ok())
        return whale::Status::Error(whale::Code::kInternal, std::string(status.message()));
      what->tensors = {{nullptr, data_of(*output), output->NumElements()}};
      return whale::Status::Ok();
    };
    return absl::OkStatus();
  }

 private:
  int peer_ = 0;
  PartialTensorShape shape_;
};

}  // namespace

// Also registered for the CPU: for ops that were placed there by mistake, which report that; and
// for the tests' devices, whose memory is host memory.
#define WHALE_DEVICE_KERNEL(name, kernel)                                     \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU), kernel); \
  WHALE_CPU_KERNEL(name, kernel)

WHALE_DEVICE_KERNEL("WhaleDeviceAllReduce", DeviceAllReduceOp);
WHALE_DEVICE_KERNEL("WhaleDeviceAllGather", DeviceAllGatherOp);
WHALE_DEVICE_KERNEL("WhaleDeviceReduceScatter", DeviceReduceScatterOp);
WHALE_DEVICE_KERNEL("WhaleDeviceAllToAll", DeviceAllToAllOp);
WHALE_DEVICE_KERNEL("WhaleDeviceBroadcast", DeviceBroadcastOp);
WHALE_DEVICE_KERNEL("WhaleDeviceSend", DeviceSendOp);
WHALE_DEVICE_KERNEL("WhaleDeviceRecv", DeviceRecvOp);

}  // namespace whale_ops
