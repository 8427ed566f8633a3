// Which instructions the core's kernels may use on the processor that is here: libraries are
// compiled for any.
//
// Decision: 0168.
#pragma once

#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

enum class ProcessorCode { kAnywhere, kAvx2, kAvx512 };

// Returns the code paths that this processor supports and ONEDNN_MAX_CPU_ISA allows, the fastest
// first. The variable limits oneDNN's kernels and these alike; its values are oneDNN's (SSE41, AVX,
// AVX2, AVX2_VNNI, AVX512_CORE, ..., DEFAULT).
WHALE_EXPORT std::vector<ProcessorCode> processor_codes();

inline bool has_avx2() { return processor_codes().front() != ProcessorCode::kAnywhere; }

}  // namespace whale
