// What kernels share that change variables.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {

// The exclusive locks of variables, taken in the order that TensorFlow's own kernels keep to.
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

// The error about a variable that is not what its kernel is for. `input`: its node.
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
