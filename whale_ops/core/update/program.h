// The arithmetic of an update as a little program: what is computed of each element of a variable, and where it goes.
//
//   Operand        a tensor, a scalar, a variable before or after the update, a block of temporary elements, a result, or a row
//                  (a tensor of fewer dimensions, of the variable's last sizes, which is read again and again)
//   Instruction    one operation on operands
//   UpdateProgram  instructions in order, and how many operands of each kind they name
//   parse_update   an UpdateProgram of its text
#pragma once

#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// One letter in the text: v0 is the first tensor, s1 the second scalar, r0 the first row, o0 the first variable as it was, n0 as it
// will be.
enum class OperandKind : int { kTensor, kScalar, kOld, kNew, kTemporary, kResult, kRow };
constexpr int kOperandKinds = 7;
constexpr char kOperandLetters[] = "vsontyr";

struct Operand {
  OperandKind kind = OperandKind::kTensor;
  int index = 0;
};

enum class UpdateOp : int { kCopy, kNeg, kAbs, kSign, kSquare, kSqrt, kRsqrt, kReciprocal, kAdd, kSub, kMul, kDiv, kMax, kMin };

// True for operations of two operands.
inline bool is_binary(UpdateOp op) { return op >= UpdateOp::kAdd; }

struct Instruction {
  UpdateOp op = UpdateOp::kCopy;
  Operand to, a, b;  // b: of binary operations
};

struct UpdateProgram {
  std::vector<Instruction> instructions;
  int counts[kOperandKinds] = {};

  int count(OperandKind kind) const { return counts[static_cast<int>(kind)]; }
};

// Of lines such as "Mul t0 v0 s1": operation, where the result goes, operands. At most one operand is a scalar.
WHALE_EXPORT Status parse_update(const std::vector<std::string>& lines, UpdateProgram* program);

}  // namespace whale
