#include "whale_ops/core/operation/recorder.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace whale {
namespace {

// Limit of names and errors in a trace, so that a line, together with the one that is written with
// it, fits into one atomic write to a pipe.
constexpr size_t kMaxTextBytes = 256;
constexpr int kFirstLane = 100;  // tracks below are those of the script

void append_string(const std::string& text, std::string* out) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      *out += escaped;
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

std::string shortened(std::string text) {
  if (text.size() <= kMaxTextBytes) return text;
  size_t end = kMaxTextBytes;
  // Does not cut within a UTF-8 character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

std::string microseconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", static_cast<double>(ns) * 1e-3);
  return text;
}

}  // namespace

void Recorder::add(const Record& record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Counter& counter = counters_[{record.key, record.kind}];
  counter.kind = record.kind;
  counter.calls += 1;
  counter.logical_bytes += record.logical_bytes;
  counter.wire_bytes += record.wire_bytes;
  counter.duration_ns += record.end_ns - record.ready_ns;
  counter.waiting_ns += record.first_ns - record.ready_ns;
  if (descriptor_ >= 0) trace(record, "");
}

void Recorder::add_failed(const Record& record, const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (descriptor_ >= 0) trace(record, error);
}

void Recorder::start_trace(int descriptor, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  descriptor_ = descriptor;
  rank_ = rank;
  lane_ends_ns_.clear();
  lost_ = 0;
}

void Recorder::stop_trace() {
  const std::lock_guard<std::mutex> lock(mutex_);
  descriptor_ = -1;
}

size_t Recorder::lane_of(const Record& record, std::string* lines) {
  size_t lane = 0;
  while (lane < lane_ends_ns_.size() && lane_ends_ns_[lane] > record.ready_ns) ++lane;
  if (lane == lane_ends_ns_.size()) {
    lane_ends_ns_.push_back(0);
    *lines += "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(rank_) +
              ",\"tid\":" + std::to_string(kFirstLane + lane) +
              ",\"args\":{\"name\":\"communication " + std::to_string(lane) + "\"}},\n";
  }
  lane_ends_ns_[lane] = record.end_ns;  // operations are recorded in the order of their ends
  return lane;
}

void Recorder::trace(const Record& record, const std::string& error) {
  std::string lines;
  const size_t lane = lane_of(record, &lines);
  const std::string track =
      ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(kFirstLane + lane);
  if (lost_ > 0) {
    lines += "{\"name\":\"" + std::to_string(lost_) + " events lost\",\"ph\":\"i\",\"s\":\"t\"" +
             track + ",\"ts\":" + microseconds(record.end_ns) + "},\n";
  }
  const std::string key = shortened(record.key);
  const std::string start = ",\"ph\":\"X\"" + track + ",\"ts\":" + microseconds(record.ready_ns);
  const std::string waiting = microseconds(record.first_ns - record.ready_ns);
  lines += "{\"name\":";
  append_string(std::string(name_of(record.kind)) + " " + key, &lines);
  lines += ",\"cat\":\"" + std::string(name_of(record.kind)) + "\"" + start +
           ",\"dur\":" + microseconds(record.end_ns - record.ready_ns) + ",\"args\":{\"key\":";
  append_string(key, &lines);
  lines += ",\"call\":" + std::to_string(record.call) + ",\"algorithm\":\"" + record.algorithm +
           "\",\"logical_bytes\":" + std::to_string(record.logical_bytes) +
           ",\"wire_bytes\":" + std::to_string(record.wire_bytes) + ",\"waiting_us\":" + waiting +
           ",\"moving_us\":" + microseconds(record.end_ns - record.first_ns);
  if (!error.empty()) {
    lines += ",\"error\":";
    append_string(shortened(error), &lines);
  }
  lines += "}},\n";
  // An event within the operation's event, so that a viewer shows how long it waited.
  if (record.first_ns > record.ready_ns)
    lines += "{\"name\":\"waiting\",\"cat\":\"waiting\"" + start + ",\"dur\":" + waiting + "},\n";
  // One write, which a pipe takes as a whole or not at all.
  ssize_t written;
  do {
    written = write(descriptor_, lines.data(), lines.size());
  } while (written < 0 && errno == EINTR);
  lost_ = written < 0 ? lost_ + 1 : 0;
}

std::string Recorder::counters_json() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string out = "[";
  for (const auto& [key_and_kind, counter] : counters_) {
    if (out.size() > 1) out += ",";
    out += "{\"key\":";
    append_string(key_and_kind.first, &out);
    out += ",\"kind\":\"" + std::string(name_of(counter.kind)) +
           "\",\"calls\":" + std::to_string(counter.calls) +
           ",\"logical_bytes\":" + std::to_string(counter.logical_bytes) +
           ",\"wire_bytes\":" + std::to_string(counter.wire_bytes);
    char seconds[80];
    std::snprintf(seconds, sizeof(seconds), ",\"seconds\":%.9f,\"waiting_seconds\":%.9f}",
                  static_cast<double>(counter.duration_ns) * 1e-9,
                  static_cast<double>(counter.waiting_ns) * 1e-9);
    out += seconds;
  }
  return out + "]";
}

}  // namespace whale
