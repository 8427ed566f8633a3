// Arithmetic on elements as a little program: what is computed of each element of a tensor, and
// where it goes.
//
//   Operand        a tensor, a scalar, a variable before or after an update, a block of temporary
//   elements, a result, a row
//                  (a tensor of the last sizes, which is read again and again), a column (of the
//                  first sizes, each element of which stands for a run of as many as the last sizes
//                  make), or a sum (of the last sizes, over all first ones)
//   Instruction    one operation on operands
//   UpdateProgram  instructions in order, and how many operands of each kind they name
//   parse_update   an UpdateProgram of its text
#pragma once

#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// Kinds of operands, each with a letter in the text: v0 is the first tensor, s1 the second scalar,
// r0 the first row, c0 the first column, o0 the first variable before the update, n0 the same one
// after it, z0 the first sum.
enum class OperandKind : int {
  kTensor,
  kScalar,
  kOld,
  kNew,
  kTemporary,
  kResult,
  kRow,
  kColumn,
  kSum
};
constexpr int kOperandKinds = 9;
constexpr char kOperandLetters[] = "vsontyrcz";

struct Operand {
  OperandKind kind = OperandKind::kTensor;
  int index = 0;
};

// kReluGrad, kRelu6Grad: operands are the gradient and the features. kSum, kMean: reduce the
// operand over its first dimensions.
enum class UpdateOp : int {
  kCopy,
  kNeg,
  kAbs,
  kSign,
  kSquare,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kRelu,
  kRelu6,
  kSum,
  kMean,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kReluGrad,
  kRelu6Grad
};

// Whether the operation has two operands.
inline bool is_binary(UpdateOp op) { return op >= UpdateOp::kAdd; }

inline bool is_sum(UpdateOp op) { return op == UpdateOp::kSum || op == UpdateOp::kMean; }

struct Instruction {
  UpdateOp op = UpdateOp::kCopy;
  Operand to, a, b;  // b: only of binary operations
};

struct UpdateProgram {
  std::vector<Instruction> instructions;
  int counts[kOperandKinds] = {};

  int count(OperandKind kind) const { return counts[static_cast<int>(kind)]; }
};

// Parses lines such as "Mul t0 v0 s1": operation, result, operands.
WHALE_EXPORT Status parse_update(const std::vector<std::string>& lines, UpdateProgram* program);

}  // namespace whale
