// An op through which tensors pass that are kept in host memory and used on another device: it
// counts their bytes.

#include <atomic>
#include <cstdint>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

std::atomic<int64_t> bytes_to_host{0};
std::atomic<int64_t> bytes_to_device{0};

// Runs in host memory: TensorFlow's runtime copies its input, or its output, between the devices.
class OffloadOp : public OpKernel {
 public:
  explicit OffloadOp(OpKernelConstruction* ctx) : OpKernel(ctx) { read(ctx, "to_host", &to_host_); }

  void Compute(OpKernelContext* ctx) override {
    (to_host_ ? bytes_to_host : bytes_to_device) +=
        static_cast<int64_t>(ctx->input(0).TotalBytes());
    ctx->set_output(0, ctx->input(0));
  }

  bool IsExpensive() override { return false; }

 private:
  bool to_host_ = false;
};

}  // namespace

REGISTER_OP("WhaleOffload")
    .Input("input: T")
    .Output("output: T")
    .Attr("to_host: bool")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The input. Counts its bytes, as those that come to the host's memory from another device, "
        "or go from there to one.");

WHALE_CPU_KERNEL("WhaleOffload", OffloadOp);

}  // namespace whale_ops

extern "C" {

// values: bytes that have been copied to host memory, and from it, since the process began.
__attribute__((visibility("default"))) void whale_offloaded(int64_t* values) {
  values[0] = whale_ops::bytes_to_host.load();
  values[1] = whale_ops::bytes_to_device.load();
}

}  // extern "C"
