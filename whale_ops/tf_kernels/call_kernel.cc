// Call: calls a function that is never inlined. Hold: keeps a value until the step runs.
// TensorFlow's graph passes process the whole body of its own call op at every call, even if it is
// not inlined; a step calls the same few bodies very often.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/grappler/optimizers/meta_optimizer.h"
#include "tensorflow/core/platform/env.h"
#include "whale_ops/tf_kernels/borrowed_threads.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using tensorflow::CancellationManager;
using tensorflow::Env;
using tensorflow::FunctionLibraryRuntime;

// Microseconds that another function of the caller has, to report the cause of an error.
constexpr int64_t kCauseUs = 1'000'000;

// Whether an error only follows from an error of another rank or function.
bool is_echo(const absl::Status& status) {
  return absl::IsCancelled(status) || absl::IsAborted(status);
}

// Calls `done`, on another thread, when the caller has been cancelled, or when the time is over.
void await_cause(CancellationManager* caller, const std::function<void()>& done) {
  const auto over = std::make_shared<std::atomic<bool>>(false);
  const auto token = caller->get_cancellation_token();
  const bool attached = caller->RegisterCallback(token, [over, done] {
    Env::Default()->SchedClosure([over, done] {
      if (!over->exchange(true)) done();
    });
  });
  if (!attached) {
    done();
    return;
  }
  Env::Default()->SchedClosureAfter(kCauseUs, [over, done, caller, token] {
    if (over->exchange(true)) return;  // checked first, since the caller may be gone
    caller->TryDeregisterCallback(token);
    done();
  });
}

// Instantiates the body once for each function library that the kernel meets (the runtime reuses
// bodies that other calls have instantiated), and runs it as TensorFlow's call op does, with the
// same threads, cancellation and statistics.
class CallOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CallOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    read(ctx, "f", &function_, "cancelled_alone", &cancelled_alone_, "threads", &threads_);
  }

  ~CallOp() override {
    for (const auto& [library, handle] : handles_) {
      // Fails only if the library has released the handle already.
      (void)library->ReleaseHandle(handle);
    }
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    FunctionLibraryRuntime* library = ctx->function_library();
    OP_REQUIRES_ASYNC(
        ctx, library != nullptr,
        absl::InternalError(
            "the op WhaleCall runs on a device for which TensorFlow has no library of functions"),
        done);
    tensorflow::OpInputList operands;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->input_list("args", &operands), done);
    const std::vector<Tensor> arguments(operands.begin(), operands.end());
    FunctionLibraryRuntime::Handle handle;
    OP_REQUIRES_OK_ASYNC(ctx, instantiated(ctx, library, arguments, &handle), done);

    struct Run {
      FunctionLibraryRuntime::Options options;
      std::unique_ptr<tensorflow::ScopedStepContainer> container;
      std::unique_ptr<CancellationManager> cancellation;
      std::vector<Tensor> results;
    };
    auto run = std::make_shared<Run>();
    auto* resources = library->device()->resource_manager();
    run->container = std::make_unique<tensorflow::ScopedStepContainer>(
        run->options.step_id,
        [resources](const std::string& name) { resources->Cleanup(name).IgnoreError(); });
    run->options.step_container = run->container.get();
    run->options.cancellation_manager = ctx->cancellation_manager();
    if (cancelled_alone_ && ctx->cancellation_manager() != nullptr) {
      run->cancellation = std::make_unique<CancellationManager>(ctx->cancellation_manager());
      run->options.cancellation_manager = run->cancellation.get();
    }
    run->options.stats_collector = ctx->stats_collector();
    run->options.collective_executor = ctx->collective_executor();
    run->options.runner = ctx->runner();
    if (threads_ > 0) {
      BorrowedThreads& borrowed = BorrowedThreads::of(threads_);
      run->options.runner = &borrowed.run_operation;
      run->options.user_intra_op_threadpool = borrowed.within_operations;
    }
    run->options.run_all_kernels_inline = ctx->run_all_kernels_inline();
    run->options.source_device = library->device()->name();
    run->options.allow_dead_tensors = true;
    library->Run(run->options, handle, arguments, &run->results,
                 [ctx, run, done = std::move(done)](const absl::Status& status) {
                   if (status.ok()) {
                     for (size_t i = 0; i < run->results.size(); ++i)
                       ctx->set_output(static_cast<int>(i), run->results[i]);
                   } else {
                     ctx->SetStatus(status);
                   }
                   CancellationManager* caller =
                       run->cancellation == nullptr ? nullptr : ctx->cancellation_manager();
                   run->cancellation = nullptr;  // before its parent, which ends with the step
                   if (caller != nullptr && is_echo(status)) {
                     await_cause(caller, done);
                   } else {
                     done();
                   }
                 });
  }

 private:
  absl::Status instantiated(OpKernelContext* ctx, FunctionLibraryRuntime* library,
                            const std::vector<Tensor>& arguments,
                            FunctionLibraryRuntime::Handle* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = handles_.find(library);
    if (known != handles_.end()) {
      *handle = known->second;
      return absl::OkStatus();
    }
    FunctionLibraryRuntime::InstantiateOptions options;
    if (library->config_proto() != nullptr) options.config_proto = *library->config_proto();
    tensorflow::grappler::GrapplerItem::OptimizationOptions optimization;
    // Safe, since the effects of the body are among its control outputs.
    optimization.allow_pruning_stateful_and_dataset_ops = true;
    // Functions that the body calls are optimised when they are called.
    optimization.optimize_function_library = false;
    options.optimize_graph_fn =
        std::bind(tensorflow::grappler::OptimizeGraph, std::placeholders::_1, std::placeholders::_2,
                  std::placeholders::_3, std::placeholders::_4, std::placeholders::_5,
                  options.config_proto, function_, optimization, std::placeholders::_6);
    options.target = library->device()->name();
    options.is_multi_device_function = true;
    // By default int32 arguments and results of a function are in host memory; those of a kernel
    // are where its other operands are.
    options.int_args_and_retvals_on_device =
        library->device()->device_type() != tensorflow::DEVICE_CPU;
    options.graph_collector = ctx->graph_collector();
    for (const Tensor& argument : arguments) {
      const bool resource = argument.dtype() == tensorflow::DT_RESOURCE;
      options.input_devices.push_back(
          resource ? argument.scalar<tensorflow::ResourceHandle>()().device() : options.target);
    }
    for (int i = 0; i < num_outputs(); ++i) {
      // The device of a resource follows from the op that creates it.
      options.output_devices.push_back(output_type(i) == tensorflow::DT_RESOURCE ? ""
                                                                                 : options.target);
    }
    TF_RETURN_IF_ERROR(library->Instantiate(function_, tensorflow::AttrSlice(), options, handle));
    handles_.emplace(library, *handle);
    return absl::OkStatus();
  }

  std::string function_;
  bool cancelled_alone_ = false;
  int threads_ = 0;
  std::mutex mutex_;
  std::unordered_map<FunctionLibraryRuntime*, FunctionLibraryRuntime::Handle> handles_;
};

// The op passes resources on, so it need not be on their device; ops that read them are placed when
// the function is instantiated.
const tensorflow::input_colocation_exemption_registration::InputColocationExemptionRegistration
    passes_resources_on("WhaleCall");

class HoldOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
  bool IsExpensive() override { return false; }
};

}  // namespace

REGISTER_OP("WhaleCall")
    .Input("args: Tin")
    .Output("output: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("f: string")
    .Attr("bodies: list(func) = []")
    .Attr("shapes: list(shape)")
    .Attr("cancelled_alone: bool = false")
    .Attr("threads: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      return set_shapes(c, "results", "give one shape per result");
    })
    .Doc(
        "What the function makes of the arguments, in the shapes that are given. The function is "
        "never copied into its caller. bodies: functions that the graph is to hold; one of its "
        "nodes names f there, and TensorFlow's graph passes read it once. cancelled_alone: an "
        "error in the function ends what runs in it, and the caller's other nodes after it has "
        "been reported: it is the first that the caller hears of. threads: how many compute the "
        "function, on the cores that other ranks lend; 0: the caller's, as for any function.");

WHALE_CPU_KERNEL("WhaleCall", CallOp);
REGISTER_KERNEL_BUILDER(Name("WhaleCall").Device(tensorflow::DEVICE_GPU), CallOp);

REGISTER_OP("WhaleHold")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The input, as something that is known only when the step runs: nothing behind it is "
        "computed while TensorFlow optimises.");

WHALE_CPU_KERNEL("WhaleHold", HoldOp);
// For types that TensorFlow keeps in GPU memory: the tensors stay there.
REGISTER_KERNEL_BUILDER(Name("WhaleHold")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint("T", {tensorflow::DT_HALF, tensorflow::DT_BFLOAT16,
                                                  tensorflow::DT_FLOAT, tensorflow::DT_DOUBLE,
                                                  tensorflow::DT_INT64, tensorflow::DT_BOOL}),
                        HoldOp);

}  // namespace whale_ops
