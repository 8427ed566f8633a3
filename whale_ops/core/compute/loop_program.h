// The turns of a loop as a little program: what one turn computes of slices of tensors, of tensors
// that stay the same, and of what the turn before left.
//
//   LoopView     a matrix within a buffer: where it begins, and the elements between rows, columns
//   LoopStep     one operation on views
//   LoopProgram  the steps of a turn, in blocks that go over their rows together
//   parse_loop   a LoopProgram of its text
//
// A line of the text is a step: its operation, the view that it writes, the views that it reads,
// and sizes: "Tanh t0+0:256:1 x1+512:1024:1 8 256" (8 rows, 256 columns), "MatMul t1+0:1024:1
// s0+0:256:1 w0+0:1024:1 8 1024 256" (rows, columns, summed). A view is a buffer's letter and
// number, +first element, :elements from row to row, :from column to column; or a number, as
// "=0.5". "block 3" stands before three steps that go over their rows together.
#pragma once

#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// Kinds of buffers, each with a letter in the text: x0 is the turn's slice of the first sliced
// tensor, w0 the first tensor that stays the same, s0 the first state before the turn, n0 the same
// state after the turn, y0 the turn's slice of the first stacked result, t0 the first temporary.
enum class LoopBuffer : int { kSlice, kSame, kState, kNext, kStacked, kTemporary, kNumber };
constexpr int kLoopBuffers = 6;
constexpr char kLoopLetters[] = "xwsnyt";

struct LoopView {
  LoopBuffer buffer = LoopBuffer::kNumber;
  int index = 0;
  int64_t first = 0, row = 0, column = 0;
  double number = 0;
};

// Operations on elements, with one, two and three operands; reductions of a matrix; matrix
// products.
enum class LoopOp : int {
  kCopy,
  kNeg,
  kAbs,
  kSign,
  kSquare,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kExp,
  kLog,
  kLog1p,
  kTanh,
  kSigmoid,
  kRelu,
  kRelu6,
  kElu,
  kSoftplus,
  kNot,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kSquaredDifference,
  kTanhGrad,     // operands: result and gradient, as TensorFlow orders them
  kSigmoidGrad,  // as kTanhGrad
  kSqrtGrad,
  kRsqrtGrad,
  kReciprocalGrad,
  kReluGrad,  // operands: gradient and features
  kRelu6Grad,
  kEluGrad,       // operands: gradient and result
  kSoftplusGrad,  // operands: gradient and features
  kLess,
  kLessEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  kSelect,
  kSumRows,     // sum over all rows: one row
  kSumColumns,  // sum over all columns: one column
  kMatMul,
};

inline int operands_of(LoopOp op) {
  if (op < LoopOp::kAdd || op == LoopOp::kSumRows || op == LoopOp::kSumColumns) return 1;
  return op == LoopOp::kSelect ? 3 : 2;
}

// Whether each element of the result is computed independently of the others.
inline bool is_elementwise(LoopOp op) { return op < LoopOp::kSumRows; }

struct LoopStep {
  LoopOp op = LoopOp::kCopy;
  LoopView to, from[3];
  int64_t rows = 0, columns = 0, summed = 0;
};

// Steps [begin, end) that go over their rows together.
struct LoopBlock {
  size_t begin = 0, end = 0;
};

struct LoopProgram {
  std::vector<LoopStep> steps;
  std::vector<LoopBlock> blocks;
  std::vector<int64_t> elements[kLoopBuffers];  // elements of each buffer that the steps reach

  int count(LoopBuffer kind) const {
    return static_cast<int>(elements[static_cast<int>(kind)].size());
  }
};

WHALE_EXPORT Status parse_loop(const std::vector<std::string>& lines, LoopProgram* program);

}  // namespace whale
