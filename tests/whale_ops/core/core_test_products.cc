// Products of small matrices, by each code that this processor has.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/compute/small_products.h"

namespace {

using whale::ProductDim;
using whale::ProductSizes;

constexpr int64_t kOthers = 3;  // products of which this one's numbers are every third

// How a matrix of so many rows and columns lies: row by row, column by column, or with those of
// other products between.
enum class Lies { kByRows, kByColumns, kAmongOthers };

void steps(Lies lies, int64_t rows, int64_t columns, int64_t* down, int64_t* across) {
  *down = lies == Lies::kByColumns ? 1 : lies == Lies::kByRows ? columns + 2 : columns * kOthers;
  *across = lies == Lies::kByColumns ? rows + 1 : lies == Lies::kByRows ? 1 : kOthers;
}

template <typename T>
void one_product(whale::ProcessorCode code, int64_t rows, int64_t columns, int64_t summed,
                 Lies left_lies, Lies right_lies) {
  ProductSizes sizes{{rows, 0, 0, columns + 1}, {columns, 0, 0, 1}, {summed, 0, 0, 0}};
  steps(left_lies, rows, summed, &sizes.rows.left, &sizes.summed.left);
  steps(right_lies, summed, columns, &sizes.summed.right, &sizes.columns.right);
  const auto numbers = [](int64_t count, int start) {
    std::vector<T> found(count);
    for (int64_t i = 0; i < count; ++i) found[i] = static_cast<T>((start + 7 * i) % 11 - 5);
    return found;
  };
  const int64_t most = (rows + summed + columns + 3) * (rows + summed + columns + 3) * kOthers;
  const std::vector<T> left = numbers(most, 1), right = numbers(most, 2);
  std::vector<T> out(rows * (columns + 1), T(-99)), scratch(whale::scratch_elements<T>(sizes));
  whale::multiply_by<T>(code, sizes, left.data(), right.data(), out.data(), scratch.data());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      T sum = 0;  // of whole numbers, which are exact in any order
      for (int64_t k = 0; k < summed; ++k) {
        sum += left[i * sizes.rows.left + k * sizes.summed.left] *
               right[k * sizes.summed.right + j * sizes.columns.right];
      }
      if (out[i * (columns + 1) + j] != sum) {
        require(false, "code " + std::to_string(static_cast<int>(code)) + ": " +
                           std::to_string(rows) + " x " + std::to_string(summed) + " by " +
                           std::to_string(columns) + " at " + std::to_string(i) + ", " +
                           std::to_string(j));
      }
    }
    require(out[i * (columns + 1) + columns] == T(-99), "nothing is written beside a product");
  }
}

}  // namespace

void products() {
  require(!whale::processor_codes().empty(), "any processor has a code");
  for (const whale::ProcessorCode code : whale::processor_codes()) {
    for (const int64_t rows : {1, 2, 7, 8, 13}) {
      for (const int64_t columns : {1, 3, 8, 16, 17, 31, 33, 48, 70}) {
        for (const int64_t summed : {0, 1, 5, 32, 37}) {
          for (const Lies left : {Lies::kByRows, Lies::kByColumns, Lies::kAmongOthers}) {
            for (const Lies right : {Lies::kByRows, Lies::kByColumns, Lies::kAmongOthers}) {
              one_product<float>(code, rows, columns, summed, left, right);
              one_product<double>(code, rows, columns, summed, left, right);
            }
          }
        }
      }
    }
  }
}
