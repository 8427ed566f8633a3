// One op that adds rows to, or subtracts them from, numbered rows of many tables.
//
// TensorFlow's kernel takes some 150 ns for a row of 16 numbers, since it waits for memory; here
// rows are prefetched.
#include <cstring>
#include <string>
#include <vector>

#include "whale_ops/tf_kernels/compute/variables.h"

namespace whale_ops {
namespace {

constexpr int64_t kAhead = 12;  // rows that are prefetched ahead of their use
constexpr int64_t kFetchedBytes = 64;

// Adds each of `rows` to the table's row with the corresponding id, or subtracts it.
template <typename T, typename Id, bool kSubtracts>
void add_rows(T* table, const Id* ids, const T* rows, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const char* next = reinterpret_cast<const char*>(table + ids[i + kAhead] * width);
      for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += kFetchedBytes)
        __builtin_prefetch(next + at, 1);
    }
    T* __restrict__ to = table + static_cast<int64_t>(ids[i]) * width;
    const T* __restrict__ from = rows + i * width;
    for (int64_t k = 0; k < width; ++k) to[k] = kSubtracts ? to[k] - from[k] : to[k] + from[k];
  }
}

template <typename T, typename Id>
class ScatterRowsOp : public OpKernel {
 public:
  explicit ScatterRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "N", &tables_, "subtracts", &subtracts_);
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<VariablePtr> variables(tables_);
    for (int i = 0; i < tables_; ++i) OP_REQUIRES_OK(ctx, find_variable(ctx, i, &variables[i]));
    const Locks locks(variables);
    std::vector<Job> jobs(tables_);
    int64_t elements = 0;
    for (int i = 0; i < tables_; ++i) {
      OP_REQUIRES_OK(ctx, check(ctx, i, variables[i].get(), &jobs[i]));
      elements += jobs[i].count * jobs[i].width;
    }
    for (int i = 0; i < tables_; ++i) OP_REQUIRES_OK(ctx, own(ctx, variables[i].get(), &jobs[i]));
    const Eigen::TensorOpCost cost(2.0 * sizeof(T) * elements / tables_,
                                   1.0 * sizeof(T) * elements / tables_, 1.0 * elements / tables_);
    ctx->eigen_cpu_device().parallelFor(tables_, cost, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Job& job = jobs[i];
        const auto add = subtracts_ ? add_rows<T, Id, true> : add_rows<T, Id, false>;
        add(job.table, job.ids, job.rows, job.count, job.width);
      }
    });
  }

 private:
  struct Job {
    T* table = nullptr;
    const Id* ids = nullptr;
    const T* rows = nullptr;
    int64_t count = 0, width = 0;
  };

  absl::Status check(OpKernelContext* ctx, int i, tensorflow::Var* variable, Job* job) const {
    const Tensor& ids = ctx->input(tables_ + i);
    const Tensor& rows = ctx->input(2 * tables_ + i);
    const Tensor& table = *variable->tensor();
    if (!variable->is_initialized || table.dims() < 1 ||
        table.dtype() != tensorflow::DataTypeToEnum<T>::v()) {
      return refused_variable(ctx->op_kernel().requested_input(i), *variable,
                              absl::StrCat("a table of ", tensorflow::DataTypeString(
                                                              tensorflow::DataTypeToEnum<T>::v())));
    }
    TensorShape expected = ids.shape();
    for (int d = 1; d < table.dims(); ++d) expected.AddDim(table.dim_size(d));
    if (rows.shape() != expected) {
      return invalid("WhaleScatterRows has rows of shape ", rows.shape().DebugString(),
                     " for ids of shape ", ids.shape().DebugString(), " of a table of shape ",
                     table.shape().DebugString(), "; expected ", expected.DebugString());
    }
    job->ids = ids.flat<Id>().data();
    job->rows = rows.flat<T>().data();
    job->count = ids.NumElements();
    job->width = job->count > 0 ? rows.NumElements() / job->count : 0;
    const auto limit = table.dim_size(0);
    for (int64_t k = 0; k < job->count; ++k) {
      if (job->ids[k] < 0 || job->ids[k] >= limit)
        return invalid("indices[", k, "] = ", job->ids[k], " is not in [0, ", limit, ")");
    }
    return absl::OkStatus();
  }

  // Makes sure that nobody else reads the memory of the table, copying it if necessary.
  static absl::Status own(OpKernelContext* ctx, tensorflow::Var* variable, Job* job) {
    Tensor* tensor = variable->tensor();
    if (!variable->copy_on_read_mode.load() && !tensor->RefCountIsOne()) {
      tensorflow::AllocatorAttributes attributes;
      attributes.set_gpu_compatible(true);
      attributes.set_nic_compatible(true);
      Tensor fresh;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &fresh, attributes));
      std::memcpy(data_of(fresh), data_of(*tensor), tensor->TotalBytes());
      *tensor = std::move(fresh);
    }
    job->table = tensor->flat<T>().data();
    return absl::OkStatus();
  }

  int tables_ = 1;
  bool subtracts_ = false;
};

}  // namespace

REGISTER_OP("WhaleScatterRows")
    .Input("tables: N * resource")
    .Input("ids: N * Tindices")
    .Input("rows: N * T")
    .Attr("subtracts: bool")
    .Attr("N: int >= 1")
    .Attr("T: {float, double}")
    .Attr("Tindices: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Adds rows to the numbered rows of tables, or subtracts them, one after the other. tables: "
        "different variables; ids, rows: a row for each id, of each table.");

#define WHALE_SCATTER_KERNEL(type, id)                         \
  REGISTER_KERNEL_BUILDER(Name("WhaleScatterRows")             \
                              .Device(tensorflow::DEVICE_CPU)  \
                              .TypeConstraint<type>("T")       \
                              .TypeConstraint<id>("Tindices"), \
                          ScatterRowsOp<type, id>)
WHALE_SCATTER_KERNEL(float, int32_t);
WHALE_SCATTER_KERNEL(float, int64_t);
WHALE_SCATTER_KERNEL(double, int32_t);
WHALE_SCATTER_KERNEL(double, int64_t);
#undef WHALE_SCATTER_KERNEL

}  // namespace whale_ops
