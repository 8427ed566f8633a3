// The cross-entropy loss of logits against the number of the true class.
#pragma once

#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// For one row of logits: returns the loss log(sum(exp(logits))) - logits[label], and writes its
// gradient softmax(logits) - onehot(label). A logit of -inf contributes nothing and has gradient 0.
// `gradient` may be the same memory as the logits.
WHALE_EXPORT float cross_entropy(const float* logits, int64_t classes, int64_t label,
                                 float* gradient);

}  // namespace whale
