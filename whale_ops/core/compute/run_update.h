// Runs an UpdateProgram over the elements of tensors.
#pragma once

#include <cstddef>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/compute/update_program.h"

namespace whale {

// Where the operands lie, by kind and number; temporaries have no place. All have the same number
// of elements, except scalars, and rows and columns, whose sizes divide it. A variable before and
// after the update may be the same memory; nothing else that is written may be read elsewhere.
struct UpdateBuffers {
  std::vector<void*> places[kOperandKinds];
  std::vector<size_t> row_elements;  // elements of each row
  std::vector<size_t> column_runs;   // places for which one element of each column stands
  std::vector<size_t> sum_elements;  // elements of each sum, which has `sum_width` places here
};

// Runs the program for elements [begin, end) of all operands. Elements are independent, so parts of
// them may run in parallel. Each operation is rounded as in a kernel of its own. Contributions of
// these elements are added to the places of sums.
template <typename T>
WHALE_EXPORT void run_update(const UpdateProgram& program, const UpdateBuffers& buffers,
                             size_t begin, size_t end);

// Returns the number of places in which a sum of `elements` elements is accumulated: a multiple of
// `elements`, if a block of elements is longer than the sum.
template <typename T>
WHALE_EXPORT size_t sum_width(size_t elements);

// Computes a sum from its places of `parts` runs, `sum_width` each, and divides it by `count`.
template <typename T>
WHALE_EXPORT void fold_sum(const T* places, size_t parts, size_t elements, T count, T* sum);

extern template void run_update<float>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
extern template void run_update<double>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
extern template size_t sum_width<float>(size_t);
extern template size_t sum_width<double>(size_t);
extern template void fold_sum<float>(const float*, size_t, size_t, float, float*);
extern template void fold_sum<double>(const double*, size_t, size_t, double, double*);

}  // namespace whale
