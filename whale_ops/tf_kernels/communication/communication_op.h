// What kernels that communicate share: the communicator as a resource, starting an operation of the
// core, and the end of it.
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

// An error of an exchange: marked with a payload, by which Python tells it from an error of a
// computation. A kernel of an exchange that refuses what this rank gives it, or finds no memory,
// sets a plain error: the other ranks have to be told of it.
absl::Status exchange_error(absl::Status status);
inline absl::Status exchange_error(const whale::Status& status) {
  return exchange_error(to_tensorflow(status));
}
// The error of a kernel that refuses its input: "AllGather 'key' on rank 1: input of shape [2,3],
// axis 2 sizes [1,1]; expected ...".
absl::Status refused(const std::string& name, const std::string& key, int rank, const Tensor& input,
                     const std::string& why);
// That of a kernel on a rank that is not one of those that take part. `what`: of which operation.
absl::Status refused_rank(const std::string& what, int rank, const std::vector<int>& ranks);
// That of a kernel for tensors of this dtype; OK where their elements are of one size.
absl::Status check_fixed_size(DataType dtype);
// The shape that a sender tells of, which must be compatible with what its receiver expects.
whale::Status check_sent(const std::string& key, int peer, const TensorShape& sent,
                         const PartialTensorShape& expected);

// The end of a kernel that was under way.
void end(OpKernelContext* ctx, const whale::Status& status,
         const tensorflow::AsyncOpKernel::DoneCallback& done);

// What is done when TensorFlow cancels the step while something is under way.
class Cancellation {
 public:
  explicit Cancellation(OpKernelContext* ctx);
  // False: the step was cancelled before. TensorFlow may call `cancel` while, or after, the
  // operation ends.
  bool attach(std::function<void()> cancel) const;
  void detach() const;

 private:
  tensorflow::CancellationManager* manager_;
  tensorflow::CancellationToken token_ = 0;
};

// The ranks that take part in an operation, as this rank sees them.
struct Group {
  EndpointPtr endpoint;
  int index = 0;  // of this rank
  size_t size = 0;
};

// Base of all kernels that communicate: attributes `key` and `ranks`.
class CommunicationOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CommunicationOp(OpKernelConstruction* ctx);
  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final;
  // It only starts something. The executor runs what is not expensive at once, before computation
  // that is ready too: the exchange is under way meanwhile, also where the rank has one thread.
  bool IsExpensive() override { return false; }

 protected:
  // Starts the operation and takes `done`, which is then called exactly once, whatever happens. An
  // error: nothing was started and `done` not taken; the kernel ends with it.
  virtual absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) = 0;
  // Goes on where one operation has ended: by `next`, which is as start(), unless it has failed.
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
  // Why the kernel refuses its input.
  absl::Status refused(whale::OpKind kind, const Group& group, const Tensor& input,
                       const std::string& why) const {
    return whale_ops::refused(whale::name_of(kind), key_, group.endpoint->rank(), input, why);
  }
  int group_rank(int index) const { return ranks_.empty() ? index : ranks_[index]; }

  // Runs one operation of the core with TensorFlow's cancellation attached. Its owner stays alive
  // until the network has let go. `then` runs on the engine's thread: it must not block.
  void launch(OpKernelContext* ctx, const Group& group, whale::Request request,
              std::function<void(const whale::Status&)> then) const;
  // The same with an identifier for something that the core starts by itself.
  void launch_with(OpKernelContext* ctx, const Group& group,
                   const std::function<void(uint64_t id, whale::BytesCallback)>& submit,
                   whale::BytesCallback then) const;
  // launch(), then the end of the kernel: on success `finish` (null: nothing), which goes over so
  // many bytes, and `done`. Returns OK, as start() does then.
  absl::Status launch_last(OpKernelContext* ctx, const Group& group, whale::Request request,
                           DoneCallback done, int64_t finish_bytes = 0,
                           std::function<void()> finish = nullptr) const;

  const std::string& key() const { return key_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::string key_;
  std::vector<int> ranks_;
};

// Of those that move tensors: attribute `T`, a dtype of fixed element size.
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

// The owner of a request: tensors, of which the caller hands over all of its references. Its thread
// may lose its core to the engine at once, and what follows takes over the memory of tensors that
// nobody else refers to. (An initialiser list would keep a reference until the statement ends.)
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
