// What kernels and shape functions share: names from TensorFlow, attributes, error texts, the
// elements of tensors, variables behind handles, and registration.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "whale_ops/core/base/types.h"

// Registers CPU kernels: WHALE_CPU_KERNEL("WhaleSend", SendOp); for one type of an attribute, which
// is the kernel's template parameter: WHALE_CPU_KERNEL_FOR("WhaleEinsum", "T", float, EinsumOp).
#define WHALE_CPU_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
#define WHALE_CPU_KERNEL_FOR(name, attribute, type, kernel) \
  REGISTER_KERNEL_BUILDER(                                  \
      Name(name).Device(tensorflow::DEVICE_CPU).TypeConstraint<type>(attribute), kernel<type>)

namespace whale_ops {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using VariablePtr = tensorflow::core::RefCountPtr<tensorflow::Var>;

// Converts the core's error to one of TensorFlow.
absl::Status to_tensorflow(const whale::Status& status);
whale::DType to_core(DataType dtype);

// The error of a kernel that refuses its input.
template <typename... Words>
absl::Status invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

// Reads attributes by name: read(ctx, "axis", &axis_, "sizes", &sizes_). The first one that cannot
// be read becomes the kernel's error.
inline void read(OpKernelConstruction*) {}
template <typename Value, typename... More>
void read(OpKernelConstruction* ctx, const char* name, Value* value, More... more) {
  OP_REQUIRES_OK(ctx, ctx->GetAttr(name, value));
  read(ctx, more...);
}

// The shape, or the shapes, that an op has as an attribute.
absl::Status read_shape(InferenceContext* c, const char* name, ShapeHandle* shape);
absl::Status read_shapes(InferenceContext* c, const char* name, std::vector<ShapeHandle>* shapes);
// Shape function of an op whose only output has the shape of an attribute.
absl::Status set_shape(InferenceContext* c, const char* name);
// Shape function of an op whose outputs have the shapes of its attribute `shapes`. `outputs`,
// `advice`: parts of the error text for a wrong number of shapes.
absl::Status set_shapes(InferenceContext* c, const char* outputs, const char* advice);

inline char* data_of(const Tensor& tensor) {
  return const_cast<char*>(static_cast<const char*>(tensor.data()));
}
// Copies from a tensor to one of the same number of bytes.
void copy_elements(const Tensor& from, Tensor* to);

// Finds the variable whose handle is an input.
inline absl::Status find_variable(OpKernelContext* ctx, int input, VariablePtr* found) {
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, input), found);
}

}  // namespace whale_ops
