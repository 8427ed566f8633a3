// What communicating kernels share: the communicator as a resource, and starting and ending an
// operation of the core.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/resource_mgr.h"
#include "whale_ops/core/progress/endpoint.h"
#include "whale_ops/core/progress/exchange.h"
#include "whale_ops/tf_kernels/communication/parts.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {

using EndpointPtr = std::shared_ptr<whale::Endpoint>;

class CommunicatorResource : public tensorflow::ResourceBase {
 public:
  explicit CommunicatorResource(EndpointPtr endpoint) : endpoint_(std::move(endpoint)) {}
  const EndpointPtr& endpoint() const { return endpoint_; }
  std::string DebugString() const override {
    return "communicator '" + endpoint_->name() + "', rank " + std::to_string(endpoint_->rank());
  }

 private:
  const EndpointPtr endpoint_;
};

// Marks a status as an error of an exchange, by a payload that Python recognises. A kernel that
// refuses this rank's input, or finds no memory, returns a plain error instead, so that Python
// tells the other ranks.
absl::Status exchange_error(absl::Status status);
inline absl::Status exchange_error(const whale::Status& status) {
  return exchange_error(to_tensorflow(status));
}
// The error of a kernel that refuses its input, such as "AllGather 'key' on rank 1: input of shape
// [2,3], axis 2 sizes [1,1]; expected ...".
absl::Status refused(const std::string& name, const std::string& key, int rank, const Tensor& input,
                     const std::string& why);
// The error of a kernel on a rank that does not take part. `what`: the operation.
absl::Status refused_rank(const std::string& what, int rank, const std::vector<int>& ranks);
// OK if elements of this dtype have a fixed size, else the error of a kernel.
absl::Status check_fixed_size(DataType dtype);
// Checks that the shape that a sender announces is compatible with what the receiver expects.
whale::Status check_sent(const std::string& key, int peer, const TensorShape& sent,
                         const PartialTensorShape& expected);

// Ends a kernel whose operation was under way.
void end(OpKernelContext* ctx, const whale::Status& status,
         const tensorflow::AsyncOpKernel::DoneCallback& done);

// Connects TensorFlow's cancellation of the step to an operation.
class Cancellation {
 public:
  explicit Cancellation(OpKernelContext* ctx);
  // Calls `cancel` when TensorFlow cancels the step, possibly while, or after, the operation ends.
  // Returns false if the step was cancelled before.
  bool attach(std::function<void()> cancel) const;
  void detach() const;

 private:
  tensorflow::CancellationManager* manager_;
  tensorflow::CancellationToken token_ = 0;
};

// The ranks that take part in an operation, from this rank's point of view.
struct Group {
  EndpointPtr endpoint;
  int index = 0;  // index of this rank
  size_t size = 0;
};

// Base class of all communicating kernels, with attributes `key` and `ranks`.
class CommunicationOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CommunicationOp(OpKernelConstruction* ctx);
  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final;
  // The kernel only starts an exchange. The executor runs inexpensive kernels at once, before
  // computation that is ready too, so that the exchange overlaps with it even if the rank has only
  // one thread.
  bool IsExpensive() override { return false; }

 protected:
  // Starts the operation and takes over `done`, which is then called exactly once, whatever
  // happens. On an error nothing was started and `done` was not taken; the kernel ends with the
  // error.
  virtual absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) = 0;
  // Continues when one operation has ended: calls `next`, which is like start(), unless that
  // operation has failed.
  template <typename Next>
  static void proceed(OpKernelContext* ctx, const whale::Status& status, const DoneCallback& done,
                      const Next& next) {
    if (!status.ok()) return end(ctx, status, done);
    DoneCallback own = done;
    const absl::Status started = next(&own);
    if (started.ok()) return;
    ctx->SetStatus(started);
    done();
  }

  whale::Request make_request(whale::OpKind kind, DataType dtype, std::string text) const;
  // The error of a kernel that refuses its input.
  absl::Status refused(whale::OpKind kind, const Group& group, const Tensor& input,
                       const std::string& why) const {
    return whale_ops::refused(whale::name_of(kind), key_, group.endpoint->rank(), input, why);
  }
  int group_rank(int index) const { return ranks_.empty() ? index : ranks_[index]; }

  // Runs one operation of the core, with TensorFlow's cancellation attached. Its owner stays alive
  // until the network no longer needs it. `then` runs on the engine's thread and must not block.
  void launch(OpKernelContext* ctx, const Group& group, whale::Request request,
              std::function<void(const whale::Status&)> then) const;
  // The same for something that `submit` starts under an identifier.
  void launch_with(OpKernelContext* ctx, const Group& group,
                   const std::function<void(uint64_t id, whale::BytesCallback)>& submit,
                   whale::BytesCallback then) const;
  // Calls launch(), and ends the kernel afterwards: on success `finish` (null: nothing), which
  // processes `finish_bytes` bytes, then `done`. Returns OK, for use as the result of start().
  absl::Status launch_last(OpKernelContext* ctx, const Group& group, whale::Request request,
                           DoneCallback done, int64_t finish_bytes = 0,
                           std::function<void()> finish = nullptr) const;

  const std::string& key() const { return key_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::string key_;
  std::vector<int> ranks_;
};

// Base class of kernels that exchange tensors, with attribute `T`, a dtype of fixed element size.
class TensorOp : public CommunicationOp {
 public:
  explicit TensorOp(OpKernelConstruction* ctx);

 protected:
  DataType dtype() const { return dtype_; }
  whale::Request request_of(whale::OpKind kind, std::string text) const {
    return make_request(kind, dtype_, std::move(text));
  }

 private:
  DataType dtype_ = tensorflow::DT_INVALID;
};

// Makes tensors the owner of a request; the caller passes on all of its references. Ops that follow
// may reuse the memory of tensors to which nobody else refers, and they may run before this thread
// continues. (With an initialiser list, references would live until the statement ends.)
inline std::shared_ptr<void> owner_of(std::vector<Tensor> tensors) {
  return std::make_shared<std::vector<Tensor>>(std::move(tensors));
}
template <typename... Tensors>
std::shared_ptr<void> owner_of(Tensor first, Tensors... more) {
  std::vector<Tensor> all;
  all.reserve(1 + sizeof...(more));
  all.push_back(std::move(first));
  (all.push_back(std::move(more)), ...);
  return owner_of(std::move(all));
}

}  // namespace whale_ops
