// Counters per operation key, and trace events of single operations.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// One finished operation, times in nanoseconds of the monotonic clock.
struct Record {
  std::string key;
  OpKind kind = OpKind::kBarrier;
  const char* algorithm = "";
  // How many operations this rank had started under the key before; equal on all ranks.
  uint64_t call = 0;
  int64_t logical_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t ready_ns = 0;  // submitted
  // The first message of another rank was there; of what only sends: the first was taken.
  int64_t first_ns = 0;
  int64_t end_ns = 0;
};

// Thread-safe.
class Recorder {
 public:
  // An operation has ended: counts it.
  void add(const Record& record);
  // An operation has failed: it is not counted, but traced.
  void add_failed(const Record& record, const std::string& error);
  // From now on every operation that ends is also written to the file descriptor, at once, so that
  // nothing is lost with this process: a line for each event, Chrome's trace format, followed by a
  // comma. `rank` is the events' process. Where the descriptor takes no more for the moment (a full
  // pipe), events are left out, and the next one says how many.
  void start_trace(int descriptor, int rank);
  // When this returns nothing is written any more.
  void stop_trace();
  // A JSON array: [{"key":..., "kind":..., "calls":..., "logical_bytes":..., "wire_bytes":...,
  // "seconds":..., "waiting_seconds":...}, ...] in key order.
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
  // Operations overlap, but events on one track must not: the first track on which nothing overlaps
  // this one.
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
