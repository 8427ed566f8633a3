#include "whale_ops/tf_kernels/communication/parts.h"

#include <cstring>
#include <numeric>

namespace whale_ops {

namespace {

// Calls `copy` with (offset in the whole, offset in the parts, bytes) for every contiguous run.
template <typename Copy>
void for_each_run(const Tensor& whole, const AxisView& view, const std::vector<int64_t>& sizes,
                  const Copy& copy) {
  const int64_t inner_bytes = view.inner * tensorflow::DataTypeSize(whole.dtype());
  const int64_t row_bytes = total(sizes) * inner_bytes;
  int64_t part = 0, column = 0;
  for (const int64_t size : sizes) {
    const int64_t run = size * inner_bytes;
    for (int64_t o = 0; o < view.outer && run > 0; ++o)
      copy(o * row_bytes + column, part + o * run, static_cast<size_t>(run));
    part += view.outer * run;
    column += run;
  }
}

absl::Status allocate(OpKernelContext* ctx, const Tensor& like, Tensor* parts) {
  return ctx->allocate_temp(like.dtype(), TensorShape({like.NumElements()}), parts);
}

}  // namespace

int64_t total(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::string join_sizes(const std::vector<int64_t>& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i > 0 ? "," : "") + std::to_string(sizes[i]);
  return out + "]";
}

AxisView::AxisView(const TensorShape& shape, int axis) {
  for (int d = 0; d < axis; ++d) outer *= shape.dim_size(d);
  for (int d = axis + 1; d < shape.dims(); ++d) inner *= shape.dim_size(d);
}

std::vector<int64_t> AxisView::counts(const std::vector<int64_t>& sizes) const {
  std::vector<int64_t> counts;
  for (const int64_t size : sizes) counts.push_back(outer * size * inner);
  return counts;
}

absl::Status in_parts(OpKernelContext* ctx, const Tensor& whole, const AxisView& view,
                      const std::vector<int64_t>& sizes, Tensor* parts) {
  *parts = whole;
  if (view.outer <= 1) return absl::OkStatus();
  TF_RETURN_IF_ERROR(allocate(ctx, whole, parts));
  const char* from = data_of(whole);
  char* to = data_of(*parts);
  for_each_run(whole, view, sizes,
               [&](int64_t w, int64_t p, size_t n) { std::memcpy(to + p, from + w, n); });
  return absl::OkStatus();
}

absl::Status for_parts(OpKernelContext* ctx, const Tensor& whole, const AxisView& view,
                       const std::vector<int64_t>& sizes, Tensor* parts,
                       std::function<void()>* finish) {
  *parts = whole;
  if (view.outer <= 1) return absl::OkStatus();
  TF_RETURN_IF_ERROR(allocate(ctx, whole, parts));
  *finish = [whole, parts = *parts, view, sizes] {
    const char* from = data_of(parts);
    char* to = data_of(whole);
    for_each_run(whole, view, sizes,
                 [&](int64_t w, int64_t p, size_t n) { std::memcpy(to + w, from + p, n); });
  };
  return absl::OkStatus();
}

}  // namespace whale_ops
