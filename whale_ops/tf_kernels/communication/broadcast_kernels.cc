// The communicator handle, Broadcast, Send, Recv, Barrier and Check.
#include <cstring>
#include <map>
#include <mutex>

#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/progress/exchange.h"
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class CommunicatorOp : public tensorflow::OpKernel {
 public:
  explicit CommunicatorOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "communicator", &name_, "rank", &rank_);
  }
  void Compute(OpKernelContext* ctx) override {
    whale::Status status;
    const EndpointPtr endpoint = whale::Engine::instance().find(name_, rank_, &status);
    OP_REQUIRES_OK(ctx, exchange_error(status));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    // The handle holds the only reference: the communicator's life does not hang on a session's
    // resource manager.
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(new CommunicatorResource(endpoint),
                                                          ctx->device()->name());
  }

 private:
  std::string name_;
  int rank_ = -1;
};

class HoldOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
  bool IsExpensive() override { return false; }
};

std::string pack_shapes(const std::vector<TensorShape>& shapes) {
  std::string out;
  const auto append = [&out](int64_t value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  for (const TensorShape& shape : shapes) {
    append(shape.dims());
    for (int d = 0; d < shape.dims(); ++d) append(shape.dim_size(d));
  }
  return out;
}

std::vector<TensorShape> unpack_shapes(const std::string& bytes) {
  std::vector<TensorShape> shapes;
  size_t position = 0;
  const auto take = [&] {
    int64_t value;
    std::memcpy(&value, bytes.data() + position, sizeof(value));
    position += sizeof(value);
    return value;
  };
  while (position < bytes.size()) {
    TensorShape shape;
    const int64_t dims = take();
    for (int64_t d = 0; d < dims; ++d) shape.AddDim(take());
    shapes.push_back(shape);
  }
  return shapes;
}

class BroadcastOp : public TensorOp {
 public:
  explicit BroadcastOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read(ctx, "root", &root_, "shapes", &declared_, "N", &count_);
    known_ = static_cast<int>(declared_.size()) == count_;
    for (const PartialTensorShape& shape : declared_) {
      TensorShape full;
      known_ = known_ && shape.AsTensorShape(&full);
      shapes_.push_back(full);
    }
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const bool is_root = group.index == root_;
    std::vector<TensorShape> own;
    for (int i = 0; i < count_ && is_root; ++i) {
      own.push_back(ctx->input(i + 1).shape());
      OP_REQUIRES_ASYNC(
          ctx, declared_.empty() || declared_[i].IsCompatibleWith(own[i]),
          absl::InvalidArgumentError(absl::StrCat(
              "Broadcast '", key(), "': input ", i, " of the root has shape ", own[i].DebugString(),
              ", declared is ", declared_[i].DebugString(), "; correct the attribute 'shapes'")),
          done);
    }
    if (known_) {
      broadcast(ctx, group, shapes_, std::move(done));
      return;
    }
    launch_with(
        ctx, group,
        [this, endpoint = group.endpoint, own](uint64_t id, whale::BytesCallback finished) {
          whale::broadcast_bytes(endpoint, id, key() + "/shapes",
                                 absl::StrCat("shapes of ", count_, " tensors"), "", ranks(), root_,
                                 pack_shapes(own), std::move(finished));
        },
        [this, ctx, group, done = std::move(done)](const whale::Status& status,
                                                   std::vector<std::string> parts) {
          status.ok() ? broadcast(ctx, group, unpack_shapes(parts[0]), done)
                      : end(ctx, status, done);
        });
  }

 private:
  // The tensors travel side by side, each straight from and into its own memory.
  void broadcast(OpKernelContext* ctx, const Group& group, const std::vector<TensorShape>& shapes,
                 DoneCallback done) {
    const bool is_root = group.index == root_;
    std::vector<Tensor> outputs(count_);
    for (int i = 0; i < count_; ++i) {
      Tensor* output = nullptr;
      if (is_root) {
        ctx->set_output(i, ctx->input(i + 1));
        outputs[i] = ctx->input(i + 1);
        continue;
      }
      OP_REQUIRES_ASYNC(ctx, declared_.empty() || declared_[i].IsCompatibleWith(shapes[i]),
                        exchange_error(absl::InvalidArgumentError(absl::StrCat(
                            "Broadcast '", key(), "': the root sends shape ",
                            shapes[i].DebugString(), " for input ", i, ", declared is ",
                            declared_[i].DebugString(), "; correct the attribute 'shapes'"))),
                        done);
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(i, shapes[i], &output), done);
      outputs[i] = *output;
    }
    // All outcomes are told on the engine's thread, except those of a step that is cancelled
    // already.
    struct Countdown {
      std::mutex mutex;
      int left;
      whale::Status status;
    };
    auto countdown = std::make_shared<Countdown>();
    countdown->left = count_;
    for (int i = 0; i < count_; ++i) {
      whale::Request request = request_of(whale::OpKind::kBroadcast, shapes[i].DebugString());
      if (count_ > 1) request.key += "/" + std::to_string(i);
      request.root = root_;
      request.counts = {outputs[i].NumElements()};
      request.input = request.output = data_of(outputs[i]);
      request.owner = owner_of(std::move(outputs[i]));
      launch(ctx, group, std::move(request), [ctx, countdown, done](const whale::Status& status) {
        {
          const std::lock_guard<std::mutex> lock(countdown->mutex);
          if (!status.ok() && countdown->status.ok()) countdown->status = status;
          if (--countdown->left > 0) return;
        }
        end(ctx, countdown->status, done);
      });
    }
  }

  int root_ = 0;
  int count_ = 1;
  bool known_ = false;
  std::vector<PartialTensorShape> declared_;
  std::vector<TensorShape> shapes_;
};

class SendOp : public TensorOp {
 public:
  explicit SendOp(OpKernelConstruction* ctx) : TensorOp(ctx) { read(ctx, "peer", &peer_); }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    const Tensor& input = ctx->input(1);
    whale::Request request = request_of(whale::OpKind::kSend, "");
    request.root = peer_;
    request.counts = {input.NumElements()};
    for (int d = 0; d < input.dims(); ++d) request.dims.push_back(input.dim_size(d));
    request.input = data_of(input);
    request.owner = owner_of(input);
    launch_last(ctx, group, std::move(request), std::move(done));
  }

 private:
  int peer_ = 0;
};

class RecvOp : public TensorOp {
 public:
  explicit RecvOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read(ctx, "peer", &peer_, "shape", &shape_);
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    whale::Request request = request_of(whale::OpKind::kRecv, "");
    request.root = peer_;
    request.counts = {0};
    auto held = std::make_shared<Tensor>();
    request.place = [this, ctx, held = held.get()](const std::vector<int64_t>& dims, uint64_t bytes,
                                                   void** destination) {
      TensorShape sent;
      for (const int64_t dim : dims) sent.AddDim(dim);
      if (!shape_.IsCompatibleWith(sent)) {
        return whale::Status::Error(
            whale::Code::kInvalidArgument,
            absl::StrCat("Recv '", key(), "': rank ", peer_, " sends shape ", sent.DebugString(),
                         ", expected ", shape_.DebugString(), "; give both ends the same shape"));
      }
      Tensor* output = nullptr;
      const absl::Status status = ctx->allocate_output(0, sent, &output);
      if (!status.ok() || output->TotalBytes() != bytes) {
        return whale::Status::Error(
            whale::Code::kInternal,
            absl::StrCat("Recv '", key(), "': memory for shape ", sent.DebugString(),
                         " could not be had: ", std::string(status.message())));
      }
      *held = *output;
      *destination = data_of(*output);
      return whale::Status::Ok();
    };
    request.owner = std::move(held);
    launch_last(ctx, group, std::move(request), std::move(done));
  }

 private:
  int peer_ = 0;
  PartialTensorShape shape_;
};

class BarrierOp : public CommunicationOp {
 public:
  using CommunicationOp::CommunicationOp;

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    launch_last(ctx, group, make_request(whale::OpKind::kBarrier, tensorflow::DT_UINT8, ""),
                std::move(done));
  }
};

class CheckOp : public CommunicationOp {
 public:
  explicit CheckOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    read(ctx, "fingerprint", &fingerprint_, "what", &what_);
  }

 protected:
  void start(OpKernelContext* ctx, const Group& group, DoneCallback done) override {
    launch_with(
        ctx, group,
        [this, endpoint = group.endpoint](uint64_t id, whale::BytesCallback finished) {
          whale::gather_bytes(endpoint, id, key(), "fingerprints", "", ranks(),
                              fingerprint_ + '\0' + what_, std::move(finished));
        },
        [this, ctx, endpoint = group.endpoint, done = std::move(done)](
            const whale::Status& status, std::vector<std::string> parts) {
          whale::Status outcome = status;
          if (status.ok()) outcome = compare(parts);
          // Every rank of the group sees the difference; the abort reaches those that are not in
          // it.
          if (status.ok() && !outcome.ok()) endpoint->abort(outcome);
          end(ctx, outcome, done);
        });
  }

 private:
  whale::Status compare(const std::vector<std::string>& parts) const {
    std::map<std::string, std::vector<int>> ranks_by_part;
    for (size_t i = 0; i < parts.size(); ++i) {
      ranks_by_part[parts[i]].push_back(group_rank(static_cast<int>(i)));
    }
    const std::string first = parts[0].substr(0, parts[0].find('\0'));
    bool equal = true;
    for (const auto& [part, members] : ranks_by_part)
      equal = equal && part.substr(0, part.find('\0')) == first;
    if (equal) return whale::Status::Ok();
    std::string message = "the ranks are about to run different things: ";
    for (const auto& [part, members] : ranks_by_part) {
      const size_t split = part.find('\0');
      message += (members.size() == 1 ? "rank " : "ranks ") + whale::join_ranks(members) + ": " +
                 part.substr(split + 1) + " (fingerprint " + part.substr(0, split) + "); ";
    }
    return whale::Status::Error(
        whale::Code::kInvalidArgument,
        message + "run the same script with the same arguments and data shapes on every rank");
  }

  std::string fingerprint_;
  std::string what_;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("WhaleCommunicator").Device(tensorflow::DEVICE_CPU), CommunicatorOp);
REGISTER_KERNEL_BUILDER(Name("WhaleHold").Device(tensorflow::DEVICE_CPU), HoldOp);
REGISTER_KERNEL_BUILDER(Name("WhaleBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);
REGISTER_KERNEL_BUILDER(Name("WhaleSend").Device(tensorflow::DEVICE_CPU), SendOp);
REGISTER_KERNEL_BUILDER(Name("WhaleRecv").Device(tensorflow::DEVICE_CPU), RecvOp);
REGISTER_KERNEL_BUILDER(Name("WhaleBarrier").Device(tensorflow::DEVICE_CPU), BarrierOp);
REGISTER_KERNEL_BUILDER(Name("WhaleCheck").Device(tensorflow::DEVICE_CPU), CheckOp);

}  // namespace whale_ops
