// What lies in the host's memory and is computed with on another device passes through here: its
// bytes are counted.

#include <atomic>
#include <cstdint>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

std::atomic<int64_t> bytes_to_host{0};
std::atomic<int64_t> bytes_to_device{0};

// Beside the host's memory: TensorFlow's runtime copies its input, or its output, between the
// devices.
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

// values: bytes that have come to the host's memory since the process began, and bytes that have
// left it.
__attribute__((visibility("default"))) void whale_offloaded(int64_t* values) {
  values[0] = whale_ops::bytes_to_host.load();
  values[1] = whale_ops::bytes_to_device.load();
}

}  // extern "C"
