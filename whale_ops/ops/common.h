// What the kernels share: the communicator as a resource, starting an operation of the core, and the end of it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "whale_ops/core/engine/endpoint.h"

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

absl::Status to_tensorflow(const whale::Status& status);
whale::DType to_core(tensorflow::DataType dtype);

// Base of all kernels that communicate: attributes `key` and `ranks`.
class CommunicationOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CommunicationOp(tensorflow::OpKernelConstruction* ctx);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) final;
  // It only starts something. The executor runs what is not expensive at once, before computation that is ready too: the exchange
  // is under way meanwhile, also where the rank has one thread.
  bool IsExpensive() override { return false; }

 protected:
  // Starts the operation; `done` is called exactly once, whatever happens.
  virtual void start(tensorflow::OpKernelContext* ctx, const EndpointPtr& endpoint, DoneCallback done) = 0;

  whale::Request make_request(whale::OpKind kind, tensorflow::DataType dtype, std::string text) const;
  // Index of the endpoint's rank in the group; -1 when it is not a member.
  int group_index(const whale::Endpoint& endpoint) const;
  size_t group_size(const whale::Endpoint& endpoint) const;
  int group_rank(int index) const { return ranks_.empty() ? index : ranks_[index]; }

  // Runs one operation of the core with TensorFlow's cancellation attached. `tensors` stay alive until the network has let go.
  // The caller hands over all of its references: its thread may lose its core to the engine at once, and what follows takes
  // over the memory of tensors that nobody else refers to.
  // `then` runs on the engine's thread: it must not block.
  void launch(tensorflow::OpKernelContext* ctx, const EndpointPtr& endpoint, whale::Request request,
              std::vector<tensorflow::Tensor> tensors, std::function<void(const whale::Status&)> then) const;
  // The same with an identifier for something that the core starts by itself.
  void launch_with(tensorflow::OpKernelContext* ctx, const EndpointPtr& endpoint,
                   std::function<void(uint64_t id, std::function<void(const whale::Status&, std::vector<std::string>)>)> submit,
                   std::function<void(const whale::Status&, std::vector<std::string>)> then) const;
  // launch(), then the end of the kernel: on success `finish` (null: nothing) and `done`.
  void launch_last(tensorflow::OpKernelContext* ctx, const EndpointPtr& endpoint, whale::Request request,
                   std::vector<tensorflow::Tensor> tensors, int64_t finish_bytes, std::function<void()> finish,
                   DoneCallback done) const;

  const std::string& key() const { return key_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::string key_;
  std::vector<int> ranks_;
};

// Some tensors in a vector, of which no reference is left elsewhere (an initialiser list would keep one until the statement ends).
template <typename... Tensors>
std::vector<tensorflow::Tensor> together(Tensors... tensors) {
  std::vector<tensorflow::Tensor> all;
  all.reserve(sizeof...(tensors));
  (all.push_back(std::move(tensors)), ...);
  return all;
}

// Element size; an error for dtypes without a fixed one.
absl::Status fixed_element_bytes(tensorflow::DataType dtype, size_t* bytes);
absl::Status parse_reduction(const std::string& name, whale::Reduction* reduction);

// A tensor seen as [outer, axis, inner] around one dimension.
struct AxisView {
  int64_t outer = 1;
  int64_t axis = 1;
  int64_t inner = 1;
};
AxisView view_around(const tensorflow::TensorShape& shape, int axis);

// Copies between a tensor [outer, sum(sizes), inner] and its parts [outer, sizes[r], inner] one behind the other.
// Sizes in bytes for `inner`.
void pack_parts(const char* whole, char* parts, int64_t outer, const std::vector<int64_t>& sizes, int64_t inner_bytes);
void unpack_parts(const char* parts, char* whole, int64_t outer, const std::vector<int64_t>& sizes, int64_t inner_bytes);

std::string join_sizes(const std::vector<int64_t>& sizes);

inline char* data_of(const tensorflow::Tensor& tensor) {
  return const_cast<char*>(static_cast<const char*>(tensor.data()));
}

}  // namespace whale_ops
