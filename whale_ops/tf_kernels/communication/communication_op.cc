#include "whale_ops/tf_kernels/communication/communication_op.h"

#include <algorithm>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/threadpool.h"
#include "whale_ops/core/progress/engine.h"

namespace whale_ops {

namespace {

// Equal to EXCHANGE_PAYLOAD of whale_ops/__init__.py.
constexpr char kExchange[] = "whale_ops.exchange";
// Copies of more bytes run on another thread, since they would delay the engine's other operations.
constexpr int64_t kWorthAnotherThreadBytes = 1 << 20;

}  // namespace

absl::Status exchange_error(absl::Status status) {
  if (!status.ok()) status.SetPayload(kExchange, absl::Cord("1"));
  return status;
}

absl::Status refused(const std::string& name, const std::string& key, int rank, const Tensor& input,
                     const std::string& why) {
  return invalid(name, " '", key, "' on rank ", rank, ": the input of shape ",
                 input.shape().DebugString(), " does not fit: ", why);
}

absl::Status refused_rank(const std::string& what, int rank, const std::vector<int>& ranks) {
  return invalid(what, ": rank ", rank, " is not one of the ranks ", whale::join_ranks(ranks),
                 "; build this op on those ranks only");
}

absl::Status check_fixed_size(DataType dtype) {
  if (tensorflow::DataTypeSize(dtype) > 0) return absl::OkStatus();
  return invalid("tensors of dtype ", tensorflow::DataTypeString(dtype),
                 " have no fixed element size and cannot be sent; keep them on one rank");
}

whale::Status check_sent(const std::string& key, int peer, const TensorShape& sent,
                         const PartialTensorShape& expected) {
  if (expected.IsCompatibleWith(sent)) return whale::Status::Ok();
  return whale::Status::Error(
      whale::Code::kInvalidArgument,
      absl::StrCat("Recv '", key, "': rank ", peer, " sends shape ", sent.DebugString(),
                   ", expected ", expected.DebugString(), "; give both ends the same shape"));
}

void end(OpKernelContext* ctx, const whale::Status& status,
         const tensorflow::AsyncOpKernel::DoneCallback& done) {
  if (!status.ok()) ctx->SetStatus(exchange_error(status));
  done();
}

Cancellation::Cancellation(OpKernelContext* ctx) : manager_(ctx->cancellation_manager()) {
  if (manager_ != nullptr) token_ = manager_->get_cancellation_token();
}

bool Cancellation::attach(std::function<void()> cancel) const {
  return manager_ == nullptr || manager_->RegisterCallback(token_, std::move(cancel));
}

void Cancellation::detach() const {
  if (manager_ != nullptr) manager_->TryDeregisterCallback(token_);
}

CommunicationOp::CommunicationOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
  read(ctx, "key", &key_, "ranks", &ranks_);
}

void CommunicationOp::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  tensorflow::core::RefCountPtr<CommunicatorResource> resource;
  OP_REQUIRES_OK_ASYNC(
      ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource), done);
  OP_REQUIRES_OK_ASYNC(ctx, exchange_error(whale::Engine::check_not_forked()), done);
  Group group{resource->endpoint()};
  const int rank = group.endpoint->rank();
  group.size = ranks_.empty() ? static_cast<size_t>(group.endpoint->size()) : ranks_.size();
  group.index =
      ranks_.empty()
          ? rank
          : static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  OP_REQUIRES_ASYNC(ctx, ranks_.empty() || group.index < static_cast<int>(ranks_.size()),
                    refused_rank(absl::StrCat("operation '", key_, "'"), rank, ranks_), done);
  const absl::Status status = start(ctx, group, &done);
  // If the operation was started, kernel and context may be gone by now.
  OP_REQUIRES_OK_ASYNC(ctx, status, done);
}

whale::Request CommunicationOp::make_request(whale::OpKind kind, DataType dtype,
                                             std::string text) const {
  whale::Request request;
  request.kind = kind;
  request.key = key_;
  request.text = std::move(text);
  request.dtype = to_core(dtype);
  request.dtype_name = tensorflow::DataTypeString(dtype);
  request.element_bytes = static_cast<size_t>(tensorflow::DataTypeSize(dtype));
  request.group = ranks_;
  return request;
}

void CommunicationOp::launch_with(OpKernelContext* ctx, const Group& group,
                                  const std::function<void(uint64_t, whale::BytesCallback)>& submit,
                                  whale::BytesCallback then) const {
  const uint64_t id = group.endpoint->reserve();
  const Cancellation cancellation(ctx);
  // The callback refers to nothing of the kernel, which may have ended when it is called.
  const bool attached = cancellation.attach([endpoint = group.endpoint, id] {
    endpoint->cancel(
        id, whale::Status::Error(whale::Code::kCancelled, "TensorFlow cancelled the step"));
  });
  if (!attached) {
    group.endpoint->release(id);
    then(whale::Status::Error(whale::Code::kCancelled,
                              "the step was cancelled before operation '" + key_ + "' started"),
         {});
    return;
  }
  submit(id, [cancellation, then = std::move(then)](const whale::Status& status,
                                                    std::vector<std::string> parts) {
    cancellation.detach();
    then(status, std::move(parts));
  });
}

void CommunicationOp::launch(OpKernelContext* ctx, const Group& group, whale::Request request,
                             std::function<void(const whale::Status&)> then) const {
  launch_with(
      ctx, group,
      [endpoint = group.endpoint, shared = std::make_shared<whale::Request>(std::move(request))](
          uint64_t id, whale::BytesCallback finished) {
        shared->done = [finished = std::move(finished)](const whale::Status& status) {
          finished(status, {});
        };
        whale::Engine::instance().submit(endpoint, id, std::move(*shared));
      },
      [then = std::move(then)](const whale::Status& status, const std::vector<std::string>&) {
        then(status);
      });
}

absl::Status CommunicationOp::launch_last(OpKernelContext* ctx, const Group& group,
                                          whale::Request request, DoneCallback done,
                                          int64_t finish_bytes,
                                          std::function<void()> finish) const {
  // What `finish` holds is released before the kernel ends, since ops that follow may start at once
  // on another thread.
  auto last = std::make_shared<std::function<void()>>(std::move(finish));
  launch(ctx, group, std::move(request),
         [ctx, finish_bytes, last = std::move(last),
          done = std::move(done)](const whale::Status& status) {
           const auto finish_and_end = [ctx, last, done, status] {
             if (status.ok() && *last != nullptr) (*last)();
             *last = nullptr;
             end(ctx, status, done);
           };
           const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
           if (status.ok() && *last != nullptr && finish_bytes > kWorthAnotherThreadBytes &&
               workers != nullptr) {
             workers->workers->Schedule(finish_and_end);
             return;
           }
           finish_and_end();
         });
  return absl::OkStatus();
}

TensorOp::TensorOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
  read(ctx, "T", &dtype_);
  OP_REQUIRES_OK(ctx, check_fixed_size(dtype_));
}

}  // namespace whale_ops
