// Statistics of TensorFlow's host memory allocator, for Python through ctypes.

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"

extern "C" {

// values: bytes in use, their peak since the last reset, allocations since then, the largest of
// these. Returns 0 if the allocator keeps no statistics.
__attribute__((visibility("default"))) int whale_host_memory(int64_t* values) {
  const auto stats = tensorflow::cpu_allocator()->GetStats();
  if (!stats.has_value()) return 0;
  values[0] = stats->bytes_in_use;
  values[1] = stats->peak_bytes_in_use;
  values[2] = stats->num_allocs;
  values[3] = stats->largest_alloc_size;
  return 1;
}

__attribute__((visibility("default"))) void whale_host_memory_reset() {
  // Returns false if no statistics are kept, which whale_host_memory reports.
  [[maybe_unused]] const bool kept = tensorflow::cpu_allocator()->ClearStats();
}

}  // extern "C"
