#include "tests/host_gpu/late_kernels.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tests/host_gpu/streams.h"

namespace host_gpu {
namespace {

using tensorflow::DataType;
using tensorflow::KernelDef;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

// They hand their operands on, or say what shape they have, and read none.
bool hands_on(const std::string& op) {
  static const auto* ops = new std::set<std::string>{"Identity",
                                                     "IdentityN",
                                                     "Reshape",
                                                     "Squeeze",
                                                     "ExpandDims",
                                                     "StopGradient",
                                                     "Snapshot",
                                                     "PreventGradient",
                                                     "Shape",
                                                     "ShapeN",
                                                     "ReadVariableOp",
                                                     "VarHandleOp",
                                                     "VarIsInitializedOp",
                                                     "Size",
                                                     "Rank",
                                                     "NoOp",
                                                     "Const",
                                                     "Enter",
                                                     "Exit",
                                                     "Merge",
                                                     "Switch",
                                                     "NextIteration"};
  return ops->count(op) > 0;
}

bool writes_variables(const std::string& op) {
  return op == "AssignVariableOp" || op == "AssignAddVariableOp" || op == "AssignSubVariableOp" ||
         (op.rfind("Resource", 0) == 0 && op.rfind("ResourceGather", 0) != 0);
}

// Where a tensor lies on the GPU; empty for one that lies elsewhere, or is no plain bytes.
struct Span {
  char* begin = nullptr;
  size_t bytes = 0;
  bool is_alone = false;  // nobody else holds the tensor

  bool holds(const char* at) const { return at >= begin && at < begin + bytes; }
};

Span span_of(const Tensor& tensor, const Gpu* gpu) {
  if (!tensor.IsInitialized() || tensor.NumElements() == 0 ||
      !tensorflow::DataTypeCanUseMemcpy(tensor.dtype()))
    return {};
  const auto data = tensor.tensor_data();
  if (find_owner(data.data()) != gpu) return {};
  return {const_cast<char*>(data.data()), data.size(), tensor.RefCountIsOne()};
}

Gpu* gpu_of(OpKernelContext* ctx) {
  const auto* info = ctx->device()->tensorflow_accelerator_device_info();
  return info == nullptr ? nullptr : gpus().at(static_cast<size_t>(info->gpu_id)).get();
}

// That of TensorFlow for processors waits for no device.
class SyncDevice : public OpKernel {
 public:
  explicit SyncDevice(OpKernelConstruction* ctx) : OpKernel(ctx) {}
  void Compute(OpKernelContext* ctx) override { gpu_of(ctx)->drain(); }
};

// A variable that a kernel is given, and where its value was then. Kernels that read rows copy a
// value that somebody else reads, too, and the variable has the copy from then on.
struct UsedVariable {
  tensorflow::core::RefCountPtr<Var> variable;
  const char* begin = nullptr;
};

// A kernel for processors, whose results come into the GPU's memory when its stream comes to them.
// It computes at once, when all that its stream has waited for has happened; results of kernels
// before it that it reads are lent to it, and are away again when it has ended.
class LateKernel : public OpKernel {
 public:
  LateKernel(OpKernelConstruction* ctx, std::unique_ptr<OpKernel> inner)
      : OpKernel(ctx),
        inner_(std::move(inner)),
        hands_on_(hands_on(type_string())),
        writes_variables_(host_gpu::writes_variables(type_string())) {
    for (const auto& types : {input_types(), output_types()}) {
      for (const DataType type : types) has_variants_ |= type == tensorflow::DT_VARIANT;
    }
  }
  bool IsExpensive() override { return inner_->IsExpensive(); }
  const Tensor* const_tensor() const override { return inner_->const_tensor(); }

  void Compute(OpKernelContext* ctx) override {
    Gpu* gpu = gpu_of(ctx);
    Stream* stream = gpu == nullptr ? nullptr : gpu->compute_stream();
    if (stream == nullptr || (hands_on_ && !copies_variable(ctx))) return inner_->Compute(ctx);
    // What the stream is to wait for from now on, it waits for behind this kernel
    // (cuStreamWaitEvent).
    std::unique_lock<std::mutex> lock(gpu->memory_mutex());
    while (!stream->is_settled()) {
      lock.unlock();
      stream->settle();
      lock.lock();
    }
    const std::vector<UsedVariable> variables = lend_variables(ctx, gpu);
    const std::vector<Span> operands = lend_operands(ctx, gpu);
    const int64_t since_ns = now_ns(), calls = Stream::calls_of_thread();
    inner_->Compute(ctx);
    // Lists are stacked and divided by copies on the stream of a device that is none of
    // TensorFlow's own: these come into memory by themselves.
    if (!ctx->status().ok() || calls != Stream::calls_of_thread()) return gpu->take_back();
    bring_onto(gpu, ctx);
    if (!ctx->status().ok()) return gpu->take_back();
    double lasts_ns = gpu->settings().slowness * static_cast<double>(now_ns() - since_ns);
    for (const Span& made : results(ctx, gpu, operands, variables)) {
      // No reference is held, as by a kernel of a GPU: who gets this memory next is behind it on
      // the stream.
      const int64_t number = gpu->hide(made.begin, made.bytes);
      stream->write(made.begin, number, since_ns, static_cast<int64_t>(lasts_ns));
      lasts_ns = 0;  // all of a kernel's results come when it ends
    }
    gpu->take_back();
  }

 private:
  // Some kernels for processors ask for the host's memory (ScatterNd), where those for GPUs have
  // the GPU's.
  void bring_onto(const Gpu* gpu, OpKernelContext* ctx) const {
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      Tensor* output = ctx->mutable_output(i);
      if (output == nullptr || tensorflow::IsRefType(output_type(i)) || !output->IsInitialized() ||
          output_memory_types()[i] != tensorflow::DEVICE_MEMORY || output->NumElements() == 0 ||
          !tensorflow::DataTypeCanUseMemcpy(output->dtype()))
        continue;
      const auto data = output->tensor_data();
      if (find_owner(data.data()) == gpu) continue;
      Tensor there;
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(output->dtype(), output->shape(), &there));
      std::memcpy(const_cast<char*>(there.tensor_data().data()), data.data(), data.size());
      *output = there;
    }
  }

  std::vector<Span> lend_operands(OpKernelContext* ctx, Gpu* gpu) const {
    std::vector<Span> operands;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (!ctx->has_input(i) || ctx->input_is_ref(i)) continue;
      const Span span = span_of(ctx->input(i), gpu);
      if (span.bytes == 0) continue;
      gpu->lend(span.begin, span.bytes);
      operands.push_back(span);
    }
    return operands;
  }

  // Whether it reads a variable of which every reader gets a copy, as rows of it have been read.
  bool copies_variable(OpKernelContext* ctx) const {
    if (type_string() != "ReadVariableOp") return false;
    tensorflow::core::RefCountPtr<Var> variable;
    return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &variable).ok() &&
           variable->copy_on_read_mode.load();
  }

  // Elements of lists, and what other resources hold, are known to their kernels only.
  std::vector<UsedVariable> lend_variables(OpKernelContext* ctx, Gpu* gpu) const {
    std::vector<UsedVariable> found;
    bool others = has_variants_;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (input_type(i) != tensorflow::DT_RESOURCE || !ctx->has_input(i)) continue;
      tensorflow::core::RefCountPtr<Var> variable;
      const auto status =
          tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, i), &variable);
      if (!status.ok()) {
        others = true;
        continue;
      }
      const tensorflow::tf_shared_lock locked(*variable->mu());
      const Span span = span_of(*variable->tensor(), gpu);
      gpu->lend(span.begin, span.bytes);
      found.push_back({std::move(variable), span.begin});
    }
    if (others) gpu->reveal_all();
    return found;
  }

  // What the kernel has written. Memory that somebody else holds was there before: a constant, a
  // variable's value, a part of an operand.
  std::vector<Span> results(OpKernelContext* ctx, const Gpu* gpu, const std::vector<Span>& operands,
                            const std::vector<UsedVariable>& variables) const {
    std::vector<Span> found;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      const Tensor* output = ctx->mutable_output(i);
      if (output == nullptr || tensorflow::IsRefType(output_type(i))) continue;
      const Span span = span_of(*output, gpu);
      if (span.bytes == 0) continue;
      const auto operand = std::find_if(operands.begin(), operands.end(),
                                        [&](const Span& one) { return one.holds(span.begin); });
      const bool in_place =
          operand != operands.end() && operand->is_alone && operand->begin == span.begin;
      if (in_place || (operand == operands.end() && span.is_alone)) found.push_back(span);
    }
    for (const auto& [variable, begin] : variables) {
      const tensorflow::tf_shared_lock locked(*variable->mu());
      const Span span = span_of(*variable->tensor(), gpu);
      if (!writes_variables_ && span.begin == begin) continue;
      const bool is_operand = std::any_of(operands.begin(), operands.end(),
                                          [&](const Span& one) { return one.begin == span.begin; });
      if (span.bytes > 0 && !is_operand) found.push_back(span);
    }
    return found;
  }

  const std::unique_ptr<OpKernel> inner_;
  const bool hands_on_, writes_variables_;
  bool has_variants_ = false;
};

class LateFactory : public tensorflow::kernel_factory::OpKernelFactory {
 public:
  OpKernel* Create(OpKernelConstruction* ctx) override {
    auto* library = ctx->function_library();
    const tensorflow::OpRegistryInterface* ops = tensorflow::OpRegistry::Global();
    if (library != nullptr) ops = library->GetFunctionLibraryDefinition();
    std::shared_ptr<const tensorflow::NodeProperties> properties;
    auto status = tensorflow::NodeProperties::CreateFromNodeDef(ctx->def(), ops, &properties);
    OpKernel* inner = nullptr;
    auto* device = dynamic_cast<tensorflow::DeviceBase*>(ctx->device());
    if (status.ok()) {
      status = tensorflow::CreateOpKernel(tensorflow::DeviceType("CPU"), device,
                                          device->GetAllocator(tensorflow::AllocatorAttributes()),
                                          library, ctx->resource_manager(), properties,
                                          ctx->graph_def_version(), &inner);
    }
    if (!status.ok()) {
      ctx->SetStatus(status);
      return nullptr;
    }
    if (inner->AsAsync() != nullptr) return inner;  // it waits for others, and computes nothing
    return new LateKernel(ctx, std::unique_ptr<OpKernel>(inner));
  }
};

// A kernel by its op, its label, and one type of each attribute.
std::string describe(const KernelDef& kernel) {
  std::string text = kernel.op() + " " + kernel.label();
  std::set<std::string> types;
  for (const auto& constraint : kernel.constraint()) {
    for (const int type : constraint.allowed_values().list().type())
      types.insert(constraint.name() + "=" +
                   tensorflow::DataTypeString(static_cast<DataType>(type)));
  }
  for (const std::string& one : types) text += " " + one;
  return text;
}

// A kernel for several types as one for each.
std::vector<KernelDef> for_each_type(const KernelDef& kernel) {
  std::vector<KernelDef> found = {kernel};
  found[0].clear_constraint();
  for (const auto& constraint : kernel.constraint()) {
    if (constraint.allowed_values().list().type_size() == 0) continue;
    std::vector<KernelDef> next;
    for (const KernelDef& one : found) {
      for (const int type : constraint.allowed_values().list().type()) {
        next.push_back(one);
        auto* added = next.back().add_constraint();
        added->set_name(constraint.name());
        added->mutable_allowed_values()->mutable_list()->add_type(static_cast<DataType>(type));
      }
    }
    found = std::move(next);
  }
  return found;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

// Kernels of libraries for GPUs that cudnn_rnn.cc has for processors: dump_kernels.py leaves them
// out.
constexpr const char* kOthers[] = {
    "CudnnRNNV3 T=float,double host:=sequence_lengths,host_reserved",
    "CudnnRNNBackpropV3 T=float,double host:=sequence_lengths,host_reserved",
};

bool parse(const std::string& line, KernelDef* kernel) {
  const std::vector<std::string> words = split(line, ' ');
  kernel->set_op(words[0]);
  kernel->set_device_type("GPU");
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t at = words[i].find('=');
    if (at == std::string::npos) return false;
    const std::string name = words[i].substr(0, at);
    const std::vector<std::string> values = split(words[i].substr(at + 1), ',');
    if (name == "host:") {
      for (const std::string& value : values) kernel->add_host_memory_arg(value);
    } else if (name == "label:") {
      kernel->set_label(values[0]);
    } else {
      auto* constraint = kernel->add_constraint();
      constraint->set_name(name);
      for (const std::string& value : values) {
        DataType type = tensorflow::DT_INVALID;  // an older TensorFlow than the list's has fewer
        if (tensorflow::DataTypeFromString(value, &type))
          constraint->mutable_allowed_values()->mutable_list()->add_type(type);
      }
    }
  }
  return true;
}

REGISTER_KERNEL_BUILDER(Name("SyncDevice").Device("GPU"), SyncDevice);

}  // namespace

std::string register_late_kernels(const char* path) {
  std::ifstream file(path == nullptr ? "" : path);
  if (!file) return "HOST_GPU_KERNELS names no list of kernels";
  std::set<std::string> known;  // what TensorFlow without CUDA registers for GPUs all the same
  const tensorflow::KernelList registered = tensorflow::GetAllRegisteredKernels();
  for (const KernelDef& kernel : registered.kernel()) {
    if (kernel.device_type() != "GPU") continue;
    for (const KernelDef& one : for_each_type(kernel)) known.insert(describe(one));
  }
  std::vector<std::string> lines(std::begin(kOthers), std::end(kOthers));
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  }
  for (const std::string& line : lines) {
    KernelDef kernel;
    if (!parse(line, &kernel)) return "no kernel: " + line;
    const bool has_types = std::all_of(
        kernel.constraint().begin(), kernel.constraint().end(),
        [](const auto& constraint) { return constraint.allowed_values().list().type_size() > 0; });
    if (!has_types) continue;
    for (const KernelDef& one : for_each_type(kernel)) {
      if (known.count(describe(one)) > 0) continue;
      // It takes the definition.
      tensorflow::kernel_factory::OpKernelRegistrar(new KernelDef(one), "LateKernel",
                                                    std::make_unique<LateFactory>());
    }
  }
  return "";
}

}  // namespace host_gpu
