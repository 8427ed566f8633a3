#include "whale_ops/tf_kernels/communication/communication_op.h"

#include <algorithm>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/threadpool.h"
#include "whale_ops/core/progress/engine.h"

namespace whale_ops {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

namespace {

// As EXCHANGE_PAYLOAD of whale_ops/__init__.py.
constexpr char kExchange[] = "whale_ops.exchange";
// Longer copies would hold up the engine's other operations.
constexpr int64_t kWorthAnotherThreadBytes = 1 << 20;

}  // namespace

absl::Status to_tensorflow(const whale::Status& status) {
  switch (status.code) {
    case whale::Code::kOk: return absl::OkStatus();
    case whale::Code::kInvalidArgument: return absl::InvalidArgumentError(status.message);
    case whale::Code::kAborted: return absl::AbortedError(status.message);
    case whale::Code::kCancelled: return absl::CancelledError(status.message);
    case whale::Code::kUnavailable: return absl::UnavailableError(status.message);
    case whale::Code::kDeadlineExceeded: return absl::DeadlineExceededError(status.message);
    case whale::Code::kInternal: return absl::InternalError(status.message);
  }
  return absl::InternalError(status.message);
}

absl::Status exchange_error(absl::Status status) {
  if (!status.ok()) status.SetPayload(kExchange, absl::Cord("1"));
  return status;
}

whale::DType to_core(DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF: return whale::DType::kFloat16;
    case tensorflow::DT_BFLOAT16: return whale::DType::kBFloat16;
    case tensorflow::DT_FLOAT: return whale::DType::kFloat32;
    case tensorflow::DT_DOUBLE: return whale::DType::kFloat64;
    case tensorflow::DT_INT8: return whale::DType::kInt8;
    case tensorflow::DT_INT16: return whale::DType::kInt16;
    case tensorflow::DT_INT32: return whale::DType::kInt32;
    case tensorflow::DT_INT64: return whale::DType::kInt64;
    case tensorflow::DT_UINT8: return whale::DType::kUInt8;
    case tensorflow::DT_UINT16: return whale::DType::kUInt16;
    case tensorflow::DT_UINT32: return whale::DType::kUInt32;
    case tensorflow::DT_UINT64: return whale::DType::kUInt64;
    case tensorflow::DT_BOOL: return whale::DType::kBool;
    case tensorflow::DT_COMPLEX64: return whale::DType::kComplex64;
    case tensorflow::DT_COMPLEX128: return whale::DType::kComplex128;
    default: return whale::DType::kRaw;
  }
}

void read_reduction(OpKernelConstruction* ctx, whale::Reduction* reduction) {
  std::string name;
  read(ctx, "reduction", &name);
  for (const auto candidate : {whale::Reduction::kSum, whale::Reduction::kMin,
                               whale::Reduction::kMax, whale::Reduction::kProd}) {
    if (name != whale::name_of(candidate)) continue;
    *reduction = candidate;
    return;
  }
  ctx->SetStatus(absl::InvalidArgumentError(
      absl::StrCat("reduction is '", name, "'; expected sum, min, max or prod")));
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
                    absl::InvalidArgumentError(absl::StrCat(
                        "operation '", key_, "': rank ", rank, " is not one of the ranks ",
                        whale::join_ranks(ranks_), "; build this op on those ranks only")),
                    done);
  start(ctx, group, std::move(done));
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
                                  std::function<void(uint64_t, whale::BytesCallback)> submit,
                                  whale::BytesCallback then) const {
  const uint64_t id = group.endpoint->reserve();
  const Cancellation cancellation(ctx);
  // Holds nothing of the kernel.
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
        endpoint->submit(id, std::move(*shared));
      },
      [then = std::move(then)](const whale::Status& status, std::vector<std::string>) {
        then(status);
      });
}

void CommunicationOp::launch_last(OpKernelContext* ctx, const Group& group, whale::Request request,
                                  DoneCallback done, int64_t finish_bytes,
                                  std::function<void()> finish) const {
  // What `finish` holds is given back before the kernel ends: what follows may start at once, on
  // another thread.
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
}

TensorOp::TensorOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
  read(ctx, "T", &dtype_);
  OP_REQUIRES(ctx, tensorflow::DataTypeSize(dtype_) > 0,
              absl::InvalidArgumentError(absl::StrCat(
                  "tensors of dtype ", tensorflow::DataTypeString(dtype_),
                  " have no fixed element size and cannot be sent; keep them on one rank")));
}

}  // namespace whale_ops
