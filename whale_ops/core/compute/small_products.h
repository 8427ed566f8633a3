// Many products of small matrices, wherever these lie in their tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// One dimension of a product: how long it is, and how many elements lie from one index to the next
// in each tensor.
struct ProductDim {
  int64_t size, left, right, out;
};

// out[row, column] = sum of left[row, k] right[k, column] over the `summed` k. Columns lie side by
// side in `out` (columns.out is 1).
struct ProductSizes {
  ProductDim rows, columns, summed;
};

// Elements of scratch memory that one product needs.
template <typename T>
WHALE_EXPORT int64_t scratch_elements(const ProductSizes& sizes);

// What a product may be computed by; libraries are compiled for any processor.
enum class ProductCode { kAnywhere, kAvx2, kAvx512 };
// The codes that this processor has, the fastest one first.
WHALE_EXPORT std::vector<ProductCode> product_codes();

template <typename T>
WHALE_EXPORT void multiply(const ProductSizes& sizes, const T* left, const T* right, T* out,
                           T* scratch);
template <typename T>
WHALE_EXPORT void multiply_by(ProductCode code, const ProductSizes& sizes, const T* left,
                              const T* right, T* out, T* scratch);

extern template int64_t scratch_elements<float>(const ProductSizes&);
extern template int64_t scratch_elements<double>(const ProductSizes&);
extern template void multiply<float>(const ProductSizes&, const float*, const float*, float*,
                                     float*);
extern template void multiply<double>(const ProductSizes&, const double*, const double*, double*,
                                      double*);
extern template void multiply_by<float>(ProductCode, const ProductSizes&, const float*,
                                        const float*, float*, float*);
extern template void multiply_by<double>(ProductCode, const ProductSizes&, const double*,
                                         const double*, double*, double*);

}  // namespace whale
