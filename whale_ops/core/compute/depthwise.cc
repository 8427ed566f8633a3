#include "whale_ops/core/compute/depthwise.h"

#include <algorithm>
#include <vector>

#include "whale_ops/core/compute/processor.h"

#define WHALE_INLINE __attribute__((always_inline)) inline

namespace whale {
namespace {

constexpr int kMostTaps = 3;  // filter taps of a row that are handled together
// Vectors of channels that are handled together: their sums, and the operands, fit into sixteen
// registers.
constexpr int kMostVectors = 4;
// Pixels of a tile: what it reads of a few vectors of channels stays in the first-level cache while
// each row of the filter goes over it.
constexpr int64_t kTilePixels = 96;

constexpr int64_t kLineBytes = 64;  // size of a cache line

// The pixels that a few taps of one filter row are applied to, together with the incoming gradient
// of each. Strides are in elements.
template <typename T>
struct Walk {
  const T* input;  // the first tap's first input
  const T* out;
  int64_t images, rows, columns;
  int64_t input_image, input_row, input_column, input_tap;
  int64_t out_image, out_row, out_column;
  // What is prefetched at each pixel for later walks: the present walk has strides that the
  // processor's prefetcher does not recognise.
  const char* ahead;
  int64_t ahead_step;
};

// V: a vector, or one element. The sums of a walk are in registers, and are added to those of other
// walks at its end: short chains of additions lose less to rounding. Fused multiply-add would not
// be faster here, and would round otherwise than on processors without it.
template <typename T, typename V, int kTaps, int kVectors>
WHALE_INLINE void add_walk(const Walk<T>& walk, T* sums, int64_t sums_tap) {
  typedef V Loose __attribute__((aligned(alignof(T)), may_alias));
  constexpr int kWidth = sizeof(V) / sizeof(T);
  V found[kTaps][kVectors] = {};
  const char* ahead = walk.ahead;
  for (int64_t image = 0; image < walk.images; ++image) {
    for (int64_t row = 0; row < walk.rows; ++row) {
      const T* x = walk.input + image * walk.input_image + row * walk.input_row;
      const T* g = walk.out + image * walk.out_image + row * walk.out_row;
      for (int64_t column = 0; column < walk.columns; ++column) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + kLineBytes, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const V back = *reinterpret_cast<const Loose*>(g + i * kWidth);
#pragma GCC unroll 4
          for (int tap = 0; tap < kTaps; ++tap) {
            found[tap][i] +=
                *reinterpret_cast<const Loose*>(x + tap * walk.input_tap + i * kWidth) * back;
          }
        }
        x += walk.input_column;
        g += walk.out_column;
        ahead += walk.ahead_step;
      }
    }
  }
  for (int tap = 0; tap < kTaps; ++tap) {
    for (int i = 0; i < kVectors; ++i)
      *reinterpret_cast<Loose*>(sums + tap * sums_tap + i * kWidth) += found[tap][i];
  }
}

template <typename T, typename V, int kTaps>
WHALE_INLINE void add_taps(int vectors, const Walk<T>& walk, T* sums, int64_t sums_tap) {
  switch (vectors) {
    case 1: return add_walk<T, V, kTaps, 1>(walk, sums, sums_tap);
    case 2: return add_walk<T, V, kTaps, 2>(walk, sums, sums_tap);
    case 3: return add_walk<T, V, kTaps, 3>(walk, sums, sums_tap);
    default: return add_walk<T, V, kTaps, 4>(walk, sums, sums_tap);
  }
}

template <typename T, typename V>
WHALE_INLINE void add(int taps, int vectors, const Walk<T>& walk, T* sums, int64_t sums_tap) {
  switch (taps) {
    case 1: return add_taps<T, V, 1>(vectors, walk, sums, sums_tap);
    case 2: return add_taps<T, V, 2>(vectors, walk, sums, sums_tap);
    default: return add_taps<T, V, 3>(vectors, walk, sums, sums_tap);
  }
}

template <typename T>
using Add = void (*)(int taps, int vectors, const Walk<T>& walk, T* sums, int64_t sums_tap);

template <typename T>
struct Adder {
  Add<T> add;
  int64_t width;  // elements of a vector
};

template <typename T>
void add_elements(int taps, int vectors, const Walk<T>& walk, T* sums, int64_t sums_tap) {
  add<T, T>(taps, vectors, walk, sums, sums_tap);
}

template <typename T>
void add_anywhere(int taps, int vectors, const Walk<T>& walk, T* sums, int64_t sums_tap) {
  typedef T Vector __attribute__((vector_size(16)));
  add<T, Vector>(taps, vectors, walk, sums, sums_tap);
}

#if defined(__x86_64__)
// Compiled for AVX2, and called only if the processor has it: the library itself runs anywhere.
template <typename T>
__attribute__((target("avx2"))) void add_avx2(int taps, int vectors, const Walk<T>& walk, T* sums,
                                              int64_t sums_tap) {
  typedef T Vector __attribute__((vector_size(32)));
  add<T, Vector>(taps, vectors, walk, sums, sums_tap);
}

template <typename T>
Adder<T> choose_adder() {
  if (has_avx2()) return {add_avx2<T>, 32 / sizeof(T)};
  return {add_anywhere<T>, 16 / sizeof(T)};
}
#else
template <typename T>
Adder<T> choose_adder() {
  return {add_anywhere<T>, 16 / sizeof(T)};
}
#endif

// What the next tile reads, in the order of memory, to be prefetched.
class Ahead {
 public:
  template <typename T>
  void want(int stream, const T* begin, const T* end) {
    next_[stream] = reinterpret_cast<const char*>(begin);
    end_[stream] = reinterpret_cast<const char*>(end);
  }

  // A walk prefetches two lines at each pixel. If nothing is left to prefetch, it uses addresses
  // that it reads anyway, since prefetching an invalid address takes time.
  template <typename T>
  void give_to(Walk<T>* walk) {
    const int stream = end_[0] - next_[0] > end_[1] - next_[1] ? 0 : 1;
    const bool left = next_[stream] < end_[stream];
    walk->ahead = left ? next_[stream] : reinterpret_cast<const char*>(walk->out);
    walk->ahead_step = left ? 2 * kLineBytes : 0;
    next_[stream] += walk->images * walk->rows * walk->columns * walk->ahead_step;
  }

  void ask_for_the_rest() {
    for (int stream = 0; stream < 2; ++stream) {
      for (; next_[stream] < end_[stream]; next_[stream] += kLineBytes)
        __builtin_prefetch(next_[stream], 0, 2);
    }
  }

 private:
  const char* next_[2] = {};
  const char* end_[2] = {};
};

// Some output rows of one image, or all rows of several, with input and incoming gradient read by
// vectors: one input channel per output channel.
template <typename T>
struct Tile {
  const T* input;  // first image, row `first_row`, first column and channel
  const T* out;    // first image, first of `rows`, first channel
  int64_t images, first_row;
  Span rows;  // of each image
  int64_t input_image, input_row, input_column;
};

// The range of output positions, within `all`, for which a filter tap falls inside the image.
Span inside(Span all, int64_t tap, int64_t pad, int64_t stride, int64_t size) {
  const int64_t before = pad - tap, most = size + pad - tap;
  return {std::max(all.begin, before > 0 ? (before + stride - 1) / stride : 0),
          std::min(all.end, most > 0 ? (most + stride - 1) / stride : 0)};
}

template <typename T>
class Sums {
 public:
  Sums(const DepthwiseSizes& sizes, T* sums) : sizes_(sizes), sums_(sums) {}

  // For `vectors` vectors of channels, beginning with channel `channel` of the tile.
  void add(const Tile<T>& tile, Add<T> add, int vectors, int64_t channel, Ahead* ahead) const {
    const int64_t channels = sizes_.out_channels();
    Walk<T> walk;
    walk.images = tile.images;
    walk.input_image = tile.input_image;
    walk.input_row = sizes_.stride_height * tile.input_row;
    walk.input_column = sizes_.stride_width * tile.input_column;
    walk.input_tap = tile.input_column;
    walk.out_column = channels;
    walk.out_row = sizes_.out_width * channels;
    walk.out_image = sizes_.out_height * walk.out_row;
    for (int64_t row = 0; row < sizes_.filter_height; ++row) {
      const Span rows = inside(tile.rows, row, sizes_.pad_top, sizes_.stride_height, sizes_.height);
      if (rows.size() <= 0) continue;
      walk.rows = rows.size();
      const int64_t input_row = rows.begin * sizes_.stride_height + row - sizes_.pad_top;
      const T* input = tile.input + channel + (input_row - tile.first_row) * tile.input_row;
      const T* out = tile.out + channel + (rows.begin - tile.rows.begin) * walk.out_row;
      T* sums = sums_ + row * sizes_.filter_width * channels + channel;
      for (int64_t column = 0; column < sizes_.out_width; column += walk.columns) {
        // The input column under the first tap.
        const int64_t first = column * sizes_.stride_width - sizes_.pad_left;
        const Span taps{std::max<int64_t>(0, -first),
                        std::min(sizes_.filter_width, sizes_.width - first)};
        walk.columns = 1;
        // Consecutive columns for which all taps fall inside the image are one walk.
        if (taps.size() == sizes_.filter_width) {
          const int64_t fitting =
              (sizes_.width - sizes_.filter_width - first) / sizes_.stride_width + 1;
          walk.columns = std::min(fitting, sizes_.out_width - column);
        }
        walk.out = out + column * channels;
        for (int64_t tap = taps.begin; tap < taps.end; tap += kMostTaps) {
          ahead->give_to(&walk);
          walk.input = input + (first + tap) * tile.input_column;
          add(std::min<int64_t>(kMostTaps, taps.end - tap), vectors, walk, sums + tap * channels,
              channels);
        }
      }
    }
  }

 private:
  const DepthwiseSizes& sizes_;
  T* sums_;
};

// Copies the input channels of a tile, each one repeated `multiplier` times, so that input and
// output channels correspond.
template <typename T>
void repeat(const DepthwiseSizes& sizes, Span channels, Tile<T>* tile, std::vector<T>* memory) {
  const int64_t above = tile->rows.begin * sizes.stride_height - sizes.pad_top;
  const int64_t below =
      (tile->rows.end - 1) * sizes.stride_height - sizes.pad_top + sizes.filter_height;
  const Span rows{std::clamp<int64_t>(above, 0, sizes.height),
                  std::clamp<int64_t>(below, 0, sizes.height)};
  tile->first_row = rows.begin;
  tile->input_column = channels.size();
  tile->input_row = sizes.width * channels.size();
  tile->input_image = rows.size() * tile->input_row;
  memory->resize(tile->images * tile->input_image);
  T* to = memory->data();
  for (int64_t image = 0; image < tile->images; ++image) {
    const T* pixel =
        tile->input + (image * sizes.height + rows.begin) * sizes.width * sizes.channels;
    for (int64_t i = 0; i < rows.size() * sizes.width; ++i, pixel += sizes.channels) {
      for (int64_t channel = channels.begin; channel < channels.end; ++channel, ++to) {
        *to = pixel[channel / sizes.multiplier];
      }
    }
  }
  tile->input = memory->data();
}

// Returns how many input rows are read for the first `rows` output rows.
int64_t input_rows(const DepthwiseSizes& sizes, int64_t rows) {
  if (rows == 0) return 0;
  const int64_t image = (rows - 1) / sizes.out_height, row = (rows - 1) % sizes.out_height;
  const int64_t seen = row * sizes.stride_height - sizes.pad_top + sizes.filter_height;
  return image * sizes.height + std::clamp<int64_t>(seen, 0, sizes.height);
}

// Returns the tile that begins at row `at`: whole images, or some rows of one.
template <typename T>
Tile<T> tile_at(const DepthwiseSizes& sizes, const T* input, const T* out, int64_t at,
                int64_t end) {
  const int64_t image = at / sizes.out_height, row = at % sizes.out_height;
  const int64_t most_rows = std::min(end - at, std::max<int64_t>(1, kTilePixels / sizes.out_width));
  const int64_t images = row > 0 ? 0 : most_rows / sizes.out_height;
  Tile<T> tile;
  tile.input_column = sizes.channels;
  tile.input_row = sizes.width * tile.input_column;
  tile.input_image = sizes.height * tile.input_row;
  tile.input = input + image * tile.input_image;
  tile.out = out + at * sizes.out_width * sizes.out_channels();
  tile.images = std::max<int64_t>(1, images);
  tile.first_row = 0;
  tile.rows = {row, std::min(row + most_rows, sizes.out_height)};
  return tile;
}

}  // namespace

template <typename T>
void add_filter_gradient(const DepthwiseSizes& sizes, const T* input, const T* out, Span rows,
                         Span channels, T* sums) {
  static const Adder<T> best_adder = choose_adder<T>();
  const Sums<T> found(sizes, sums + channels.begin);
  const int64_t vectors = channels.size() / best_adder.width;
  // Divides the vectors into blocks of nearly equal size.
  const int64_t blocks = (vectors + kMostVectors - 1) / kMostVectors;
  const int64_t input_row = sizes.width * sizes.channels,
                out_row = sizes.out_width * sizes.out_channels();
  // Prefetching pays only if all channels are read, in another order than that of memory.
  const bool look_ahead = sizes.multiplier == 1 && channels.size() == sizes.channels;
  std::vector<T> repeated;
  Ahead ahead;
  for (int64_t at = rows.begin; at < rows.end;) {
    Tile<T> tile = tile_at(sizes, input, out, at, rows.end);
    const int64_t next = at + tile.images * tile.rows.size(),
                  after = std::min(rows.end, next + (next - at));
    if (look_ahead) {
      ahead.want(0, input + input_rows(sizes, next) * input_row,
                 input + input_rows(sizes, after) * input_row);
      ahead.want(1, out + next * out_row, out + after * out_row);
    }
    if (sizes.multiplier > 1) {
      repeat(sizes, channels, &tile, &repeated);
    } else {
      tile.input += channels.begin;
    }
    tile.out += channels.begin;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = vectors * block / blocks, last = vectors * (block + 1) / blocks;
      found.add(tile, best_adder.add, last - first, first * best_adder.width, &ahead);
    }
    for (int64_t channel = vectors * best_adder.width; channel < channels.size();
         channel += kMostVectors) {
      const int64_t elements = std::min<int64_t>(kMostVectors, channels.size() - channel);
      found.add(tile, add_elements<T>, elements, channel, &ahead);
    }
    ahead.ask_for_the_rest();
    at = next;
  }
}

template WHALE_EXPORT void add_filter_gradient<float>(const DepthwiseSizes&, const float*,
                                                      const float*, Span, Span, float*);
template WHALE_EXPORT void add_filter_gradient<double>(const DepthwiseSizes&, const double*,
                                                       const double*, Span, Span, double*);

}  // namespace whale
