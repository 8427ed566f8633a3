// Many products of small matrices, which may lie anywhere in their tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/compute/processor.h"

namespace whale {

// One dimension of a product: its size, and the stride of its index in each tensor, in elements.
struct ProductDim {
  int64_t size, left, right, out;
};

// out[row, column] = sum of left[row, k] right[k, column] over the `summed` k. Columns are
// contiguous in `out` (columns.out is 1).
struct ProductSizes {
  ProductDim rows, columns, summed;
};

// Returns the elements of scratch memory that one product needs.
template <typename T>
WHALE_EXPORT int64_t scratch_elements(const ProductSizes& sizes);

template <typename T>
WHALE_EXPORT void multiply(const ProductSizes& sizes, const T* left, const T* right, T* out,
                           T* scratch);
template <typename T>
WHALE_EXPORT void multiply_by(ProcessorCode code, const ProductSizes& sizes, const T* left,
                              const T* right, T* out, T* scratch);

// A product in panels of columns, whose right operand may be packed once for many products. Panel p
// has the columns from p * `panel_columns` on; packed, it takes `panel_elements` elements.
template <typename T>
int64_t panel_columns(ProcessorCode code);
template <typename T>
int64_t panel_elements(ProcessorCode code, int64_t summed) {
  return panel_columns<T>(code) * summed;
}
template <typename T>
int64_t count_panels(ProcessorCode code, int64_t columns) {
  return (columns + panel_columns<T>(code) - 1) / panel_columns<T>(code);
}
template <typename T>
void pack_panel(ProcessorCode code, const ProductSizes& sizes, const T* right, int64_t panel,
                T* packed);
template <typename T>
void multiply_panel(ProcessorCode code, const ProductSizes& sizes, const T* left, const T* packed,
                    int64_t panel, T* out);

extern template int64_t scratch_elements<float>(const ProductSizes&);
extern template int64_t scratch_elements<double>(const ProductSizes&);
extern template void multiply<float>(const ProductSizes&, const float*, const float*, float*,
                                     float*);
extern template void multiply<double>(const ProductSizes&, const double*, const double*, double*,
                                      double*);
extern template void multiply_by<float>(ProcessorCode, const ProductSizes&, const float*,
                                        const float*, float*, float*);
extern template void multiply_by<double>(ProcessorCode, const ProductSizes&, const double*,
                                         const double*, double*, double*);

}  // namespace whale
