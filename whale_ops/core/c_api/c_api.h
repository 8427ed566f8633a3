// The C ABI of the core. It is a header of the core so that a change of it changes the digest of
// the headers, which is compared when a library is loaded (whale_ops/_native.py).
#pragma once

#include <cstdint>

#include "whale_ops/core/base/types.h"

extern "C" {

// Has the same layout as the structure in whale_ops/_native.py.
struct WhaleOperation {
  int32_t kind;
  int32_t dtype;
  int32_t reduction;
  int32_t root;
  int64_t element_bytes;
  const char* key;
  const char* text;
  const void* input;
  void* output;
  const int64_t* counts;
  int64_t counts_size;
  const int64_t* recv_counts;
  int64_t recv_counts_size;
  const int32_t* group;
  int64_t group_size;
  int64_t even;
};

WHALE_EXPORT const char* whale_last_error();
WHALE_EXPORT int whale_in_process_create(const char* name, int size, const int32_t* hosts,
                                         void** handles);
WHALE_EXPORT int whale_mpi_create(const char* name, const char* plugin_path, int share_memory,
                                  const int32_t* hosts, int hosts_size, const int32_t* members,
                                  int members_size, int number, void** handle, void** notes);
WHALE_EXPORT void whale_release(void* handle);
WHALE_EXPORT int whale_rank(void* handle);
WHALE_EXPORT int whale_size(void* handle);
WHALE_EXPORT int whale_all_gather_bytes(void* handle, const char* key, const char* purpose,
                                        const void* data, int64_t size, double timeout_s,
                                        void** result);
WHALE_EXPORT int whale_broadcast_bytes(void* handle, const char* key, const char* purpose,
                                       const void* data, int64_t size, int root, double timeout_s,
                                       void** result);
WHALE_EXPORT int whale_submit(void* handle, const WhaleOperation* operation, void** pending_handle);
WHALE_EXPORT int whale_wait(void* pending_handle, double timeout_s);
WHALE_EXPORT int whale_abort(void* handle, const char* message);
WHALE_EXPORT int whale_leave(void* handle, double timeout_s, int* all_left);
WHALE_EXPORT int whale_device_count(const char* library, const char* core, int* devices);
WHALE_EXPORT int whale_device_open(void* handle, const char* library, const char* core,
                                   const char* transport, int ordinal, int64_t buffer_bytes);
WHALE_EXPORT void whale_device_close(void* handle);
WHALE_EXPORT void whale_set_link(void* handle, double latency_s, double bandwidth_bytes_per_s);
WHALE_EXPORT void whale_set_network(void* handle, double step_s, double bytes_per_s);
WHALE_EXPORT int whale_set_algorithm(void* handle, const char* name);
WHALE_EXPORT void* whale_waits(void* handle);
WHALE_EXPORT int whale_lose(void* handle, int peer, const char* what);
WHALE_EXPORT int whale_read_lent(void* handle, int peer, int64_t place, void* to, int64_t bytes);
WHALE_EXPORT void* whale_counters(void* handle);
WHALE_EXPORT void whale_trace_start(void* handle, int descriptor);
WHALE_EXPORT void whale_trace_stop(void* handle);
WHALE_EXPORT int64_t whale_bytes_count(void* result);
WHALE_EXPORT const char* whale_bytes_data(void* result, int64_t index, int64_t* size);
WHALE_EXPORT void whale_bytes_free(void* result);
WHALE_EXPORT void whale_play_pipeline(int64_t stages, int64_t chunks, int64_t micro_batches,
                                      const double* forward_s, const double* backward_s,
                                      double* ends_s);
WHALE_EXPORT void whale_stop();

}  // extern "C"
