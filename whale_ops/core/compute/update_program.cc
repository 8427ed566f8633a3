#include "whale_ops/core/compute/update_program.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace whale {
namespace {

constexpr const char* kNames[] = {"Copy", "Neg",   "Abs",        "Sign",     "Square",
                                  "Sqrt", "Rsqrt", "Reciprocal", "Relu",     "Relu6",
                                  "Sum",  "Mean",  "Add",        "Sub",      "Mul",
                                  "Div",  "Max",   "Min",        "ReluGrad", "Relu6Grad"};
constexpr int kMostOfAKind = 64;

bool parse_op(const std::string& word, UpdateOp* op) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (word == kNames[i]) {
      *op = static_cast<UpdateOp>(i);
      return true;
    }
  }
  return false;
}

bool parse_operand(const std::string& word, Operand* operand) {
  if (word.size() < 2 || word.size() > 3 ||
      word.find_first_not_of("0123456789", 1) != std::string::npos)
    return false;
  const char* letter = std::strchr(kOperandLetters, word[0]);
  if (letter == nullptr) return false;
  operand->kind = static_cast<OperandKind>(letter - kOperandLetters);
  operand->index = std::stoi(word.substr(1));
  return operand->index < kMostOfAKind;
}

// Whether the operand has an element for each place. Other operands are only read to compute such
// ones, or (sums) written by sums alone.
bool has_all_elements(const Operand& operand) {
  return operand.kind >= OperandKind::kNew && operand.kind <= OperandKind::kResult;
}

bool can_be_written(UpdateOp op, const Operand& to) {
  return is_sum(op) ? to.kind == OperandKind::kSum : has_all_elements(to);
}

bool can_be_read(UpdateOp op, const Operand& from) {
  return is_sum(op) ? from.kind == OperandKind::kTensor || has_all_elements(from)
                    : from.kind != OperandKind::kSum;
}

bool parse_line(const std::string& line, Instruction* found) {
  std::istringstream words(line);
  std::string op, to, a, b, more;
  words >> op >> to >> a;
  if (!parse_op(op, &found->op) || !parse_operand(to, &found->to) || !parse_operand(a, &found->a))
    return false;
  if (is_binary(found->op)) {
    words >> b;
    if (!parse_operand(b, &found->b) || !can_be_read(found->op, found->b)) return false;
  }
  return can_be_written(found->op, found->to) && can_be_read(found->op, found->a) &&
         !(words >> more);
}

}  // namespace

Status parse_update(const std::vector<std::string>& lines, UpdateProgram* program) {
  *program = {};
  for (const std::string& line : lines) {
    Instruction found;
    if (!parse_line(line, &found)) {
      return Status::Error(Code::kInvalidArgument,
                           "'" + line +
                               "' is no instruction of an update; expected an operation, what is "
                               "written and what is read, as in 'Mul t0 v0 s1'");
    }
    const Operand* operands[] = {&found.to, &found.a, &found.b};
    for (int i = 0; i < (is_binary(found.op) ? 3 : 2); ++i) {
      int& count = program->counts[static_cast<int>(operands[i]->kind)];
      count = std::max(count, operands[i]->index + 1);
    }
    program->instructions.push_back(found);
  }
  // A variable exists both before and after the update.
  int& before = program->counts[static_cast<int>(OperandKind::kOld)];
  int& after = program->counts[static_cast<int>(OperandKind::kNew)];
  before = after = std::max(before, after);
  return Status::Ok();
}

}  // namespace whale
