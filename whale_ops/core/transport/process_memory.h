// Memory that processes of one machine share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace whale {

constexpr size_t kPageBytes = 4 << 10;

// Equal on all processes under one kernel.
std::string machine_name();

// Under Yama's "restricted ptrace" a process has to agree to being read by others of its user.
void allow_reading();

// Copies out of another process's memory; 0 or errno.
int read_memory(int process, uint64_t address, void* dst, size_t bytes);

// New memory in a file that exists in memory only (memfd), all zeros, which other processes open by
// its descriptor; what nobody touches takes none. Null, -1 and errno if that cannot be had. `name`
// is seen in /proc.
void* map_new(const char* name, size_t bytes, int* descriptor);

// Memory of another process's descriptor; null and errno if that cannot be had.
void* map_of(int process, int descriptor, size_t bytes);

// Opens a pipe of another process, of which that holds this descriptor; -1 with errno where it may
// not. As this process could read it too, writing to it is no error when the other one has ended.
int open_pipe_of(int process, int descriptor);

}  // namespace whale
