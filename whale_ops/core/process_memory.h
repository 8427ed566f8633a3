// Memory of other processes of this machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace whale {

// Equal on all processes under one kernel.
std::string machine_name();

// Under Yama's "restricted ptrace" a process has to agree to being read by others of its user.
void allow_reading();

// Copies out of another process's memory; 0 or errno.
int read_memory(int process, uint64_t address, void* dst, size_t bytes);

// Memory of another process's descriptor; null and errno if that cannot be had.
void* map_of(int process, int descriptor, size_t bytes);

}  // namespace whale
