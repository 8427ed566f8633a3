// Value types that every part of the core shares. No TensorFlow include anywhere in core/.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#define WHALE_EXPORT __attribute__((visibility("default")))

namespace whale {

// Element types of the core. kRaw elements have no arithmetic: they have a fixed size and are only
// moved. The numbers are part of the C ABI (whale_ops/_native.py).
enum class DType : int32_t {
  kRaw = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat32 = 3,
  kFloat64 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kUInt8 = 9,
  kUInt16 = 10,
  kUInt32 = 11,
  kUInt64 = 12,
  kBool = 13,
  kComplex64 = 14,
  kComplex128 = 15,
};

enum class Reduction : int32_t { kSum = 0, kMin = 1, kMax = 2, kProd = 3 };

enum class OpKind : int32_t {
  kAllReduce = 0,
  kAllGather = 1,
  kReduceScatter = 2,
  kAllToAll = 3,
  kBroadcast = 4,
  kSend = 5,
  kRecv = 6,
  kBarrier = 7,
};

enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // an argument is wrong, or the ranks' arguments do not match
  kAborted = 2,          // some rank called abort
  kCancelled = 3,        // TensorFlow cancelled the step
  kUnavailable = 4,      // a rank has left, or the transport failed
  kDeadlineExceeded = 5,
  kInternal = 6,
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status Ok() { return {}; }
  static Status Error(Code code, std::string message) { return {code, std::move(message)}; }
};

inline const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "AllReduce";
    case OpKind::kAllGather: return "AllGather";
    case OpKind::kReduceScatter: return "ReduceScatter";
    case OpKind::kAllToAll: return "AllToAll";
    case OpKind::kBroadcast: return "Broadcast";
    case OpKind::kSend: return "Send";
    case OpKind::kRecv: return "Recv";
    case OpKind::kBarrier: return "Barrier";
  }
  return "unknown operation";
}

// Send and Recv connect two ranks; all other operations are those of a group.
inline bool is_point_to_point(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv;
}

// Whether the operation's schedule depends on which ranks share a host.
inline bool knows_hosts(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kAllGather ||
         kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
}

inline const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return "sum";
    case Reduction::kMin: return "min";
    case Reduction::kMax: return "max";
    case Reduction::kProd: return "prod";
  }
  return "unknown reduction";
}

// Ranks in words, such as "0, 1 and 3".
inline std::string join_ranks(const std::vector<int>& ranks) {
  std::string out;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  return out;
}

// Monotonic time in nanoseconds.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// 64-bit FNV-1a followed by the splitmix64 finaliser, so that keys that differ in their last byte
// differ everywhere.
inline uint64_t hash64(const void* data, size_t bytes, uint64_t seed = 14695981039346656037ull) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t h = seed;
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 1099511628211ull;
  h += 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
  return h ^ (h >> 31);
}

inline uint64_t hash64(const std::string& text, uint64_t seed = 14695981039346656037ull) {
  return hash64(text.data(), text.size(), seed);
}

}  // namespace whale
