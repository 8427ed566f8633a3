// Computes when the stages of a pipeline end a step.
// Decision: 0223 (docs/decisions).
#pragma once

#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// Writes the seconds at which each stage's last pass ends under 1F1B, interleaved if stages have
// several chunks (Narayanan et al., "Efficient large-scale language model training", SC 2021).
// `forward_s` and `backward_s` [stages][chunks] are the seconds of one micro-batch, sends that the
// stage waits for included; no communication overlaps.
//
// Micro-batches go in groups of as many as there are stages. Once all passes of a group come by the
// same amount later than those of the group before, so do those of further groups, which are not
// played: steps of a million micro-batches take no longer than of some hundreds.
WHALE_EXPORT void play_pipeline(int64_t stages, int64_t chunks, int64_t micro_batches,
                                const double* forward_s, const double* backward_s, double* ends_s);

}  // namespace whale
