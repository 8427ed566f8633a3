// Random ops of which several kernels share one stream: each program of a step has kernels of its
// own, and the stream continues whichever of them runs.
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/public/version.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

// Samples of 128 bits that are reserved for an element, as many as TensorFlow's own kernels reserve
// (GuardedPhiloxRandom::ReserveRandomOutputs).
constexpr uint64_t kSamplesOfElement = 256;
constexpr char kContainer[] = "whale";
constexpr char kName[] = "random_streams";

REGISTER_OP("WhaleAdvance")
    .Input("shape: Tshape")
    .Output("counter: uint64")
    .Attr("stream: string")
    .Attr("seed2: int")
    .Attr("Tshape: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(
        "Where the stream of this name is: a Philox counter, of which seed2 is the upper half. The "
        "stream goes on behind what a "
        "tensor of the shape takes.");

REGISTER_OP("WhaleDraw")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("stream: string")
    .Attr("node: string")
    .Attr("shapes: list(shape)")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return set_shapes(c, "outputs", "give one shape for each of Tout");
    })
    .Doc(
        "What the operation of `node`, a serialised NodeDef, draws: by one kernel for all nodes of "
        "the same stream.");

REGISTER_OP("WhaleReadStreams")
    .Output("counted: string")
    .Output("positions: uint64")
    .Output("drawn: string")
    .Output("draws: uint64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i)
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(
        "The streams of the device: those that have counters with where these are, and those of "
        "kernels with how often these have drawn.");

REGISTER_OP("WhaleSetStreams")
    .Input("counted: string")
    .Input("positions: uint64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Streams that have counters go on from there.");

REGISTER_OP("WhaleForgetStreams")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "All streams of the device begin anew, as those of TensorFlow's kernels do after "
        "tf.random.set_seed.");

// All streams of a device; they outlive the kernels and end with the device.
class Streams : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "random streams"; }

  uint64_t advance(const std::string& stream, uint64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t& at = counters_[stream];
    const uint64_t before = at;
    at += count;
    return before;
  }

  // Returns the kernel of a stream for one draw, which `make` creates if there is none yet.
  template <typename Make>
  absl::Status kernel_of(const std::string& stream, const Make& make,
                         std::shared_ptr<OpKernel>* kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Drawing& known = kernels_[stream];
    if (known.kernel == nullptr) TF_RETURN_IF_ERROR(make(&known.kernel));
    ++known.draws;
    *kernel = known.kernel;
    return absl::OkStatus();
  }

  std::map<std::string, uint64_t> positions() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {counters_.begin(), counters_.end()};
  }

  std::map<std::string, uint64_t> draws() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, uint64_t> found;
    for (const auto& [stream, drawing] : kernels_) found[stream] = drawing.draws;
    return found;
  }

  void go_on_from(const std::string& stream, uint64_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_[stream] = position;
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_.clear();
    kernels_.clear();
  }

 private:
  struct Drawing {
    std::shared_ptr<OpKernel> kernel;
    uint64_t draws = 0;
  };
  std::mutex mutex_;
  std::unordered_map<std::string, uint64_t> counters_;
  std::unordered_map<std::string, Drawing> kernels_;
};

absl::Status streams_of(OpKernelContext* ctx, tensorflow::core::RefCountPtr<Streams>* streams) {
  Streams* found = nullptr;
  TF_RETURN_IF_ERROR(ctx->resource_manager()->LookupOrCreate<Streams>(kContainer, kName, &found,
                                                                      [](Streams** made) {
                                                                        *made = new Streams();
                                                                        return absl::OkStatus();
                                                                      }));
  streams->reset(found);
  return absl::OkStatus();
}

class AdvanceOp : public OpKernel {
 public:
  explicit AdvanceOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "stream", &stream_, "seed2", &seed2_);
  }
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Streams> streams;
    OP_REQUIRES_OK(ctx, streams_of(ctx, &streams));
    const Tensor& shape = ctx->input(0);
    uint64_t elements = 1;
    for (int64_t i = 0; i < shape.NumElements(); ++i) {
      const int64_t size = shape.dtype() == tensorflow::DT_INT32 ? shape.flat<int32_t>()(i)
                                                                 : shape.flat<int64_t>()(i);
      OP_REQUIRES(ctx, size >= 0, invalid("a random tensor has a dimension of size ", size));
      elements *= static_cast<uint64_t>(size);
    }
    Tensor* counter = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {2}, &counter));
    counter->flat<uint64_t>()(0) = streams->advance(stream_, elements * kSamplesOfElement);
    counter->flat<uint64_t>()(1) = static_cast<uint64_t>(seed2_);
  }
  bool IsExpensive() override { return false; }

 private:
  std::string stream_;
  int64_t seed2_ = 0;
};

class DrawOp : public OpKernel {
 public:
  explicit DrawOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string text;
    read(ctx, "stream", &stream_, "node", &text);
    OP_REQUIRES(ctx, node_.ParseFromString(text),
                invalid("the attribute `node` of WhaleDraw is not a serialised NodeDef"));
  }
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Streams> streams;
    OP_REQUIRES_OK(ctx, streams_of(ctx, &streams));
    const auto make = [this, ctx](std::shared_ptr<OpKernel>* kernel) {
      absl::Status status;
      std::unique_ptr<OpKernel> made =
          tensorflow::CreateOpKernel(tensorflow::DeviceType(tensorflow::DEVICE_CPU), ctx->device(),
                                     ctx->device()->GetAllocator(tensorflow::AllocatorAttributes()),
                                     node_, TF_GRAPH_DEF_VERSION, &status);
      TF_RETURN_IF_ERROR(status);
      *kernel = std::move(made);
      return absl::OkStatus();
    };
    std::shared_ptr<OpKernel> kernel;
    OP_REQUIRES_OK(ctx, streams->kernel_of(stream_, make, &kernel));
    kernel->Compute(ctx);
  }

 private:
  std::string stream_;
  tensorflow::NodeDef node_;
};

class ReadStreamsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Streams> streams;
    OP_REQUIRES_OK(ctx, streams_of(ctx, &streams));
    put(ctx, 0, streams->positions());
    put(ctx, 2, streams->draws());
  }

 private:
  static void put(OpKernelContext* ctx, int at, const std::map<std::string, uint64_t>& found) {
    const auto count = static_cast<int64_t>(found.size());
    Tensor *names = nullptr, *values = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(at, {count}, &names));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(at + 1, {count}, &values));
    int64_t i = 0;
    for (const auto& [name, value] : found) {
      names->flat<tensorflow::tstring>()(i) = name;
      values->flat<uint64_t>()(i++) = value;
    }
  }
};

class SetStreamsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    const Tensor &names = ctx->input(0), &positions = ctx->input(1);
    OP_REQUIRES(ctx, names.NumElements() == positions.NumElements(),
                invalid("WhaleSetStreams has ", names.NumElements(), " names of streams and ",
                        positions.NumElements(), " positions; expected as many of both"));
    tensorflow::core::RefCountPtr<Streams> streams;
    OP_REQUIRES_OK(ctx, streams_of(ctx, &streams));
    for (int64_t i = 0; i < names.NumElements(); ++i)
      streams->go_on_from(names.flat<tensorflow::tstring>()(i), positions.flat<uint64_t>()(i));
  }
};

class ForgetStreamsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Streams> streams;
    OP_REQUIRES_OK(ctx, streams_of(ctx, &streams));
    streams->clear();
  }
};

WHALE_CPU_KERNEL("WhaleAdvance", AdvanceOp);
WHALE_CPU_KERNEL("WhaleDraw", DrawOp);
WHALE_CPU_KERNEL("WhaleReadStreams", ReadStreamsOp);
WHALE_CPU_KERNEL("WhaleSetStreams", SetStreamsOp);
WHALE_CPU_KERNEL("WhaleForgetStreams", ForgetStreamsOp);

}  // namespace
}  // namespace whale_ops
