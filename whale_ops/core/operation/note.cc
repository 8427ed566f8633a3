#include "whale_ops/core/operation/note.h"

#include <algorithm>
#include <cstring>

#include "whale_ops/core/collective/reduce.h"

namespace whale {
namespace {

constexpr size_t kMaxKeyInNote = 1000;
constexpr size_t kMaxTextInNote = 900;
constexpr size_t kMaxAloneInNote = 900;

bool has_reduction(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
}

void append_text(const std::string& text, size_t limit, std::string* out) {
  const uint16_t length = static_cast<uint16_t>(std::min(text.size(), limit));
  out->append(reinterpret_cast<const char*>(&length), sizeof(length));
  out->append(text, 0, length);
}

std::string take_text(const std::string& note, size_t* position) {
  uint16_t length = 0;
  if (*position + sizeof(length) > note.size()) return "";
  std::memcpy(&length, note.data() + *position, sizeof(length));
  *position += sizeof(length);
  const std::string text = note.substr(std::min(*position, note.size()), length);
  *position += length;
  return text;
}

}  // namespace

std::string make_note(const Request& request, const std::string& descriptor) {
  std::string note;
  append_text(request.key, kMaxKeyInNote, &note);
  append_text(descriptor, kMaxTextInNote, &note);
  append_text(request.alone, kMaxAloneInNote, &note);
  note.append(reinterpret_cast<const char*>(request.dims.data()),
              request.dims.size() * sizeof(int64_t));
  return note;
}

Note parse_note(const std::string& bytes) {
  Note note;
  size_t position = 0;
  note.key = take_text(bytes, &position);
  note.descriptor = take_text(bytes, &position);
  note.alone = take_text(bytes, &position);
  while (position + sizeof(int64_t) <= bytes.size()) {
    int64_t dim;
    std::memcpy(&dim, bytes.data() + position, sizeof(dim));
    note.dims.push_back(dim);
    position += sizeof(dim);
  }
  return note;
}

std::string describe(const Request& request) {
  const std::string dtype =
      request.dtype_name.empty() ? name_of(request.dtype) : request.dtype_name;
  if (request.kind == OpKind::kBarrier)
    return request.group.empty() ? "Barrier" : "Barrier among ranks " + join_ranks(request.group);
  if (is_point_to_point(request.kind)) return "Send/Recv of " + dtype;
  std::string out = name_of(request.kind);
  if (has_reduction(request.kind)) out += std::string("(") + name_of(request.reduction) + ")";
  out += " of " + dtype + (request.text.empty() ? "" : " " + request.text);
  if (request.kind == OpKind::kBroadcast)
    out += " from group index " + std::to_string(request.root);
  if (request.kind == OpKind::kAllReduce && request.algorithm != Algorithm::kAuto) {
    out += std::string(" by ") + name_of(request.algorithm);
  }
  if (!request.group.empty()) out += " among ranks " + join_ranks(request.group);
  return out;
}

}  // namespace whale
