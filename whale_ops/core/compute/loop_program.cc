#include "whale_ops/core/compute/loop_program.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace whale {
namespace {

constexpr const char* kLoopNames[] = {
    "Copy",      "Neg",         "Abs",        "Sign",         "Square",
    "Sqrt",      "Rsqrt",       "Reciprocal", "Exp",          "Log",
    "Log1p",     "Tanh",        "Sigmoid",    "Relu",         "Relu6",
    "Elu",       "Softplus",    "Not",        "Add",          "Sub",
    "Mul",       "Div",         "Max",        "Min",          "SquaredDifference",
    "TanhGrad",  "SigmoidGrad", "SqrtGrad",   "RsqrtGrad",    "ReciprocalGrad",
    "ReluGrad",  "Relu6Grad",   "EluGrad",    "SoftplusGrad", "Less",
    "LessEqual", "Equal",       "NotEqual",   "And",          "Or",
    "Select",    "SumRows",     "SumColumns", "MatMul"};
static_assert(std::size(kLoopNames) == static_cast<size_t>(LoopOp::kMatMul) + 1, "a name for each");
constexpr int64_t kMostBuffers = 4096;

bool parse_op(const std::string& word, LoopOp* op) {
  for (size_t i = 0; i < std::size(kLoopNames); ++i) {
    if (word == kLoopNames[i]) {
      *op = static_cast<LoopOp>(i);
      return true;
    }
  }
  return false;
}

// Parses a number at `*at`, after the letter `before` (0: none), and moves `*at` behind it.
bool parse_number(const std::string& text, char before, size_t* at, int64_t* found) {
  if (*at >= text.size() || (before != 0 && text[*at] != before)) return false;
  if (before != 0) ++*at;
  char* end = nullptr;
  if (*at >= text.size() || text[*at] < '0' || text[*at] > '9') return false;
  *found = std::strtoll(text.c_str() + *at, &end, 10);
  *at = end - text.c_str();
  return true;
}

bool parse_view(const std::string& word, LoopView* view) {
  if (word.size() < 2) return false;
  char* end = nullptr;
  if (word[0] == '=') {
    view->number = std::strtod(word.c_str() + 1, &end);
    return *end == 0;
  }
  const char* letter = std::strchr(kLoopLetters, word[0]);
  if (letter == nullptr) return false;
  view->buffer = static_cast<LoopBuffer>(letter - kLoopLetters);
  size_t at = 1;
  int64_t index = 0;
  if (!parse_number(word, 0, &at, &index) || index >= kMostBuffers) return false;
  view->index = static_cast<int>(index);
  return parse_number(word, '+', &at, &view->first) && parse_number(word, ':', &at, &view->row) &&
         parse_number(word, ':', &at, &view->column) && at == word.size();
}

bool can_be_written(const LoopView& view) {
  return view.buffer >= LoopBuffer::kNext && view.buffer <= LoopBuffer::kTemporary;
}

bool parse_step(std::istringstream& words, LoopStep* step) {
  std::string to, from, more;
  words >> to;
  if (!parse_view(to, &step->to) || !can_be_written(step->to)) return false;
  for (int i = 0; i < operands_of(step->op); ++i) {
    words >> from;
    if (!parse_view(from, &step->from[i])) return false;
  }
  words >> step->rows >> step->columns;
  if (step->op == LoopOp::kMatMul) {
    words >> step->summed;
    for (const LoopView& one : {step->from[0], step->from[1]}) {
      if (one.buffer == LoopBuffer::kNumber) return false;
    }
  }
  const bool side_by_side = step->to.column == 1 || step->op == LoopOp::kSumColumns;
  return !words.fail() && !(words >> more) && step->rows > 0 && step->columns > 0 &&
         step->summed >= 0 && side_by_side;
}

void reach(LoopProgram* program, const LoopView& view, int64_t rows, int64_t columns) {
  if (view.buffer == LoopBuffer::kNumber || rows == 0 || columns == 0) return;
  std::vector<int64_t>& elements = program->elements[static_cast<int>(view.buffer)];
  if (elements.size() <= static_cast<size_t>(view.index)) elements.resize(view.index + 1);
  int64_t& most = elements[view.index];
  most = std::max(most, view.first + (rows - 1) * view.row + (columns - 1) * view.column + 1);
}

void reach(LoopProgram* program, const LoopStep& step) {
  const int64_t rows = step.rows, columns = step.columns;
  if (step.op == LoopOp::kMatMul) {
    reach(program, step.to, rows, columns);
    reach(program, step.from[0], rows, step.summed);
    reach(program, step.from[1], step.summed, columns);
    return;
  }
  for (int i = 0; i < operands_of(step.op); ++i) reach(program, step.from[i], rows, columns);
  reach(program, step.to, step.op == LoopOp::kSumRows ? 1 : rows,
        step.op == LoopOp::kSumColumns ? 1 : columns);
}

}  // namespace

Status parse_loop(const std::vector<std::string>& lines, LoopProgram* program) {
  *program = {};
  size_t left = 0;  // steps that the last block still needs
  for (const std::string& line : lines) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    LoopStep step;
    bool fits = true;
    if (word == "block" && left == 0) {
      words >> left;
      fits = !words.fail() && left > 0;
      program->blocks.push_back({program->steps.size(), program->steps.size() + left});
    } else {
      fits = parse_op(word, &step.op) && parse_step(words, &step);
      if (fits && left == 0)
        program->blocks.push_back({program->steps.size(), program->steps.size() + 1});
      if (fits && left > 0) {
        const size_t begin = program->blocks.back().begin;
        fits = is_elementwise(step.op) &&
               (begin == program->steps.size() || program->steps[begin].rows == step.rows);
        --left;
      }
      program->steps.push_back(step);
    }
    if (!fits) {
      return Status::Error(
          Code::kInvalidArgument,
          "'" + line +
              "' is no instruction of a loop's program; expected an operation, what is written, "
              "what is read, and sizes, as in 'Add t0+0:8:1 x0+0:8:1 =1 2 8'");
    }
    if (word != "block") reach(program, step);
  }
  if (left > 0)
    return Status::Error(
        Code::kInvalidArgument,
        "a loop's program ends before the last instruction that its last block announces");
  // The state before and after a turn has the same size.
  auto& before = program->elements[static_cast<int>(LoopBuffer::kState)];
  auto& after = program->elements[static_cast<int>(LoopBuffer::kNext)];
  before.resize(std::max(before.size(), after.size()));
  after.resize(before.size());
  for (size_t i = 0; i < before.size(); ++i) before[i] = after[i] = std::max(before[i], after[i]);
  return Status::Ok();
}

}  // namespace whale
