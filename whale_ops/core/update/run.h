// Runs a program of arithmetic over elements of tensors.
#pragma once

#include <cstddef>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/update/program.h"

namespace whale {

// Where the operands lie, by kind and number; temporary ones have no place. All have as many elements but scalars, rows and
// columns, of which it is a multiple. A variable before and after the update may be the same memory, and nothing
// else that is written is read elsewhere.
struct UpdateBuffers {
  std::vector<void*> places[kOperandKinds];
  std::vector<size_t> row_elements;  // of each row
  std::vector<size_t> column_runs;   // for how many elements one of each column stands
};

// Elements [begin, end) of all operands. Elements are independent of each other, so parts of them may run side by side.
// Each operation rounds by itself, as in a kernel of its own.
template <typename T>
WHALE_EXPORT void run_update(const UpdateProgram& program, const UpdateBuffers& buffers, size_t begin, size_t end);

extern template void run_update<float>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);
extern template void run_update<double>(const UpdateProgram&, const UpdateBuffers&, size_t, size_t);

}  // namespace whale
