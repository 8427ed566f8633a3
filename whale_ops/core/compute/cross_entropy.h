// The loss of a softmax of logits against the number of a class.
#pragma once

#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// Of one row of logits: the loss log(sum(exp(logits))) - logits[label], and its gradient
// softmax(logits) - 1 at the label. A logit of -inf has no share, and no gradient. `gradient` may
// be where the logits are.
WHALE_EXPORT float cross_entropy(const float* logits, int64_t classes, int64_t label,
                                 float* gradient);

}  // namespace whale
