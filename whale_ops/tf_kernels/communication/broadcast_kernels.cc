// Broadcast.
#include <cstring>
#include <mutex>

#include "whale_ops/core/progress/exchange.h"
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

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
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    const bool is_root = group.index == root_;
    std::vector<TensorShape> own;
    for (int i = 0; i < count_ && is_root; ++i) {
      own.push_back(ctx->input(i + 1).shape());
      if (!fits_declared(i, own[i])) {
        return undeclared(
            i, absl::StrCat("input ", i, " of the root has shape ", own[i].DebugString()));
      }
    }
    if (known_) return broadcast(ctx, group, shapes_, done);
    launch_with(
        ctx, group,
        [this, endpoint = group.endpoint, own](uint64_t id, whale::BytesCallback finished) {
          whale::broadcast_bytes(endpoint, id, key() + "/shapes",
                                 absl::StrCat("shapes of ", count_, " tensors"), "", ranks(), root_,
                                 pack_shapes(own), std::move(finished));
        },
        [this, ctx, group, done = std::move(*done)](const whale::Status& status,
                                                    std::vector<std::string> parts) {
          proceed(ctx, status, done, [&](DoneCallback* own) {
            return broadcast(ctx, group, unpack_shapes(parts[0]), own);
          });
        });
    return absl::OkStatus();
  }

 private:
  bool fits_declared(int input, const TensorShape& shape) const {
    return declared_.empty() || declared_[input].IsCompatibleWith(shape);
  }
  absl::Status undeclared(int input, const std::string& what) const {
    return invalid("Broadcast '", key(), "': ", what, ", but the declared shape is ",
                   declared_[input].DebugString(), "; correct the attribute 'shapes'");
  }

  // Sends all tensors at the same time, each one straight from and into its own memory.
  absl::Status broadcast(OpKernelContext* ctx, const Group& group,
                         const std::vector<TensorShape>& shapes, DoneCallback* done) {
    const bool is_root = group.index == root_;
    std::vector<Tensor> outputs(count_);
    for (int i = 0; i < count_; ++i) {
      Tensor* output = nullptr;
      if (is_root) {
        ctx->set_output(i, ctx->input(i + 1));
        outputs[i] = ctx->input(i + 1);
        continue;
      }
      if (!fits_declared(i, shapes[i])) {
        return exchange_error(undeclared(
            i, absl::StrCat("the root sends shape ", shapes[i].DebugString(), " for input ", i)));
      }
      TF_RETURN_IF_ERROR(ctx->allocate_output(i, shapes[i], &output));
      outputs[i] = *output;
    }
    // Outcomes are reported on the engine's thread, except if the step was cancelled before.
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
      launch(ctx, group, std::move(request),
             [ctx, countdown, done = *done](const whale::Status& status) {
               {
                 const std::lock_guard<std::mutex> lock(countdown->mutex);
                 if (!status.ok() && countdown->status.ok()) countdown->status = status;
                 if (--countdown->left > 0) return;
               }
               end(ctx, countdown->status, done);
             });
    }
    return absl::OkStatus();
  }

  int root_ = 0;
  int count_ = 1;
  bool known_ = false;
  std::vector<PartialTensorShape> declared_;
  std::vector<TensorShape> shapes_;
};

}  // namespace

WHALE_CPU_KERNEL("WhaleBroadcast", BroadcastOp);

}  // namespace whale_ops
