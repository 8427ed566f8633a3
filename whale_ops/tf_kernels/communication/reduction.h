// What kernels of reductions share, for host memory and for GPU memory.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {

// All shapes of a kernel's inputs as a text, cached while the shapes stay the same, since
// formatting a hundred of them takes long.
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
      text_ = absl::StrCat(n, " tensors ", text_.substr(0, 160), "..., ", elements,
                           " elements, shapes ", whale::hash64(text_));
    }
    return text_;
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::vector<TensorShape> shapes_;
  std::string text_;
};

// Reads the attribute `reduction`.
inline void read_reduction(OpKernelConstruction* ctx, whale::Reduction* reduction) {
  std::string name;
  read(ctx, "reduction", &name);
  for (const auto candidate : {whale::Reduction::kSum, whale::Reduction::kMin,
                               whale::Reduction::kMax, whale::Reduction::kProd}) {
    if (name != whale::name_of(candidate)) continue;
    *reduction = candidate;
    return;
  }
  ctx->SetStatus(invalid("reduction is '", name, "'; expected sum, min, max or prod"));
}

// The attributes of a reduction: its kind, the dtype of the tensors, and the dtype in which they
// travel.
struct ReduceAttributes {
  explicit ReduceAttributes(OpKernelConstruction* ctx) {
    std::string wire, key;
    read_reduction(ctx, &reduction);
    read(ctx, "T", &dtype, "wire_dtype", &wire, "key", &key);
    OP_REQUIRES(ctx, wire.empty() || dtype == tensorflow::DT_FLOAT,
                invalid("AllReduce '", key, "': wire_dtype is ", wire, " and the tensors are ",
                        tensorflow::DataTypeString(dtype), "; expected float32 tensors"));
    wire_dtype = wire.empty()        ? dtype
                 : wire == "float16" ? tensorflow::DT_HALF
                                     : tensorflow::DT_BFLOAT16;
  }

  whale::Reduction reduction = whale::Reduction::kSum;
  DataType dtype = tensorflow::DT_INVALID;
  DataType wire_dtype = tensorflow::DT_INVALID;
};

}  // namespace whale_ops
