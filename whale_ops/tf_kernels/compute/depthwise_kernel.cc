// The gradient of a depthwise convolution with respect to its filter, on a CPU.

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "whale_ops/core/compute/depthwise.h"
#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {
namespace {

using whale::DepthwiseSizes;

// Fewest multiplications for a thread: some 35 us, several times what waking it takes.
constexpr int64_t kLeastPart = 1 << 19;
// Fewest pixels of a part of the rows, so that adding up the parts' sums costs little in
// comparison.
constexpr int64_t kLeastPixels = 256;
// Fewest channels of a part, so that a cache line is used by one thread only.
constexpr int64_t kLeastChannels = 32;
// The cost that parts claim, since Eigen's own threshold for using another thread is higher than
// ours.
constexpr double kWorthAThreadCycles = 1e7;

// The window along an image's height or width.
struct Window {
  int64_t size, filter, stride, before, after;  // explicit paddings in front and behind
};

template <typename T>
class DepthwiseFilterGradientOp : public OpKernel {
 public:
  explicit DepthwiseFilterGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "filter_shape", &filter_, "strides", &strides_, "padding", &padding_,
         "explicit_paddings", &paddings_);
    if (!ctx->status().ok()) return;
    OP_REQUIRES(ctx, filter_.dims() == 4 && filter_.num_elements() > 0,
                error("filter_shape is ", filter_.DebugString(),
                      "; expected [height, width, channels, multiplier], each at least 1"));
    OP_REQUIRES(ctx,
                strides_.size() == 4 && strides_[0] == 1 && strides_[3] == 1 && strides_[1] > 0 &&
                    strides_[2] > 0,
                error("strides are ", shown(strides_),
                      "; expected [1, height, width, 1], each at least 1"));
    OP_REQUIRES(ctx, paddings_fit(),
                error("explicit_paddings are ", shown(paddings_), " with padding ", padding_,
                      "; expected [0, 0, top, bottom, left, right, 0, 0], none negative, with "
                      "EXPLICIT, else none"));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &input = ctx->input(0), &out_backprop = ctx->input(1);
    OP_REQUIRES(
        ctx, input.dims() == 4 && input.dim_size(3) == filter_.dim_size(2),
        error("input has the shape ", input.shape().DebugString(), "; expected 4 dimensions, and ",
              filter_.dim_size(2), " channels, as the filter ", filter_.DebugString(), " has"));
    Window down{input.dim_size(1), filter_.dim_size(0), strides_[1], 0, 0};
    Window across{input.dim_size(2), filter_.dim_size(1), strides_[2], 0, 0};
    if (padding_ == "EXPLICIT") {
      down.before = paddings_[2];
      down.after = paddings_[3];
      across.before = paddings_[4];
      across.after = paddings_[5];
    }
    const int64_t rows = steps(&down), columns = steps(&across);
    const TensorShape expected(
        {input.dim_size(0), rows, columns, filter_.dim_size(2) * filter_.dim_size(3)});
    OP_REQUIRES(ctx, out_backprop.shape() == expected,
                error("out_backprop has the shape ", out_backprop.shape().DebugString(),
                      "; expected ", expected.DebugString(), " of the input ",
                      input.shape().DebugString(), ", the filter ", filter_.DebugString(),
                      ", strides ", shown(strides_), " and padding ", padding_));
    Tensor* gradient = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, filter_, &gradient));
    T* sums = gradient->flat<T>().data();
    std::fill_n(sums, filter_.num_elements(), T(0));
    if (input.NumElements() == 0 || out_backprop.NumElements() == 0) return;
    DepthwiseSizes sizes;
    sizes.images = input.dim_size(0);
    sizes.height = down.size;
    sizes.width = across.size;
    sizes.channels = filter_.dim_size(2);
    sizes.multiplier = filter_.dim_size(3);
    sizes.out_height = rows;
    sizes.out_width = columns;
    sizes.filter_height = down.filter;
    sizes.filter_width = across.filter;
    sizes.stride_height = down.stride;
    sizes.stride_width = across.stride;
    sizes.pad_top = down.before;
    sizes.pad_left = across.before;
    run(ctx, sizes, input.flat<T>().data(), out_backprop.flat<T>().data(), sums);
  }

 private:
  template <typename... Words>
  static absl::Status error(const Words&... words) {
    return invalid(words...);
  }

  static std::string shown(const std::vector<int64_t>& numbers) {
    return absl::StrCat("[", absl::StrJoin(numbers, ","), "]");
  }

  bool paddings_fit() const {
    if (padding_ != "EXPLICIT") return paddings_.empty();
    if (paddings_.size() != 8 || *std::min_element(paddings_.begin(), paddings_.end()) < 0)
      return false;
    return paddings_[0] == 0 && paddings_[1] == 0 && paddings_[6] == 0 && paddings_[7] == 0;
  }

  // Divides the work by rows, which are contiguous in memory, and, if there are few of them, by
  // channels as well. Sums of parts of the rows are added in the order of the parts, so that the
  // result has the same bits for the same number of threads.
  static void run(OpKernelContext* ctx, const DepthwiseSizes& sizes, const T* input,
                  const T* out_backprop, T* sums) {
    const Eigen::ThreadPoolDevice& device = ctx->eigen_cpu_device();
    const int64_t channels = sizes.out_channels(), rows = sizes.rows(),
                  pixels = rows * sizes.out_width;
    const int64_t filter = sizes.filter_height * sizes.filter_width * channels;
    const int64_t parts = std::clamp<int64_t>(pixels * filter / kLeastPart, 1, device.numThreads());
    const int64_t by_rows = std::clamp<int64_t>(pixels / kLeastPixels, 1, std::min(parts, rows));
    const int64_t by_channels = std::clamp<int64_t>(channels / kLeastChannels, 1, parts / by_rows);
    constexpr int64_t kVector = 32 / sizeof(T);  // parts begin at a whole vector
    const auto channel_of = [&](int64_t part) {
      return part == by_channels ? channels : channels * part / by_channels / kVector * kVector;
    };
    std::vector<T> others((by_rows - 1) * filter);  // the first part's are in the result
    const auto part_of = [&](int64_t part) {
      const int64_t row = part / by_channels, channel = part % by_channels;
      whale::add_filter_gradient<T>(sizes, input, out_backprop,
                                    {rows * row / by_rows, rows * (row + 1) / by_rows},
                                    {channel_of(channel), channel_of(channel + 1)},
                                    row == 0 ? sums : others.data() + (row - 1) * filter);
    };
    device.parallelFor(by_rows * by_channels, Eigen::TensorOpCost(0, 0, kWorthAThreadCycles),
                       [&](int64_t first, int64_t last) {
                         for (int64_t part = first; part < last; ++part) part_of(part);
                       });
    for (size_t begin = 0; begin < others.size(); begin += filter) {
      for (int64_t i = 0; i < filter; ++i) sums[i] += others[begin + i];
    }
  }

  // Returns the number of positions of the filter; `before` becomes the padding in front.
  int64_t steps(Window* window) const {
    if (padding_ == "SAME") {
      const int64_t steps = (window->size + window->stride - 1) / window->stride;
      window->before =
          std::max<int64_t>(0, (steps - 1) * window->stride + window->filter - window->size) / 2;
      return steps;
    }
    const int64_t room = window->before + window->size + window->after - window->filter;
    return room < 0 ? 0 : room / window->stride + 1;
  }

  TensorShape filter_;
  std::vector<int64_t> strides_, paddings_;
  std::string padding_;
};

}  // namespace

REGISTER_OP("WhaleDepthwiseFilterGradient")
    .Input("input: T")
    .Input("out_backprop: T")
    .Output("gradient: T")
    .Attr("filter_shape: shape")
    .Attr("strides: list(int)")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .Attr("T: {float, double}")
    .SetShapeFn([](InferenceContext* c) { return set_shape(c, "filter_shape"); })
    .Doc(
        "The gradient of a depthwise convolution with respect to its filter of shape filter_shape: "
        "[height, width, channels, multiplier]. input: [images, height, width, channels]. "
        "out_backprop: [images, height, width, channels * multiplier]. strides, padding and "
        "explicit_paddings are the convolution's, which is not dilated.");

WHALE_CPU_KERNEL_FOR("WhaleDepthwiseFilterGradient", "T", float, DepthwiseFilterGradientOp);
WHALE_CPU_KERNEL_FOR("WhaleDepthwiseFilterGradient", "T", double, DepthwiseFilterGradientOp);

}  // namespace whale_ops
