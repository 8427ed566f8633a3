// One op for element-wise arithmetic on tensors of one shape: an UpdateProgram (core/compute) is
// run over all elements in one pass.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/core/compute/run_update.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using whale::OperandKind;

constexpr int64_t kLeastElements = 1 << 15;  // elements of a sum that are added on one thread
constexpr OperandKind kRead[] = {OperandKind::kTensor, OperandKind::kScalar, OperandKind::kRow,
                                 OperandKind::kColumn};

template <typename T>
class ElementwiseOp : public OpKernel {
 public:
  explicit ElementwiseOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> lines;
    read(ctx, "program", &lines, "shape", &shape_, "sum_shapes", &sum_shapes_);
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, to_tensorflow(whale::parse_update(lines, &program_)));
    int inputs = 0;
    for (const OperandKind kind : kRead) inputs += program_.count(kind);
    results_ = program_.count(OperandKind::kResult);
    const int sums = program_.count(OperandKind::kSum), outputs = results_ + sums;
    OP_REQUIRES(ctx, program_.count(OperandKind::kOld) == 0,
                invalid("the program of WhaleElementwise reads variables; expected tensors only"));
    OP_REQUIRES(
        ctx,
        inputs == ctx->num_inputs() && outputs == ctx->num_outputs() &&
            sums == static_cast<int>(sum_shapes_.size()),
        invalid("WhaleElementwise has ", ctx->num_inputs(), " values, ", ctx->num_outputs(),
                " results and ", sum_shapes_.size(), " shapes of sums; its program expects ",
                inputs, ", ", outputs, " and ", sums));
    for (const TensorShape& shape : sum_shapes_) {
      OP_REQUIRES(ctx, shape.num_elements() > 0 && fits(OperandKind::kRow, shape),
                  invalid("WhaleElementwise has a sum of shape ", shape.DebugString(),
                          "; expected a shape that is the last sizes of ", shape_.DebugString()));
    }
    for (const whale::Instruction& one : program_.instructions) {
      if (is_sum(one.op)) means_.push_back({one.to.index, one.op == whale::UpdateOp::kMean});
    }
    find_reusable();
    cost_ = Eigen::TensorOpCost(sizeof(T) * program_.count(OperandKind::kTensor),
                                sizeof(T) * program_.count(OperandKind::kResult),
                                program_.instructions.size());
  }

  void Compute(OpKernelContext* ctx) override {
    whale::UpdateBuffers buffers;
    int i = 0;
    for (const OperandKind kind : kRead) {
      for (int k = 0; k < program_.count(kind); ++k, ++i) {
        const Tensor& value = ctx->input(i);
        buffers.places[static_cast<int>(kind)].push_back(data_of(value));
        const int64_t elements = value.NumElements();
        OP_REQUIRES(
            ctx, fits(kind, value.shape()),
            invalid("value ", i, " of WhaleElementwise has the shape ", value.shape().DebugString(),
                    ", which is no ", kind_name(kind), " of ", shape_.DebugString()));
        if (kind == OperandKind::kRow) buffers.row_elements.push_back(elements);
        if (kind == OperandKind::kColumn)
          buffers.column_runs.push_back(elements > 0 ? shape_.num_elements() / elements : 1);
      }
    }
    for (int k = 0; k < results_; ++k) {
      Tensor* result = nullptr;
      OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output(reusable_[k], k, shape_, &result));
      buffers.places[static_cast<int>(OperandKind::kResult)].push_back(data_of(*result));
    }
    if (!sum_shapes_.empty()) return run_with_sums(ctx, buffers);
    ctx->eigen_cpu_device().parallelFor(
        shape_.num_elements(), cost_,
        [&](int64_t begin, int64_t end) { whale::run_update<T>(program_, buffers, begin, end); });
  }

 private:
  // Computes sums of parts, which are then added in the order of the parts, so that a sum has the
  // same bits for the same number of threads.
  void run_with_sums(OpKernelContext* ctx, const whale::UpdateBuffers& buffers) {
    const int64_t elements = shape_.num_elements();
    const Eigen::ThreadPoolDevice& device = ctx->eigen_cpu_device();
    const int64_t parts = std::clamp<int64_t>(elements / kLeastElements, 1, device.numThreads());
    const auto begin_of = [&](int64_t part) { return elements * part / parts; };
    std::vector<std::vector<T>> places;
    for (const TensorShape& shape : sum_shapes_)
      places.emplace_back(parts * whale::sum_width<T>(shape.num_elements()));
    const Eigen::TensorOpCost cost_of_part =
        cost_ * static_cast<double>(std::max(elements / parts, kLeastElements));
    device.parallelFor(parts, cost_of_part, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        whale::UpdateBuffers own = buffers;
        for (size_t k = 0; k < places.size(); ++k) {
          own.sum_elements.push_back(sum_shapes_[k].num_elements());
          own.places[static_cast<int>(OperandKind::kSum)].push_back(
              places[k].data() + part * (places[k].size() / parts));
        }
        whale::run_update<T>(program_, own, begin_of(part), begin_of(part + 1));
      }
    });
    for (const auto& [k, mean] : means_) {
      Tensor* sum = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(results_ + k, sum_shapes_[k], &sum));
      const int64_t own = sum_shapes_[k].num_elements(), added = mean ? elements / own : 1;
      whale::fold_sum<T>(places[k].data(), parts, own, T(added), sum->flat<T>().data());
    }
  }

  static const char* kind_name(OperandKind kind) {
    return kind == OperandKind::kTensor   ? "tensor"
           : kind == OperandKind::kScalar ? "scalar"
           : kind == OperandKind::kRow    ? "row"
                                          : "column";
  }

  // Whether an operand's shape fits: a row has the last dimensions of the shape, a column the first
  // ones, followed by ones.
  bool fits(OperandKind kind, const TensorShape& given) const {
    if (kind == OperandKind::kTensor) return given == shape_;
    if (kind == OperandKind::kScalar) return given.num_elements() == 1;
    int begin = 0, end = given.dims();
    if (kind == OperandKind::kRow) {
      while (begin < end && given.dim_size(begin) == 1) ++begin;
    } else {
      while (end > 0 && given.dim_size(end - 1) == 1) --end;
      if (given.dims() != shape_.dims()) return false;
    }
    const int shift = shape_.dims() - given.dims();
    for (int dim = begin; dim < end; ++dim) {
      if (dim + shift < 0 || given.dim_size(dim) != shape_.dim_size(dim + shift)) return false;
    }
    return true;
  }

  // Finds the tensors whose memory a result may reuse: those that are not read after the result's
  // first element is written.
  void find_reusable() {
    const int tensors = program_.count(OperandKind::kTensor),
              results = program_.count(OperandKind::kResult);
    std::vector<int> last_read(tensors, -1), first_write(results, -1);
    const int count = program_.instructions.size();
    for (int i = 0; i < count; ++i) {
      const whale::Instruction& one = program_.instructions[i];
      if (one.a.kind == OperandKind::kTensor) last_read[one.a.index] = i;
      if (is_binary(one.op) && one.b.kind == OperandKind::kTensor) last_read[one.b.index] = i;
      if (one.to.kind == OperandKind::kResult && first_write[one.to.index] < 0)
        first_write[one.to.index] = i;
    }
    reusable_.resize(results);
    for (int k = 0; k < results; ++k) {
      for (int i = 0; i < tensors; ++i) {
        if (last_read[i] <= first_write[k]) reusable_[k].push_back(i);
      }
    }
  }

  whale::UpdateProgram program_;
  TensorShape shape_;
  std::vector<TensorShape> sum_shapes_;
  int results_ = 0;                          // number of results with all elements
  std::vector<std::pair<int, bool>> means_;  // for each sum: its number, and whether it is a mean
  std::vector<std::vector<int>> reusable_;   // for each result: inputs whose memory it may reuse
  Eigen::TensorOpCost cost_{0, 0, 0};        // cost of an element
};

}  // namespace

REGISTER_OP("WhaleElementwise")
    .Input("values: N * T")
    .Output("results: R * T")
    .Output("sums: S * T")
    .Attr("program: list(string)")
    .Attr("shape: shape")
    .Attr("sum_shapes: list(shape) = []")
    .Attr("N: int >= 0")
    .Attr("R: int >= 0")
    .Attr("S: int >= 0 = 0")
    .Attr("T: {float, double}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(read_shape(c, "shape", &shape));
      std::vector<PartialTensorShape> sums;
      TF_RETURN_IF_ERROR(c->GetAttr("sum_shapes", &sums));
      const int results = c->num_outputs() - static_cast<int>(sums.size());
      for (int i = 0; i < c->num_outputs(); ++i) {
        if (i >= results)
          TF_RETURN_IF_ERROR(
              c->MakeShapeFromPartialTensorShape(sums[std::max(i - results, 0)], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc(
        "Arithmetic on the elements of tensors. program: its instructions, an operation each, with "
        "what is written and what is read: v tensors of the shape, s scalars, r rows (of its last "
        "sizes), c columns (of its first sizes, ones after them), t temporary elements, y results, "
        "z sums over the first sizes. values: tensors, scalars, rows, columns.");

WHALE_CPU_KERNEL_FOR("WhaleElementwise", "T", float, ElementwiseOp);
WHALE_CPU_KERNEL_FOR("WhaleElementwise", "T", double, ElementwiseOp);

}  // namespace whale_ops
