#include "whale_ops/core/compute/small_products.h"

#include <algorithm>

// Allows fused multiply-add where the processor has it, which doubles the throughput.
#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#define WHALE_INLINE __attribute__((always_inline)) inline

namespace whale {
namespace {

// Bytes of a panel's columns for one k: at most two vectors of AVX-512.
constexpr int64_t kPanelBytes = 128;

// Blocks of 4 x 4 floats, or 2 x 2 doubles, that are transposed.
typedef float FourFloats __attribute__((vector_size(16)));
typedef double TwoDoubles __attribute__((vector_size(16)));

#if defined(__clang__)
#define WHALE_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define WHALE_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif
typedef int32_t FourNumbers __attribute__((vector_size(16)));
typedef int64_t TwoNumbers __attribute__((vector_size(16)));

WHALE_INLINE void transpose(FourFloats (&v)[4]) {
  const FourFloats a = WHALE_SHUFFLE(FourNumbers, v[0], v[1], 0, 4, 1, 5);
  const FourFloats b = WHALE_SHUFFLE(FourNumbers, v[0], v[1], 2, 6, 3, 7);
  const FourFloats c = WHALE_SHUFFLE(FourNumbers, v[2], v[3], 0, 4, 1, 5);
  const FourFloats d = WHALE_SHUFFLE(FourNumbers, v[2], v[3], 2, 6, 3, 7);
  v[0] = WHALE_SHUFFLE(FourNumbers, a, c, 0, 1, 4, 5);
  v[1] = WHALE_SHUFFLE(FourNumbers, a, c, 2, 3, 6, 7);
  v[2] = WHALE_SHUFFLE(FourNumbers, b, d, 0, 1, 4, 5);
  v[3] = WHALE_SHUFFLE(FourNumbers, b, d, 2, 3, 6, 7);
}

WHALE_INLINE void transpose(TwoDoubles (&v)[2]) {
  const TwoDoubles a = v[0];
  v[0] = WHALE_SHUFFLE(TwoNumbers, a, v[1], 0, 2);
  v[1] = WHALE_SHUFFLE(TwoNumbers, a, v[1], 1, 3);
}

// Packs columns that are stored with consecutive k: from[j * across + k] goes to panel[k * width +
// j].
template <typename T>
WHALE_INLINE void pack_turned(const T* from, int64_t across, int64_t columns, int64_t count,
                              int width, T* panel) {
  typedef T Block __attribute__((vector_size(16)));
  typedef Block Loose __attribute__((aligned(alignof(T)), may_alias));
  constexpr int64_t kBlock = 16 / sizeof(T);
  const int64_t whole_columns = columns / kBlock * kBlock, whole = count / kBlock * kBlock;
  for (int64_t j = 0; j < whole_columns; j += kBlock) {
    for (int64_t k = 0; k < whole; k += kBlock) {
      Block block[kBlock];
      for (int64_t i = 0; i < kBlock; ++i)
        block[i] = *reinterpret_cast<const Loose*>(from + (j + i) * across + k);
      transpose(block);
      for (int64_t i = 0; i < kBlock; ++i)
        *reinterpret_cast<Loose*>(panel + (k + i) * width + j) = block[i];
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t j = k < whole ? whole_columns : 0; j < columns; ++j)
      panel[k * width + j] = from[j * across + k];
  }
}

// Packs columns of `right` from `first` on, as [summed, width]; columns beyond the end are zeros.
template <typename T>
WHALE_INLINE void pack(const ProductSizes& sizes, const T* right, int64_t first, int width,
                       T* panel) {
  const int64_t columns = std::min<int64_t>(width, sizes.columns.size - first),
                count = sizes.summed.size;
  const int64_t down = sizes.summed.right, across = sizes.columns.right;
  const T* from = right + first * across;
  if (down == 1) {
    pack_turned(from, across, columns, count, width, panel);
  } else if (across == 1) {
    for (int64_t k = 0; k < count; ++k) std::copy_n(from + k * down, columns, panel + k * width);
  } else {
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t j = 0; j < columns; ++j) panel[k * width + j] = from[k * down + j * across];
    }
  }
  for (int64_t k = 0; columns < width && k < count; ++k)
    std::fill(panel + k * width + columns, panel + (k + 1) * width, T(0));
}

// Multiplies kRows rows by one panel of kVectors vectors, with the sums in registers.
template <typename T, typename V, int kRows, int kVectors>
WHALE_INLINE void tile(const ProductSizes& sizes, const T* left, const T* panel, int64_t columns,
                       T* out) {
  typedef V Loose __attribute__((aligned(alignof(T)), may_alias));
  constexpr int kWidth = sizeof(V) / sizeof(T);
  V sums[kRows][kVectors] = {};
  const int64_t row = sizes.rows.left, step = sizes.summed.left;
  for (int64_t k = 0; k < sizes.summed.size; ++k, left += step, panel += kVectors * kWidth) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v)
      right[v] = *reinterpret_cast<const Loose*>(panel + v * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) sums[i][v] += left[i * row] * right[v];
    }
  }
  for (int i = 0; i < kRows; ++i, out += sizes.rows.out) {
    if (columns == kVectors * kWidth) {
      for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Loose*>(out + v * kWidth) = sums[i][v];
    } else {
      std::copy_n(reinterpret_cast<const T*>(sums[i]), columns, out);
    }
  }
}

// Multiplies all rows by a packed panel: the columns from `first` on.
template <typename T, typename V, int kRows, int kVectors>
WHALE_INLINE void rows_by(const ProductSizes& sizes, const T* left, const T* panel, int64_t first,
                          T* out) {
  constexpr int kWidth = kVectors * sizeof(V) / sizeof(T);
  const int64_t rows = sizes.rows.size,
                columns = std::min<int64_t>(kWidth, sizes.columns.size - first);
  const auto from = [&](int64_t row) { return left + row * sizes.rows.left; };
  const auto to = [&](int64_t row) { return out + row * sizes.rows.out + first; };
  int64_t row = 0;
  // Tiles of few rows are slow, since each addition waits for the one before: eight rows are taken
  // as four and four rather than six and two.
  const auto is_whole = [&](int64_t left_over) {
    return left_over >= 2 * kRows || left_over == kRows || left_over - kRows >= 3;
  };
  for (; row + kRows <= rows && is_whole(rows - row); row += kRows)
    tile<T, V, kRows, kVectors>(sizes, from(row), panel, columns, to(row));
  if constexpr (kRows > 4) {
    for (; row + 4 <= rows; row += 4)
      tile<T, V, 4, kVectors>(sizes, from(row), panel, columns, to(row));
  }
  for (; row + 3 <= rows; row += 3)
    tile<T, V, 3, kVectors>(sizes, from(row), panel, columns, to(row));
  for (; row + 2 <= rows; row += 2)
    tile<T, V, 2, kVectors>(sizes, from(row), panel, columns, to(row));
  for (; row < rows; ++row) tile<T, V, 1, kVectors>(sizes, from(row), panel, columns, to(row));
}

// Multiplies all rows by the columns from `first` on, after packing these.
template <typename T, typename V, int kRows, int kVectors>
WHALE_INLINE void columns_of(const ProductSizes& sizes, const T* left, const T* right,
                             int64_t first, T* out, T* panel) {
  pack(sizes, right, first, kVectors * sizeof(V) / sizeof(T), panel);
  rows_by<T, V, kRows, kVectors>(sizes, left, panel, first, out);
}

template <typename T, typename V, int kRows>
WHALE_INLINE void product(const ProductSizes& sizes, const T* left, const T* right, T* out,
                          T* panel) {
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  int64_t first = 0;
  for (; first + kWidth < sizes.columns.size; first += 2 * kWidth) {
    columns_of<T, V, kRows, 2>(sizes, left, right, first, out, panel);
  }
  if (first < sizes.columns.size) columns_of<T, V, kRows, 1>(sizes, left, right, first, out, panel);
}

// A panel has two vectors, or one at the end of the columns.
template <typename T, typename V, int kRows>
WHALE_INLINE void one_panel(const ProductSizes& sizes, const T* left, const T* packed,
                            int64_t panel, T* out) {
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  const int64_t first = 2 * kWidth * panel;
  if (first + kWidth < sizes.columns.size) {
    rows_by<T, V, kRows, 2>(sizes, left, packed, first, out);
  } else {
    rows_by<T, V, kRows, 1>(sizes, left, packed, first, out);
  }
}

template <typename T>
using Multiply = void (*)(const ProductSizes&, const T*, const T*, T*, T*);
template <typename T>
using MultiplyPanel = void (*)(const ProductSizes&, const T*, const T*, int64_t, T*);

template <typename T>
void anywhere(const ProductSizes& sizes, const T* left, const T* right, T* out, T* panel) {
  typedef T Vector __attribute__((vector_size(16)));
  product<T, Vector, 4>(sizes, left, right, out, panel);
}
template <typename T>
void panel_anywhere(const ProductSizes& sizes, const T* left, const T* packed, int64_t panel,
                    T* out) {
  typedef T Vector __attribute__((vector_size(16)));
  one_panel<T, Vector, 4>(sizes, left, packed, panel, out);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma"))) void with_avx2(const ProductSizes& sizes, const T* left,
                                                   const T* right, T* out, T* panel) {
  typedef T Vector __attribute__((vector_size(32)));
  product<T, Vector, 6>(sizes, left, right, out, panel);
}
template <typename T>
__attribute__((target("avx2,fma"))) void panel_with_avx2(const ProductSizes& sizes, const T* left,
                                                         const T* packed, int64_t panel, T* out) {
  typedef T Vector __attribute__((vector_size(32)));
  one_panel<T, Vector, 6>(sizes, left, packed, panel, out);
}

template <typename T>
__attribute__((target("avx512f"))) void with_avx512(const ProductSizes& sizes, const T* left,
                                                    const T* right, T* out, T* panel) {
  typedef T Vector __attribute__((vector_size(64)));
  product<T, Vector, 8>(sizes, left, right, out, panel);
}
template <typename T>
__attribute__((target("avx512f"))) void panel_with_avx512(const ProductSizes& sizes, const T* left,
                                                          const T* packed, int64_t panel, T* out) {
  typedef T Vector __attribute__((vector_size(64)));
  one_panel<T, Vector, 8>(sizes, left, packed, panel, out);
}

template <typename T>
Multiply<T> code_of(ProcessorCode code) {
  switch (code) {
    case ProcessorCode::kAvx512: return with_avx512<T>;
    case ProcessorCode::kAvx2: return with_avx2<T>;
    default: return anywhere<T>;
  }
}
template <typename T>
MultiplyPanel<T> panel_code_of(ProcessorCode code) {
  switch (code) {
    case ProcessorCode::kAvx512: return panel_with_avx512<T>;
    case ProcessorCode::kAvx2: return panel_with_avx2<T>;
    default: return panel_anywhere<T>;
  }
}
#else
template <typename T>
MultiplyPanel<T> panel_code_of(ProcessorCode) {
  return panel_anywhere<T>;
}
template <typename T>
Multiply<T> code_of(ProcessorCode) {
  return anywhere<T>;
}
#endif

}  // namespace

template <typename T>
int64_t scratch_elements(const ProductSizes& sizes) {
  return sizes.summed.size * (kPanelBytes / sizeof(T));
}

template <typename T>
void multiply(const ProductSizes& sizes, const T* left, const T* right, T* out, T* scratch) {
  static const Multiply<T> best = code_of<T>(processor_codes().front());
  best(sizes, left, right, out, scratch);
}

template <typename T>
void multiply_by(ProcessorCode code, const ProductSizes& sizes, const T* left, const T* right,
                 T* out, T* scratch) {
  code_of<T>(code)(sizes, left, right, out, scratch);
}

template <typename T>
int64_t panel_columns(ProcessorCode code) {
  const int64_t bytes = code == ProcessorCode::kAvx512 ? 64
                        : code == ProcessorCode::kAvx2 ? 32
                                                       : 16;
  return 2 * bytes / static_cast<int64_t>(sizeof(T));
}

template <typename T>
void pack_panel(ProcessorCode code, const ProductSizes& sizes, const T* right, int64_t panel,
                T* packed) {
  const int64_t columns = panel_columns<T>(code), first = panel * columns;
  const bool both = first + columns / 2 < sizes.columns.size;
  pack(sizes, right, first, static_cast<int>(both ? columns : columns / 2), packed);
}

template <typename T>
void multiply_panel(ProcessorCode code, const ProductSizes& sizes, const T* left, const T* packed,
                    int64_t panel, T* out) {
  panel_code_of<T>(code)(sizes, left, packed, panel, out);
}

template int64_t panel_columns<float>(ProcessorCode);
template int64_t panel_columns<double>(ProcessorCode);
template void pack_panel<float>(ProcessorCode, const ProductSizes&, const float*, int64_t, float*);
template void pack_panel<double>(ProcessorCode, const ProductSizes&, const double*, int64_t,
                                 double*);
template void multiply_panel<float>(ProcessorCode, const ProductSizes&, const float*, const float*,
                                    int64_t, float*);
template void multiply_panel<double>(ProcessorCode, const ProductSizes&, const double*,
                                     const double*, int64_t, double*);
template int64_t scratch_elements<float>(const ProductSizes&);
template int64_t scratch_elements<double>(const ProductSizes&);
template void multiply<float>(const ProductSizes&, const float*, const float*, float*, float*);
template void multiply<double>(const ProductSizes&, const double*, const double*, double*, double*);
template void multiply_by<float>(ProcessorCode, const ProductSizes&, const float*, const float*,
                                 float*, float*);
template void multiply_by<double>(ProcessorCode, const ProductSizes&, const double*, const double*,
                                  double*, double*);

}  // namespace whale
