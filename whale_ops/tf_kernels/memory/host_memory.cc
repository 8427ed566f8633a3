// What TensorFlow's allocator of host memory has given out, for Python through ctypes.

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"

extern "C" {

// values: bytes in use, largest number of them since the last reset, allocations since then,
// largest of these. 0 where the allocator keeps no statistics.
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
  // False where no statistics are kept: whale_host_memory says so.
  [[maybe_unused]] const bool kept = tensorflow::cpu_allocator()->ClearStats();
}

}  // extern "C"
