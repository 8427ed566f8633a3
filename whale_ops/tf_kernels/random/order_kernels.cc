// Reads how far the seed generator of a dataset's shuffle has advanced. TensorFlow does not expose
// this, and every iteration of the dataset, and of datasets made from it, takes the next seeds.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/kernels/data/random_seed_ops.h"
#include "tensorflow/core/platform/hash.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using tensorflow::data::SeedGeneratorManager;

REGISTER_OP("WhaleShuffleOrder")
    .Input("generator: resource")
    .Output("drawn: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("How many seeds the generator of a shuffle has given: two for each iteration.");

REGISTER_OP("WhaleSetShuffleOrder")
    .Input("generator: resource")
    .Input("drawn: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("The generator of a shuffle goes on behind so many seeds.");

// The handle claims the generator's type, but the resource of its name is the manager. The
// manager's type is defined only in TensorFlow's kernel library, with which this one is not linked;
// its hash is that of its name (tensorflow::TypeIndex).
absl::Status find(OpKernelContext* ctx,
                  tensorflow::core::RefCountPtr<SeedGeneratorManager>* manager) {
  tensorflow::ResourceHandle handle = ctx->input(0).scalar<tensorflow::ResourceHandle>()();
  handle.set_hash_code(tensorflow::Hash64("N10tensorflow4data20SeedGeneratorManagerE"));
  tensorflow::ResourceBase* found = nullptr;
  TF_RETURN_IF_ERROR(ctx->resource_manager()->Lookup(handle, &found));
  manager->reset(static_cast<SeedGeneratorManager*>(found));
  return absl::OkStatus();
}

class ShuffleOrderOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<SeedGeneratorManager> manager;
    OP_REQUIRES_OK(ctx, find(ctx, &manager));
    Tensor* drawn = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &drawn));
    drawn->scalar<int64_t>()() = manager->get()->num_random_samples();
  }
};

class SetShuffleOrderOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<SeedGeneratorManager> manager;
    OP_REQUIRES_OK(ctx, find(ctx, &manager));
    manager->get()->set_num_random_samples(ctx->input(1).scalar<int64_t>()());
    manager->get()->Reset();
  }
};

WHALE_CPU_KERNEL("WhaleShuffleOrder", ShuffleOrderOp);
WHALE_CPU_KERNEL("WhaleSetShuffleOrder", SetShuffleOrderOp);

}  // namespace
}  // namespace whale_ops
