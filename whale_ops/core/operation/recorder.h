// Counters per operation key, and trace events of single operations.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// One finished operation. Times are nanoseconds of the monotonic clock.
struct Record {
  std::string key;
  OpKind kind = OpKind::kBarrier;
  const char* algorithm = "";
  // Number of operations that this rank had started under the key before; equal on all ranks.
  uint64_t call = 0;
  int64_t logical_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t ready_ns = 0;  // when it was submitted
  // When the first message of another rank had come; for an operation that only sends: when its
  // first message was taken.
  int64_t first_ns = 0;
  int64_t end_ns = 0;
};

// Thread-safe.
class Recorder {
 public:
  // Counts an operation that has ended.
  void add(const Record& record);
  // Traces an operation that has failed; it is not counted.
  void add_failed(const Record& record, const std::string& error);
  // From now on, writes every operation that ends to the file descriptor immediately, so that
  // nothing is lost if the process dies: one line per event in Chrome's trace format, followed by a
  // comma. `rank` is the process of the events. While the descriptor accepts no more (a full pipe),
  // events are dropped, and the next event says how many.
  void start_trace(int descriptor, int rank);
  // Ends the trace; when this returns, the descriptor is no longer used.
  void stop_trace();
  // Returns the counters as a JSON array, in the order of keys: [{"key":..., "kind":...,
  // "calls":..., "logical_bytes":..., "wire_bytes":..., "seconds":..., "waiting_seconds":...}, ...]
  std::string counters_json() const;

 private:
  struct Counter {
    OpKind kind = OpKind::kBarrier;
    int64_t calls = 0;
    int64_t logical_bytes = 0;
    int64_t wire_bytes = 0;
    int64_t duration_ns = 0;
    int64_t waiting_ns = 0;
  };
  // Returns the first track on which no event overlaps this one: operations overlap, but events on
  // one track must not.
  size_t lane_of(const Record& record, std::string* lines);
  void trace(const Record& record, const std::string& error);

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, OpKind>, Counter> counters_;
  int descriptor_ = -1;
  int rank_ = 0;
  std::vector<int64_t> lane_ends_ns_;
  int64_t lost_ = 0;
};

}  // namespace whale
