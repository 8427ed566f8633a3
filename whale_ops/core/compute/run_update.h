// Runs a program of arithmetic over elements of tensors.
#pragma once

#include <cstddef>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/compute/update_program.h"

namespace whale {

// Where the operands lie, by kind and number; temporary ones have no place. All have as many
// elements but scalars, rows and columns, of which it is a multiple. A variable before and after
// the update may be the same memory, and nothing else that is written is read elsewhere.
struct UpdateBuffers {
  std::vector<void*> places[kOperandKinds];
  std::vector<size_t> row_elements;  // of each row
  std::vector<size_t> column_runs;   // for how many elements one of each column stands
  std::vector<size_t> sum_elements;  // of each sum, which has `sum_width` places here
};

// Elements [begin, end) of all operands. Elements are independent of each other, so parts of them
// may run side by side. Each operation rounds by itself, as in a kernel of its own. To the places
// of sums is added what these elements give.
template <typename T>
WHALE_EXPORT void run_update(const UpdateProgram& program, const UpdateBuffers& buffers,
                             size_t begin, size_t end);

// How many places a sum of so many elements is collected in: several times as many, where a block
// of elements is longer than it.
template <typename T>
WHALE_EXPORT size_t sum_width(size_t elements);

// A sum, of its places in one run after the other: `parts` times `sum_width`; divided by `count` at
// last.
template <typename T>
WHALE_EXPORT void fold_sum(const T* places, size_t parts, size_t elements, T count, T* sum);

extern template void run_update<float>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
extern template void run_update<double>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
extern template size_t sum_width<float>(size_t);
extern template size_t sum_width<double>(size_t);
extern template void fold_sum<float>(const float*, size_t, size_t, float, float*);
extern template void fold_sum<double>(const double*, size_t, size_t, double, double*);

}  // namespace whale
