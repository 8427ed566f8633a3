// TensorFlow's kernels for processors in the place of those for GPUs.
#pragma once

#include <string>

namespace host_gpu {

// Registers a kernel for GPUs for each line of a file that dump_kernels.py writes: the op, then the
// types that its attributes may have and the arguments that lie in the host's memory. Returns what
// is wrong with the file; "" is nothing.
std::string register_late_kernels(const char* path);

}  // namespace host_gpu
