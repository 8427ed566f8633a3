// Memory that processes of one machine share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace whale {

constexpr size_t kPageBytes = 4 << 10;

// Returns a name that is equal for all processes under one kernel.
std::string machine_name();

// Lets other processes of this user read this one's memory, which Yama's "restricted ptrace"
// forbids by default.
void allow_reading();

// Copies from another process's memory; returns 0 or errno.
int read_memory(int process, uint64_t address, void* dst, size_t bytes);

// Creates memory as a file in memory (memfd), all zeros, which other processes open by its
// descriptor; untouched pages take no memory. On failure: null, descriptor -1, and errno. `name` is
// visible in /proc.
void* map_new(const char* name, size_t bytes, int* descriptor);

// Maps the memory behind another process's descriptor; null and errno on failure.
void* map_of(int process, int descriptor, size_t bytes);

// Opens a pipe of another process, by that process's descriptor; -1 and errno if that is not
// allowed. It is opened for reading as well, so that writing is no error when the other process has
// ended.
int open_pipe_of(int process, int descriptor);

}  // namespace whale
