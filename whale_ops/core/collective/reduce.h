// Element-wise reductions by dtype.
#pragma once

#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// Returns the bytes of one element; 0 for kRaw.
WHALE_EXPORT size_t element_bytes(DType dtype);
WHALE_EXPORT const char* name_of(DType dtype);

// Checks that `reduction` is defined for `dtype`; the error says which reductions are.
WHALE_EXPORT Status check_reduction(DType dtype, Reduction reduction);

// An operand of a reduction. `wide`: its elements are float32 sums of a 16-bit dtype, not rounded
// yet.
struct Term {
  const void* data = nullptr;
  bool wide = false;
};

// Computes dst[i] = sources[0][i] (op) sources[1][i] (op) ... in exactly this order, for `count`
// elements. 16-bit floats are accumulated in float32 and rounded once (to nearest even), or not at
// all if dst is wide; integers wrap; NaN wins min and max; for bool, sum and max are "or", prod and
// min are "and". dst may be one of the sources.
WHALE_EXPORT void reduce(DType dtype, Reduction reduction, void* dst, bool dst_wide,
                         const std::vector<Term>& sources, size_t count);

// Converts float32 to float16 or bfloat16 (to nearest even), and back.
WHALE_EXPORT void narrow_floats(DType to, const float* from, void* dst, size_t count);
WHALE_EXPORT void widen_floats(DType from, const void* src, float* dst, size_t count);

}  // namespace whale
