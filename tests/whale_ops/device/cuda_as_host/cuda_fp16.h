// CUDA's 16-bit floats, by the core's conversions.
#pragma once

#include "whale_ops/core/collective/reduce.h"

template <whale::DType kDtype>
struct NarrowFloat {
  uint16_t bits = 0;

  NarrowFloat() = default;
  explicit NarrowFloat(float x) { whale::narrow_floats(kDtype, &x, reinterpret_cast<char*>(&bits), 1); }
  explicit operator float() const {
    float x = 0;
    whale::widen_floats(kDtype, reinterpret_cast<const char*>(&bits), &x, 1);
    return x;
  }
};

using __half = NarrowFloat<whale::DType::kFloat16>;
