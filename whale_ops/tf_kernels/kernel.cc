#include "whale_ops/tf_kernels/kernel.h"

#include <cstring>

namespace whale_ops {

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

absl::Status read_shape(InferenceContext* c, const char* name, ShapeHandle* shape) {
  PartialTensorShape given;
  TF_RETURN_IF_ERROR(c->GetAttr(name, &given));
  return c->MakeShapeFromPartialTensorShape(given, shape);
}

absl::Status read_shapes(InferenceContext* c, const char* name, std::vector<ShapeHandle>* shapes) {
  std::vector<PartialTensorShape> given;
  TF_RETURN_IF_ERROR(c->GetAttr(name, &given));
  shapes->resize(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(given[i], &(*shapes)[i]));
  }
  return absl::OkStatus();
}

absl::Status set_shape(InferenceContext* c, const char* name) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(read_shape(c, name, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

absl::Status set_shapes(InferenceContext* c, const char* outputs, const char* advice) {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(read_shapes(c, "shapes", &shapes));
  if (static_cast<int>(shapes.size()) != c->num_outputs()) {
    return invalid("the attribute `shapes` has ", shapes.size(), " entries for ", c->num_outputs(),
                   " ", outputs, "; ", advice);
  }
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, shapes[i]);
  return absl::OkStatus();
}

void copy_elements(const Tensor& from, Tensor* to) {
  if (from.TotalBytes() > 0) std::memcpy(data_of(*to), data_of(from), from.TotalBytes());
}

}  // namespace whale_ops
