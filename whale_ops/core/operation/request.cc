#include "whale_ops/core/operation/request.h"

#include <algorithm>
#include <numeric>

namespace whale {

std::string counter_name(const Request& request) {
  switch (request.kind) {
    case OpKind::kSend: return "send " + std::to_string(request.root) + " " + request.key;
    case OpKind::kRecv: return "recv " + std::to_string(request.root) + " " + request.key;
    default: return "group " + request.key;
  }
}

uint64_t operation_tag(const Request& request, int rank, uint64_t call) {
  const bool p2p = is_point_to_point(request.kind);
  const int64_t source = !p2p ? -1 : request.kind == OpKind::kSend ? rank : request.root;
  const int64_t target = !p2p ? -1 : request.kind == OpKind::kSend ? request.root : rank;
  const int64_t parts[3] = {static_cast<int64_t>(call), source, target};
  return hash64(parts, sizeof(parts), hash64(request.key));
}

std::string title_of(const Request& request) {
  return std::string(name_of(request.kind)) + " '" + request.key + "'";
}

std::string purpose_of(const Request& request) {
  return request.alone.empty() ? title_of(request) : request.alone;
}

int64_t bytes_of(const Request& request) {
  const auto sum = [](const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  return std::max(sum(request.counts), sum(request.recv_counts)) *
         static_cast<int64_t>(request.element_bytes);
}

Status invalid(const Request& request, const std::string& what) {
  return Status::Error(Code::kInvalidArgument, title_of(request) + ": " + what);
}

}  // namespace whale
