// Counters and trace events per operation key.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "types.h"

namespace whale {

// One finished operation, times in nanoseconds of the monotonic clock.
struct Record {
  std::string key;
  OpKind kind = OpKind::kBarrier;
  const char* algorithm = "";
  int64_t logical_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t ready_ns = 0;  // submitted
  int64_t first_ns = 0;  // first message completed
  int64_t end_ns = 0;
};

// Thread-safe.
class Recorder {
 public:
  void add(const Record& record);
  void start_trace();
  // JSON arrays: [{"key":..., "kind":..., "calls":..., "logical_bytes":..., "wire_bytes":..., "seconds":...}, ...] in key order,
  // and Chrome trace events ("ph": "X", microseconds) of everything since start_trace().
  std::string counters_json() const;
  std::string trace_json(int rank) const;

 private:
  struct Counter {
    OpKind kind = OpKind::kBarrier;
    int64_t calls = 0;
    int64_t logical_bytes = 0;
    int64_t wire_bytes = 0;
    int64_t duration_ns = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, OpKind>, Counter> counters_;
  bool tracing_ = false;
  std::vector<Record> trace_;
};

}  // namespace whale
