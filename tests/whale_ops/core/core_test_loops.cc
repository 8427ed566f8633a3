// Turns of a loop, by each code that this processor has.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/compute/run_loop.h"

namespace {

using whale::LoopBuffers;
using whale::LoopProgram;
using whale::ProcessorCode;

void in_two(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& work) {
  work(0, count / 2);
  work(count / 2, count);
}

LoopProgram parsed(const std::vector<std::string>& lines) {
  LoopProgram program;
  const whale::Status status = whale::parse_loop(lines, &program);
  require(status.ok(), status.message);
  return program;
}

struct Function {
  const char* name;
  std::function<double(double, double, double)> value;
};

// Of 2 turns: an operation on the elements of slices, one of which is a column.
template <typename T>
void one_function(ProcessorCode code, const Function& f, int64_t rows, int64_t columns) {
  const std::string r = std::to_string(rows), c = std::to_string(columns);
  const std::string whole = "+0:" + c + ":1 ";
  std::string line = std::string(f.name) + " y0" + whole + "x0" + whole;
  LoopProgram program;
  for (const char* more : {"x1+0:1:0 =0.75 ", "x1+0:1:0 ", ""}) {
    if (whale::parse_loop({line + more + r + " " + c}, &program).ok()) break;
  }
  require(program.steps.size() == 1, std::string(f.name) + " has no form");
  const int64_t n = rows * columns;
  std::vector<T> x(2 * n), column(2 * rows), y(2 * n, T(-99));
  for (int64_t i = 0; i < 2 * n; ++i) x[i] = T((i % 37 - 18) * 0.31 + 0.01);
  for (int64_t i = 0; i < 2 * rows; ++i) column[i] = T((i % 5 - 2) * 0.5 + 0.25);
  LoopBuffers<T> buffers;
  // The first turn reads the last rows.
  buffers.slices = {{x.data(), n, -n}, {column.data(), rows, -rows}};
  buffers.stacked = {{y.data(), n}};
  whale::run_loop_by<T>(code, program, buffers, 2, in_two);
  const double limit = sizeof(T) == 4 ? 8e-6 : 4e-14;
  for (int64_t i = 0; i < 2 * n; ++i) {
    const int64_t from = (i + n) % (2 * n);
    const double a = x[from], b = column[from / columns];
    const double expected = f.value(a, b, 0.75);
    const bool alike = std::isnan(expected) ? std::isnan(y[i])
                                            : std::abs(y[i] - expected) <=
                                                  limit * std::max(1e-3, std::abs(expected)) *
                                                      (sizeof(T) == 4 ? 4 : 4);
    if (!alike) {
      require(false, std::string(f.name) + " of " + std::to_string(a) + ", " + std::to_string(b) +
                         ": " + std::to_string(y[i]) + "; expected " + std::to_string(expected) +
                         ", code " + std::to_string(static_cast<int>(code)));
    }
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<Function> functions() {
  return {
      {"Copy", [](double a, double, double) { return a; }},
      {"Neg", [](double a, double, double) { return -a; }},
      {"Abs", [](double a, double, double) { return std::abs(a); }},
      {"Square", [](double a, double, double) { return a * a; }},
      {"Sqrt", [](double a, double, double) { return std::sqrt(a); }},
      {"Reciprocal", [](double a, double, double) { return 1 / a; }},
      {"Exp", [](double a, double, double) { return std::exp(a); }},
      {"Log", [](double a, double, double) { return std::log(a); }},
      {"Tanh", [](double a, double, double) { return std::tanh(a); }},
      {"Sigmoid", [](double a, double, double) { return sigmoid(a); }},
      {"Relu6", [](double a, double, double) { return std::min(std::max(a, 0.0), 6.0); }},
      {"Elu", [](double a, double, double) { return a > 0 ? a : std::expm1(a); }},
      {"Softplus", [](double a, double, double) { return std::log1p(std::exp(a)); }},
      {"Sub", [](double a, double b, double) { return a - b; }},
      {"Div", [](double a, double b, double) { return a / b; }},
      {"Max", [](double a, double b, double) { return std::max(a, b); }},
      {"TanhGrad", [](double a, double b, double) { return b * (1 - a * a); }},
      {"SigmoidGrad", [](double a, double b, double) { return b * a * (1 - a); }},
      {"ReluGrad", [](double a, double b, double) { return b > 0 ? a : 0; }},
      {"SoftplusGrad", [](double a, double b, double) { return a * sigmoid(b); }},
      {"LessEqual", [](double a, double b, double) { return a <= b ? 1 : 0; }},
      {"Select", [](double a, double b, double c) { return a != 0 ? b : c; }},
  };
}

// State h: h' = (h w + x) / 2, in a part of a wider temporary; y: h' summed over rows, and columns.
template <typename T>
void products_and_sums(ProcessorCode code, int64_t rows) {
  constexpr int64_t kWidth = 37, kTurns = 3;
  const std::string r = std::to_string(rows);
  const LoopProgram program = parsed({
      "MatMul t0+3:50:1 s0+0:37:1 w0+0:1:37 " + r + " 37 37",
      "block 2",
      "Add t0+3:50:1 t0+3:50:1 x0+0:37:1 " + r + " 37",
      "Mul n0+0:37:1 t0+3:50:1 =0.5 " + r + " 37",
      "SumRows y0+0:37:1 n0+0:37:1 " + r + " 37",
      "SumColumns y1+0:1:1 n0+0:37:1 " + r + " 37",
  });
  const int64_t n = rows * kWidth;
  std::vector<T> x(n * kTurns), w(kWidth * kWidth), h(n), last(n), by_rows(kWidth * kTurns),
      by_columns(rows * kTurns);
  for (size_t i = 0; i < x.size(); ++i) x[i] = T(static_cast<int>(i * 7 % 11) - 5);
  for (size_t i = 0; i < w.size(); ++i) w[i] = T(static_cast<int>(i * 5 % 9) - 4) / 16;
  for (size_t i = 0; i < h.size(); ++i) h[i] = T(static_cast<int>(i * 3 % 7) - 3);
  LoopBuffers<T> buffers;
  buffers.slices = {{x.data(), 0, n}};
  buffers.same = {w.data()};
  buffers.states = {{h.data(), last.data(), n}};
  buffers.stacked = {{by_rows.data(), kWidth}, {by_columns.data(), rows}};
  whale::run_loop_by<T>(code, program, buffers, kTurns, in_two);
  std::vector<double> state(h.begin(), h.end()), next(n);
  const auto check = [](double found, double expected, const char* what) {
    if (std::abs(found - expected) > (sizeof(T) == 4 ? 1e-4 : 1e-12) * (1 + std::abs(expected)))
      require(false, what);
  };
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < kWidth; ++j) {
        double sum = x[turn * n + i * kWidth + j];
        for (int64_t k = 0; k < kWidth; ++k) sum += state[i * kWidth + k] * w[j * kWidth + k];
        next[i * kWidth + j] = sum / 2;
      }
    }
    state = next;
    for (int64_t j = 0; j < kWidth; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < rows; ++i) sum += state[i * kWidth + j];
      check(by_rows[turn * kWidth + j], sum, "the sum over rows of a loop's state");
    }
    for (int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < kWidth; ++j) sum += state[i * kWidth + j];
      check(by_columns[turn * rows + i], sum, "the sum over columns of a loop's state");
    }
  }
  for (int64_t i = 0; i < n; ++i) check(last[i], state[i], "the last state of a loop");
}

}  // namespace

void loops() {
  for (const ProcessorCode code : whale::processor_codes()) {
    for (const Function& f : functions()) {
      for (const int64_t columns : {1, 3, 16, 67}) {
        one_function<float>(code, f, 5, columns);
        one_function<double>(code, f, 5, columns);
      }
    }
    for (const int64_t rows : {1, 2, 5, 7, 8, 9, 11, 16, 23}) {
      products_and_sums<float>(code, rows);
      products_and_sums<double>(code, rows);
    }
  }
  LoopProgram program;
  for (const char* line :
       {"Tanh t0+0:8:1 x0+0:8:1 2", "Tanh x0+0:8:1 t0+0:8:1 2 8", "Sine t0+0:8:1 x0+0:8:1 2 8",
        "Add t0+0:8:1 x0+0:8:1 2 8", "Tanh t0+0:8:2 x0+0:8:1 2 8", "Tanh t0 x0 2 8",
        "MatMul t0+0:8:1 =1 w0+0:8:1 2 8 8", "block 2", "Tanh t0+-1:8:1 x0+0:8:1 2 8"}) {
    require(!whale::parse_loop({line}, &program).ok(), line);
  }
}
