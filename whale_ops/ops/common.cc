#include "whale_ops/ops/common.h"

#include <cstring>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/threadpool.h"
#include "whale_ops/core/engine/engine.h"

namespace whale_ops {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

constexpr int64_t kWorthAnotherThreadBytes = 1 << 20;  // longer copies would hold up the engine's other operations

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

absl::Status fixed_element_bytes(DataType dtype, size_t* bytes) {
  const int size = tensorflow::DataTypeSize(dtype);
  if (size <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensors of dtype ", tensorflow::DataTypeString(dtype),
                                                   " have no fixed element size and cannot be sent; keep them on one rank"));
  }
  *bytes = static_cast<size_t>(size);
  return absl::OkStatus();
}

absl::Status parse_reduction(const std::string& name, whale::Reduction* reduction) {
  for (const auto candidate :
       {whale::Reduction::kSum, whale::Reduction::kMin, whale::Reduction::kMax, whale::Reduction::kProd}) {
    if (name == whale::name_of(candidate)) {
      *reduction = candidate;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("reduction is '", name, "'; expected sum, min, max or prod"));
}

AxisView view_around(const tensorflow::TensorShape& shape, int axis) {
  AxisView view;
  for (int d = 0; d < axis; ++d) view.outer *= shape.dim_size(d);
  view.axis = shape.dim_size(axis);
  for (int d = axis + 1; d < shape.dims(); ++d) view.inner *= shape.dim_size(d);
  return view;
}

namespace {

// `between`: called with (whole, parts, bytes) for every contiguous run.
template <typename Between>
void for_each_run(int64_t outer, const std::vector<int64_t>& sizes, int64_t inner_bytes, const Between& between) {
  int64_t row_bytes = 0;
  for (const int64_t size : sizes) row_bytes += size * inner_bytes;
  int64_t part = 0, column = 0;
  for (const int64_t size : sizes) {
    const int64_t run = size * inner_bytes;
    for (int64_t o = 0; o < outer && run > 0; ++o) between(o * row_bytes + column, part + o * run, static_cast<size_t>(run));
    part += outer * run;
    column += run;
  }
}

}  // namespace

void pack_parts(const char* whole, char* parts, int64_t outer, const std::vector<int64_t>& sizes, int64_t inner_bytes) {
  for_each_run(outer, sizes, inner_bytes, [&](int64_t w, int64_t p, size_t n) { std::memcpy(parts + p, whole + w, n); });
}

void unpack_parts(const char* parts, char* whole, int64_t outer, const std::vector<int64_t>& sizes, int64_t inner_bytes) {
  for_each_run(outer, sizes, inner_bytes, [&](int64_t w, int64_t p, size_t n) { std::memcpy(whole + w, parts + p, n); });
}

std::string join_sizes(const std::vector<int64_t>& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i > 0 ? "," : "") + std::to_string(sizes[i]);
  return out + "]";
}

CommunicationOp::CommunicationOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
  OP_REQUIRES_OK(ctx, ctx->GetAttr("key", &key_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks", &ranks_));
}

void CommunicationOp::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  tensorflow::core::RefCountPtr<CommunicatorResource> resource;
  OP_REQUIRES_OK_ASYNC(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource), done);
  const EndpointPtr endpoint = resource->endpoint();
  OP_REQUIRES_OK_ASYNC(ctx, to_tensorflow(whale::Engine::check_not_forked()), done);
  OP_REQUIRES_ASYNC(ctx, group_index(*endpoint) >= 0,
                    absl::InvalidArgumentError(absl::StrCat("operation '", key_, "': rank ", endpoint->rank(),
                                                            " is not one of the ranks ", whale::join_ranks(ranks_),
                                                            "; build this op on those ranks only")),
                    done);
  start(ctx, endpoint, std::move(done));
}

whale::Request CommunicationOp::make_request(whale::OpKind kind, DataType dtype, std::string text) const {
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

int CommunicationOp::group_index(const whale::Endpoint& endpoint) const {
  if (ranks_.empty()) return endpoint.rank();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] == endpoint.rank()) return static_cast<int>(i);
  }
  return -1;
}

size_t CommunicationOp::group_size(const whale::Endpoint& endpoint) const {
  return ranks_.empty() ? static_cast<size_t>(endpoint.size()) : ranks_.size();
}

void CommunicationOp::launch_with(
    OpKernelContext* ctx, const EndpointPtr& endpoint,
    std::function<void(uint64_t, std::function<void(const whale::Status&, std::vector<std::string>)>)> submit,
    std::function<void(const whale::Status&, std::vector<std::string>)> then) const {
  const uint64_t id = endpoint->reserve();
  tensorflow::CancellationManager* manager = ctx->cancellation_manager();
  tensorflow::CancellationToken token = 0;
  if (manager != nullptr) {
    token = manager->get_cancellation_token();
    // Holds nothing of the kernel: TensorFlow may call it while, or after, the operation ends.
    const bool registered = manager->RegisterCallback(token, [endpoint, id] {
      endpoint->cancel(id, whale::Status::Error(whale::Code::kCancelled, "TensorFlow cancelled the step"));
    });
    if (!registered) {
      endpoint->release(id);
      then(whale::Status::Error(whale::Code::kCancelled, "the step was cancelled before operation '" + key_ + "' started"), {});
      return;
    }
  }
  submit(id, [manager, token, then = std::move(then)](const whale::Status& status, std::vector<std::string> parts) {
    if (manager != nullptr) manager->TryDeregisterCallback(token);
    then(status, std::move(parts));
  });
}

void CommunicationOp::launch(OpKernelContext* ctx, const EndpointPtr& endpoint, whale::Request request, std::vector<Tensor> tensors,
                             std::function<void(const whale::Status&)> then) const {
  auto shared = std::make_shared<whale::Request>(std::move(request));
  shared->owner = std::make_shared<std::vector<Tensor>>(std::move(tensors));
  launch_with(
      ctx, endpoint,
      [endpoint, shared](uint64_t id, std::function<void(const whale::Status&, std::vector<std::string>)> finished) {
        shared->done = [finished = std::move(finished)](const whale::Status& status) { finished(status, {}); };
        endpoint->submit(id, std::move(*shared));
      },
      [then = std::move(then)](const whale::Status& status, std::vector<std::string>) { then(status); });
}

void CommunicationOp::launch_last(OpKernelContext* ctx, const EndpointPtr& endpoint, whale::Request request,
                                  std::vector<Tensor> tensors, int64_t finish_bytes, std::function<void()> finish,
                                  DoneCallback done) const {
  // What `finish` holds is given back before the kernel ends: what follows may start at once, on another thread.
  auto last = std::make_shared<std::function<void()>>(std::move(finish));
  launch(ctx, endpoint, std::move(request), std::move(tensors),
         [ctx, finish_bytes, last = std::move(last), done = std::move(done)](const whale::Status& status) {
           const auto end = [last, done] {
             if (*last != nullptr) (*last)();
             *last = nullptr;
             done();
           };
           if (!status.ok()) {
             ctx->SetStatus(to_tensorflow(status));
             *last = nullptr;
             done();
             return;
           }
           const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
           if (*last != nullptr && finish_bytes > kWorthAnotherThreadBytes && workers != nullptr) {
             workers->workers->Schedule(end);
             return;
           }
           end();
         });
}

}  // namespace whale_ops
