// One op for the update of many variables: the same UpdateProgram (core/compute) is run over the
// elements of each.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/core/compute/run_update.h"
#include "whale_ops/tf_kernels/compute/variables.h"

namespace whale_ops {
namespace {

using tensorflow::Var;
using whale::OperandKind;

template <typename T>
class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> lines;
    read(ctx, "program", &lines, "operands", &operands_, "shapes", &shapes_);
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, to_tensorflow(whale::parse_update(lines, &program_)));
    OP_REQUIRES(ctx,
                program_.count(OperandKind::kColumn) == 0 && program_.count(OperandKind::kSum) == 0,
                invalid("the program of WhaleUpdate has columns or sums; "
                        "expected tensors, scalars and rows only"));
    const auto all = [&](OperandKind kind) {
      return static_cast<int64_t>(shapes_.size()) * program_.count(kind);
    };
    const int64_t handles =
        std::count(ctx->input_types().begin(), ctx->input_types().end(), tensorflow::DT_RESOURCE);
    values_ = ctx->num_inputs() - handles;
    const bool inside = std::all_of(operands_.begin(), operands_.end(),
                                    [&](int64_t i) { return 0 <= i && i < values_; });
    OP_REQUIRES(
        ctx,
        inside && static_cast<int64_t>(operands_.size()) == all(OperandKind::kTensor) +
                                                                all(OperandKind::kScalar) +
                                                                all(OperandKind::kRow),
        invalid("the attribute `operands` of WhaleUpdate has ", operands_.size(), " numbers for ",
                values_,
                " values; expected those of each variable's tensors, its scalars, then its rows"));
    OP_REQUIRES(
        ctx, handles == all(OperandKind::kOld) && ctx->num_outputs() == all(OperandKind::kResult),
        invalid("WhaleUpdate has ", handles, " variables and ", ctx->num_outputs(),
                " results; expected ", all(OperandKind::kOld), " and ", all(OperandKind::kResult)));
    for (const TensorShape& shape : shapes_)
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + shape.num_elements());
    reads_old_.resize(program_.count(OperandKind::kOld));
    for (const whale::Instruction& one : program_.instructions) {
      if (one.a.kind == OperandKind::kOld) reads_old_[one.a.index] = true;
      if (is_binary(one.op) && one.b.kind == OperandKind::kOld) reads_old_[one.b.index] = true;
    }
    const int read = program_.count(OperandKind::kTensor) + program_.count(OperandKind::kOld);
    const int written = program_.count(OperandKind::kNew) + program_.count(OperandKind::kResult);
    cost_ =
        Eigen::TensorOpCost(sizeof(T) * read, sizeof(T) * written, program_.instructions.size());
  }

  void Compute(OpKernelContext* ctx) override {
    const int handles = ctx->num_inputs() - values_;
    std::vector<VariablePtr> variables(handles);
    for (int i = 0; i < handles; ++i) {
      OP_REQUIRES_OK(ctx, variable(ctx, i, &variables[i]));
    }
    const Locks locks(variables);
    std::vector<whale::UpdateBuffers> buffers(shapes_.size());
    std::vector<std::optional<Tensor>> fresh(handles);
    for (size_t unit = 0; unit < shapes_.size(); ++unit) {
      OP_REQUIRES_OK(ctx, find(ctx, unit, variables, &fresh, &buffers[unit]));
    }
    ctx->eigen_cpu_device().parallelFor(
        ends_.back(), cost_, [&](int64_t begin, int64_t end) { run(buffers, begin, end); });
    for (int i = 0; i < handles; ++i) {
      if (!fresh[i].has_value()) continue;
      *variables[i]->tensor() = *std::move(fresh[i]);
      variables[i]->is_initialized = true;
    }
  }

 private:
  // Finds a variable. One that is only assigned may get its first value here.
  absl::Status variable(OpKernelContext* ctx, int i, VariablePtr* found) const {
    const tensorflow::ResourceHandle& handle = tensorflow::HandleFromInput(ctx, i);
    if (reads_old_[i % reads_old_.size()]) return tensorflow::LookupResource(ctx, handle, found);
    return tensorflow::LookupOrCreateResource<Var>(ctx, handle, found, [](Var** made) {
      *made = new Var(tensorflow::DataTypeToEnum<T>::v());
      return absl::OkStatus();
    });
  }

  // Whether a tensor has the last dimensions of a shape, possibly preceded by ones.
  static bool is_row(const TensorShape& row, const TensorShape& shape) {
    int64_t elements = 1;
    int dim = shape.dims();
    while (dim > 0 && elements < row.num_elements()) elements *= shape.dim_size(--dim);
    const int own = shape.dims() - dim, before = row.dims() - own;
    for (int i = 0; i < own && before >= 0; ++i) {
      if (row.dim_size(before + i) != shape.dim_size(dim + i)) return false;
    }
    return before >= 0 && elements == row.num_elements() && elements > 0;
  }

  // Finds the addresses of the operands of one variable's update. `fresh`: new memory for variables
  // whose present memory somebody else still reads.
  absl::Status find(OpKernelContext* ctx, size_t unit, const std::vector<VariablePtr>& variables,
                    std::vector<std::optional<Tensor>>* fresh, whale::UpdateBuffers* found) {
    const auto places = [&](OperandKind kind) -> std::vector<void*>& {
      return found->places[static_cast<int>(kind)];
    };
    const TensorShape& shape = shapes_[unit];
    const int handles = ctx->num_inputs() - values_, tensors = program_.count(OperandKind::kTensor);
    const int one_by_one = tensors + program_.count(OperandKind::kScalar);
    const int each = one_by_one + program_.count(OperandKind::kRow);
    for (int i = 0; i < each; ++i) {
      const Tensor& value = ctx->input(handles + operands_[unit * each + i]);
      if (i >= one_by_one) {
        if (!is_row(value.shape(), shape)) {
          return invalid("WhaleUpdate has a row of shape ", value.shape().DebugString(),
                         " in the update of a ", "variable of shape ", shape.DebugString(),
                         "; expected its last sizes");
        }
        places(OperandKind::kRow).push_back(data_of(value));
        found->row_elements.push_back(value.NumElements());
        continue;
      }
      const bool scalar = i >= tensors;
      if (scalar ? value.NumElements() != 1 : value.shape() != shape) {
        return invalid("WhaleUpdate has an operand of shape ", value.shape().DebugString(),
                       " in the update of a ", "variable of shape ", shape.DebugString(),
                       "; expected ", scalar ? "one element" : "the variable's shape");
      }
      places(scalar ? OperandKind::kScalar : OperandKind::kTensor).push_back(data_of(value));
    }
    const int held = program_.count(OperandKind::kOld);
    const DataType type = tensorflow::DataTypeToEnum<T>::v();
    for (int i = unit * held; i < static_cast<int>(unit + 1) * held; ++i) {
      Var* variable = variables[i].get();
      Tensor* tensor = variable->tensor();
      const bool fits =
          variable->is_initialized && tensor->shape() == shape && tensor->dtype() == type;
      if (!fits && reads_old_[i - unit * held]) {
        return refused_variable(
            ctx->op_kernel().requested_input(i), *variable,
            absl::StrCat(tensorflow::DataTypeString(type), " of shape ", shape.DebugString()));
      }
      places(OperandKind::kOld).push_back(fits ? data_of(*tensor) : nullptr);
      if (fits && (variable->copy_on_read_mode.load() || tensor->RefCountIsOne())) {
        places(OperandKind::kNew).push_back(data_of(*tensor));
        continue;
      }
      tensorflow::AllocatorAttributes attributes;
      attributes.set_gpu_compatible(true);
      attributes.set_nic_compatible(true);
      TF_RETURN_IF_ERROR(ctx->allocate_temp(type, shape, &(*fresh)[i].emplace(), attributes));
      places(OperandKind::kNew).push_back(data_of(*(*fresh)[i]));
    }
    const int results = program_.count(OperandKind::kResult);
    for (int i = 0; i < results; ++i) {
      Tensor* result = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(unit * results + i, shape, &result));
      places(OperandKind::kResult).push_back(data_of(*result));
    }
    return absl::OkStatus();
  }

  // Updates elements [begin, end), counted over all variables.
  void run(const std::vector<whale::UpdateBuffers>& buffers, int64_t begin, int64_t end) const {
    size_t unit = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    while (begin < end) {
      const int64_t first = unit == 0 ? 0 : ends_[unit - 1], last = std::min(end, ends_[unit]);
      whale::run_update<T>(program_, buffers[unit], begin - first, last - first);
      begin = last;
      ++unit;
    }
  }

  whale::UpdateProgram program_;
  std::vector<int64_t> operands_;
  std::vector<TensorShape> shapes_;
  // The end of each variable's elements, counted over all variables.
  std::vector<int64_t> ends_;
  int values_ = 0;
  std::vector<bool> reads_old_;        // for each variable of an update
  Eigen::TensorOpCost cost_{0, 0, 0};  // cost of an element
};

}  // namespace

REGISTER_OP("WhaleUpdate")
    .Input("variables: H * resource")
    .Input("values: N * T")
    .Output("results: R * T")
    .Attr("program: list(string)")
    .Attr("operands: list(int)")
    .Attr("shapes: list(shape)")
    .Attr("H: int >= 1")
    .Attr("N: int >= 0")
    .Attr("R: int >= 0")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      const int results = c->num_outputs();
      for (int i = 0; i < results; ++i) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(
            shapes[i / std::max<int>(1, results / shapes.size())], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc(
        "Updates many variables by the same arithmetic. program: its instructions, an operation "
        "each, with what is written and what is read: v tensors, s scalars, r rows (of the last "
        "sizes), o variables before, n variables after, t temporary elements, y results. shapes: "
        "of each update. variables, results: each update's, one after the other; operands: which "
        "of the values its tensors, its scalars and its rows are.");

WHALE_CPU_KERNEL_FOR("WhaleUpdate", "T", float, UpdateOp);
WHALE_CPU_KERNEL_FOR("WhaleUpdate", "T", double, UpdateOp);

}  // namespace whale_ops
