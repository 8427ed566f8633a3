// What the devices of host_device.cc do with the tensors of an exchange.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/device/device.h"

namespace {

using whale::Code;
using whale::DeviceOperation;
using whale::DType;
using whale::OpKind;
using whale::Status;

size_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

bool moves_to_one(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

// What must be equal on all ranks of the group, in words.
std::string words_of(const DeviceOperation& what) {
  std::string out = moves_to_one(what.kind) ? "Send" : name_of(what.kind);
  out += " of " + whale::join_ranks(what.group) + ", dtype " +
         std::to_string(static_cast<int>(what.dtype)) + " of " + std::to_string(what.element_bytes);
  if (what.kind == OpKind::kBroadcast) out += ", root " + std::to_string(what.root);
  if (what.kind == OpKind::kAllReduce || what.kind == OpKind::kReduceScatter) {
    out += std::string(", ") + name_of(what.reduction) + " as " +
           std::to_string(static_cast<int>(what.wire));
  }
  if (what.kind == OpKind::kAllToAll) return out + ", largest " + std::to_string(what.largest);
  if (what.kind == OpKind::kAllGather || what.kind == OpKind::kReduceScatter) {
    for (const int64_t count : what.counts) out += " " + std::to_string(count);
    return out;
  }
  for (const auto& tensor : what.tensors) out += " " + std::to_string(tensor.count);
  return out;
}

void copy(const whale::DeviceCopy& one) {
  for (size_t row = 0; row < one.rows; ++row) {
    std::memcpy(static_cast<char*>(one.to) + row * one.to_pitch,
                static_cast<const char*>(one.from) + row * one.from_pitch, one.width);
  }
}

struct Mark {
  bool finished = false;
};

struct Entry {
  DeviceOperation what;
  std::string words;
  int64_t number = 0;  // of the group's operations on this rank
  int64_t due_ns = 0;
  Mark* last = nullptr;  // finished with this entry
};

// All values before any result: outputs may lie where inputs do. `only`: whose results are written;
// below 0: everyone's.
void carry_out(const std::vector<Entry*>& members, int only = -1) {
  for (const Entry* member : members) {
    for (const auto& one : member->what.before) copy(one);
  }
  const DeviceOperation& first = members[0]->what;
  const size_t bytes = first.element_bytes, size = members.size();
  std::vector<std::vector<std::string>> results(size);  // by rank and tensor
  const auto input = [&](size_t rank, size_t tensor) {
    return static_cast<const char*>(members[rank]->what.tensors[tensor].input);
  };
  const auto reduced = [&](size_t tensor, int64_t offset, int64_t count) {
    const auto elements = static_cast<size_t>(count);
    const bool narrow = first.wire != first.dtype;
    const size_t wire_bytes = narrow ? bytes_of(first.wire) : bytes;
    std::vector<std::string> parts(size, std::string(elements * wire_bytes, '\0'));
    std::vector<whale::Term> terms;
    for (size_t rank = 0; rank < size; ++rank) {
      const char* from = input(rank, tensor) + static_cast<size_t>(offset) * bytes;
      if (narrow) {
        whale::narrow_floats(first.wire, reinterpret_cast<const float*>(from), parts[rank].data(),
                             elements);
      } else {
        parts[rank].assign(from, elements * bytes);
      }
      terms.push_back({parts[rank].data(), false});
    }
    std::string sum(elements * wire_bytes, '\0');
    whale::reduce(first.wire, first.reduction, sum.data(), false, terms, elements);
    if (!narrow) return sum;
    std::string wide(elements * bytes, '\0');
    whale::widen_floats(first.wire, sum.data(), reinterpret_cast<float*>(wide.data()), elements);
    return wide;
  };
  for (size_t rank = 0; rank < size; ++rank) {
    const DeviceOperation& what = members[rank]->what;
    std::string gathered;
    for (size_t i = 0; i < what.tensors.size(); ++i) {
      const auto whole = static_cast<size_t>(what.tensors[i].count) * bytes;
      if (what.kind == OpKind::kAllReduce)
        results[rank].push_back(rank == 0 ? reduced(i, 0, what.tensors[i].count) : results[0][i]);
      if (what.kind == OpKind::kBroadcast)
        results[rank].emplace_back(input(static_cast<size_t>(what.root), i), whole);
      if (what.kind == OpKind::kRecv) results[rank].emplace_back(input(0, i), whole);
    }
    if (what.kind == OpKind::kReduceScatter)
      results[rank] = {reduced(0, whale::offsets_of(what.counts)[rank], what.counts[rank])};
    for (size_t peer = 0; peer < size; ++peer) {
      if (what.kind == OpKind::kAllGather)
        gathered.append(input(peer, 0), static_cast<size_t>(what.counts[peer]) * bytes);
      if (what.kind != OpKind::kAllToAll) continue;
      const auto offset =
          static_cast<size_t>(whale::offsets_of(members[peer]->what.counts)[rank]) * bytes;
      gathered.append(input(peer, 0) + offset, static_cast<size_t>(what.recv_counts[peer]) * bytes);
    }
    if (what.kind == OpKind::kAllGather || what.kind == OpKind::kAllToAll)
      results[rank] = {gathered};
  }
  for (size_t rank = 0; rank < size; ++rank) {
    const DeviceOperation& what = members[rank]->what;
    if (only >= 0 && static_cast<int>(rank) != only) continue;
    for (size_t i = 0; i < results[rank].size(); ++i) {
      if (!results[rank][i].empty())
        std::memcpy(what.tensors[i].output, results[rank][i].data(), results[rank][i].size());
    }
    for (const auto& one : what.after) copy(one);
  }
}

// What the rank puts in, one tensor behind the other.
std::string inputs_of(const DeviceOperation& what) {
  std::string out;
  for (const auto& tensor : what.tensors) {
    int64_t count = tensor.count;
    if (what.kind == OpKind::kAllGather) count = what.counts[static_cast<size_t>(what.index)];
    if (what.kind == OpKind::kRecv || (what.kind == OpKind::kBroadcast && what.index != what.root))
      continue;
    out.append(static_cast<const char*>(tensor.input),
               static_cast<size_t>(count) * what.element_bytes);
  }
  return out;
}

// The exchange of ranks that share no memory: they gather what all put in, and each takes what is
// for it.
Status meet(const DeviceOperation& what, const whale::DeviceGather& gather) {
  for (const auto& one : what.before) copy(one);
  const std::string words = words_of(what), inputs = inputs_of(what);
  std::vector<int64_t> own = {static_cast<int64_t>(words.size()),
                              static_cast<int64_t>(inputs.size())},
                       sizes;
  own.insert(own.end(), what.counts.begin(), what.counts.end());  // AllToAll: others' are others
  own.resize(2 + what.size());
  sizes.resize(own.size() * what.size());
  Status status = gather(what.group, own.data(), own.size() * sizeof(int64_t), sizes.data());
  if (!status.ok()) return status;
  int64_t most = 0;
  for (size_t rank = 0; rank < what.size(); ++rank)
    most = std::max(most, sizes[rank * own.size()] + sizes[rank * own.size() + 1]);
  std::string packed = words + inputs, all(static_cast<size_t>(most) * what.size(), '\0');
  packed.resize(static_cast<size_t>(most));
  status = gather(what.group, packed.data(), packed.size(), all.data());
  if (!status.ok()) return status;
  std::vector<Entry> entries(what.size());
  std::vector<std::string> brought(what.size());  // aligned
  std::vector<Entry*> members;
  for (size_t rank = 0; rank < what.size(); ++rank) {
    const int64_t* said = &sizes[rank * own.size()];
    const char* from = all.data() + rank * static_cast<size_t>(most);
    if (std::string(from, static_cast<size_t>(said[0])) != words)
      return Status::Error(Code::kInternal, "ranks launch " + words + " and something else");
    brought[rank].assign(from + said[0], static_cast<size_t>(said[1]));
    DeviceOperation& other = entries[rank].what;
    other = what;
    other.before.clear();
    if (!what.counts.empty()) other.counts.assign(said + 2, said + 2 + what.size());
    size_t offset = 0;
    for (auto& tensor : other.tensors) {
      tensor.input = brought[rank].data() + offset;
      offset += static_cast<size_t>(tensor.count) * what.element_bytes;
    }
    members.push_back(&entries[rank]);
  }
  carry_out(members, what.index);
  return status;
}

}  // namespace
