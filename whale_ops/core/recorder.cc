#include "recorder.h"

#include <cstdio>

namespace whale {
namespace {

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
  if (tracing_) trace_.push_back(record);
}

void Recorder::start_trace() {
  const std::lock_guard<std::mutex> lock(mutex_);
  tracing_ = true;
  trace_.clear();
}

std::string Recorder::counters_json() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string out = "[";
  for (const auto& [key_and_kind, counter] : counters_) {
    if (out.size() > 1) out += ",";
    out += "{\"key\":";
    append_string(key_and_kind.first, &out);
    out += ",\"kind\":\"" + std::string(name_of(counter.kind)) + "\",\"calls\":" + std::to_string(counter.calls) +
           ",\"logical_bytes\":" + std::to_string(counter.logical_bytes) +
           ",\"wire_bytes\":" + std::to_string(counter.wire_bytes);
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), ",\"seconds\":%.9f}", static_cast<double>(counter.duration_ns) * 1e-9);
    out += seconds;
  }
  return out + "]";
}

std::string Recorder::trace_json(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string out = "[";
  for (const Record& record : trace_) {
    if (out.size() > 1) out += ",";
    out += "{\"name\":";
    append_string(record.key, &out);
    out += ",\"cat\":\"" + std::string(name_of(record.kind)) + "\",\"ph\":\"X\",\"pid\":" + std::to_string(rank) +
           ",\"tid\":\"communication\",\"ts\":" + microseconds(record.ready_ns) +
           ",\"dur\":" + microseconds(record.end_ns - record.ready_ns) +
           ",\"args\":{\"first_byte_us\":" + microseconds(record.first_ns - record.ready_ns) +
           ",\"algorithm\":\"" + record.algorithm + "\",\"logical_bytes\":" + std::to_string(record.logical_bytes) +
           ",\"wire_bytes\":" + std::to_string(record.wire_bytes) + "}}";
  }
  return out + "]";
}

}  // namespace whale
