// The gradient of a depthwise convolution with respect to its filter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// Images are [images, height, width, channels], incoming gradients [images, out_height, out_width,
// channels * multiplier], the filter [filter_height, filter_width, channels, multiplier]. Paddings
// at the bottom and on the right follow from the other sizes.
struct DepthwiseSizes {
  int64_t images, height, width, channels, multiplier;
  int64_t out_height, out_width, filter_height, filter_width;
  int64_t stride_height, stride_width, pad_top, pad_left;

  int64_t out_channels() const { return channels * multiplier; }
  int64_t rows() const { return images * out_height; }  // output rows of all images
};

// The range [begin, end).
struct Span {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

// Adds to `sums`, which has the filter's shape, the gradient from these output rows and output
// channels. Calls for different channels may run in parallel; calls for different rows may, too, if
// each has sums of its own. Each product and each addition is rounded separately, and in the same
// order on any processor.
template <typename T>
WHALE_EXPORT void add_filter_gradient(const DepthwiseSizes& sizes, const T* input, const T* out,
                                      Span rows, Span channels, T* sums);

extern template void add_filter_gradient<float>(const DepthwiseSizes&, const float*, const float*,
                                                Span, Span, float*);
extern template void add_filter_gradient<double>(const DepthwiseSizes&, const double*,
                                                 const double*, Span, Span, double*);

}  // namespace whale
