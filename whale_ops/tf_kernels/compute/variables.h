// What kernels that update variables share.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {

// Holds the exclusive locks of variables, taken in the same order as by TensorFlow's own kernels,
// to avoid deadlocks.
class Locks {
 public:
  explicit Locks(const std::vector<VariablePtr>& variables) {
    for (const auto& variable : variables) held_.push_back(variable->mu());
    std::sort(held_.begin(), held_.end());
    held_.erase(std::unique(held_.begin(), held_.end()), held_.end());
    for (const Mutex mutex : held_) mutex->lock();
  }
  ~Locks() {
    for (const Mutex mutex : held_) mutex->unlock();
  }
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

 private:
  using Mutex = decltype(std::declval<tensorflow::Var>().mu());

  std::vector<Mutex> held_;
};

// The error about a variable that does not suit its kernel. `input`: name of its node.
inline absl::Status refused_variable(const std::string& input, const tensorflow::Var& variable,
                                     const std::string& expected) {
  const tensorflow::Tensor& tensor = *const_cast<tensorflow::Var&>(variable).tensor();
  return absl::FailedPreconditionError(absl::StrCat(
      "the variable of '", input, "' ",
      variable.is_initialized ? absl::StrCat("has the shape ", tensor.shape().DebugString())
                              : "has no value yet",
      "; expected ", expected));
}

}  // namespace whale_ops
