#include "whale_ops/core/compute/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "whale_ops/core/base/bits.h"
#include "whale_ops/core/compute/processor.h"

#define WHALE_INLINE __attribute__((always_inline)) inline

namespace whale {
namespace {

// Number of partial results that are kept side by side: four vectors of AVX2.
constexpr int kLanes = 32;

// exp(x) for x <= 0, within 2 units in the last place, without branches; 0 if the result is below
// the smallest normal number, NaN for NaN. x = n log(2) + r with |r| <= log(2) / 2, log(2) in two
// parts, and a polynomial of r (S. Moshier, Cephes, expf.c).
WHALE_INLINE float exponential(float x) {
  // 1.5 * 2^23: a sum with it has no bits for a fraction, and n in its last bits.
  constexpr float kRound = 12582912.0f;
  const float rounded = x * 1.44269504088896341f + kRound;
  const float n = rounded - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = p * (r * r) + r + 1.0f;
  const uint32_t scaled = bits_of(y) + (bits_of(rounded) << 23);  // times 2^n
  // Selects by masks, since the compiler turns choices into branches.
  const uint32_t normal = -static_cast<uint32_t>(x >= -87.3f),
                 none = -static_cast<uint32_t>(x != x);
  return float_of((scaled & normal) | (bits_of(x) & none));
}

WHALE_INLINE float of_row(const float* logits, int64_t classes, int64_t label, float* gradient) {
  const float own = logits[label];  // read before the gradient may overwrite the logits
  float lanes[kLanes];
  const int64_t whole = classes / kLanes * kLanes;
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] = logits[i + k] > lanes[k] ? logits[i + k] : lanes[k];
  }
  float most = *std::max_element(lanes, lanes + kLanes);
  for (int64_t i = whole; i < classes; ++i) most = std::max(most, logits[i]);

  std::fill_n(lanes, kLanes, 0.0f);
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const float share = exponential(logits[i + k] - most);
      gradient[i + k] = share;
      lanes[k] += share;
    }
  }
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  for (int64_t i = whole; i < classes; ++i) sum += gradient[i] = exponential(logits[i] - most);

  const float loss = std::log(sum) - (own - most);
  const float scale = 1.0f / sum;
#pragma GCC ivdep
  for (int64_t i = 0; i < classes; ++i) gradient[i] *= scale;
  gradient[label] -= 1.0f;
  return loss;
}

using OfRow = float (*)(const float*, int64_t, int64_t, float*);

float anywhere(const float* logits, int64_t classes, int64_t label, float* gradient) {
  return of_row(logits, classes, label, gradient);
}

#if defined(__x86_64__)
// Compiled for AVX2, and called only if the processor has it: the library itself runs anywhere.
__attribute__((target("avx2"))) float with_avx2(const float* logits, int64_t classes, int64_t label,
                                                float* gradient) {
  return of_row(logits, classes, label, gradient);
}

OfRow choose_code() { return has_avx2() ? with_avx2 : anywhere; }
#else
OfRow choose_code() { return anywhere; }
#endif

}  // namespace

float cross_entropy(const float* logits, int64_t classes, int64_t label, float* gradient) {
  static const OfRow best_of_row = choose_code();
  return best_of_row(logits, classes, label, gradient);
}

}  // namespace whale
