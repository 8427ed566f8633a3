// MappedTensor and MappedCopy: tensors in mapped files without a name. The system keeps used pages
// in memory as long as there is room, and writes changed ones back, so that a variable may be
// larger than a rank's memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

class Mapping : public tensorflow::TensorBuffer {
 public:
  Mapping(void* memory, size_t bytes) : TensorBuffer(memory), bytes_(bytes) {}
  ~Mapping() override { munmap(data(), bytes_); }
  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* /* proto */) const override {}

 private:
  const size_t bytes_;
};

absl::Status failed(const std::string& folder, size_t bytes, int error) {
  return absl::ResourceExhaustedError(absl::StrCat("no file of ", bytes, " bytes can be made in ",
                                                   folder, ": ", std::strerror(error)));
}

// Creates a tensor of zeros in a new file in `folder`. Its space is allocated at once, so that a
// full disk is an error here, and not a signal later.
absl::Status map(const std::string& folder, DataType dtype, const TensorShape& shape,
                 Tensor* made) {
  const size_t bytes = static_cast<size_t>(shape.num_elements()) * tensorflow::DataTypeSize(dtype);
  if (bytes == 0) {
    *made = Tensor(dtype, shape);
    return absl::OkStatus();
  }
  std::string path = folder + "/whale-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) return failed(folder, bytes, errno);
  unlink(path.c_str());
  const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* memory =
      error != 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int reason = error != 0 ? error : errno;
  close(file);
  if (memory == MAP_FAILED) return failed(folder, bytes, reason);
  madvise(memory, bytes, MADV_RANDOM);
  auto* mapping = new Mapping(memory, bytes);
  *made = Tensor(dtype, shape, mapping);
  mapping->Unref();
  return absl::OkStatus();
}

class MappedTensorOp : public OpKernel {
 public:
  explicit MappedTensorOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "folder", &folder_, "shape", &shape_, "T", &dtype_);
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor made;
    OP_REQUIRES_OK(ctx, map(folder_, dtype_, shape_, &made));
    ctx->set_output(0, made);
  }

 private:
  std::string folder_;
  TensorShape shape_;
  DataType dtype_ = tensorflow::DT_INVALID;
};

class MappedCopyOp : public OpKernel {
 public:
  explicit MappedCopyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "folder", &folder_);
  }

  void Compute(OpKernelContext* ctx) override {
    VariablePtr variable;
    OP_REQUIRES_OK(ctx, find_variable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& now = *variable->tensor();
    Tensor made;
    OP_REQUIRES_OK(ctx, map(folder_, now.dtype(), now.shape(), &made));
    copy_elements(now, &made);
    ctx->set_output(0, made);
  }

 private:
  std::string folder_;
};

}  // namespace

REGISTER_OP("WhaleMappedTensor")
    .Output("tensor: T")
    .Attr("folder: string")
    .Attr("shape: shape")
    .Attr("T: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc("Zeros in a new file of the folder, which is gone with the tensor.");

REGISTER_OP("WhaleMappedCopy")
    .Input("variable: resource")
    .Output("tensor: T")
    .Attr("folder: string")
    .Attr("T: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc("A variable's value now, in a new file of the folder.");

WHALE_CPU_KERNEL("WhaleMappedTensor", MappedTensorOp);
WHALE_CPU_KERNEL("WhaleMappedCopy", MappedCopyOp);

}  // namespace whale_ops
