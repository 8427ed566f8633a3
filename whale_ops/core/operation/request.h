// What a caller asks of an operation, and the names by which ranks match operations.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"

namespace whale {

constexpr char kBytes[] = "bytes";  // dtype_name of data that is no tensor

// One of several tensors that are reduced as if they were concatenated.
struct Piece {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
};

// What a caller asks for. Buffers must stay valid until `done`; if the operation fails while
// messages are still in flight, `owner` keeps them alive until the network no longer uses them.
struct Request {
  OpKind kind = OpKind::kBarrier;
  std::string key;
  std::string text;  // shapes, axis, sizes: must be the same text on all ranks of the group
  // For an operation beside which its rank runs no other one: a text that says what it is for; else
  // empty.
  std::string alone;
  DType dtype = DType::kRaw;
  std::string dtype_name;  // name of kRaw elements; empty: the name of `dtype`
  size_t element_bytes = 1;
  Reduction reduction = Reduction::kSum;
  std::vector<int> group;  // ranks of the communicator in group order; empty: all
  // Broadcast: index in the group; Send, Recv: the peer's rank in the communicator.
  int root = 0;
  std::vector<int64_t> counts;
  std::vector<int64_t> recv_counts;
  bool even = false;                       // AllToAll, as in Problem
  Algorithm algorithm = Algorithm::kAuto;  // of all-reduces
  Costs network = kNetwork;                // between hosts
  std::vector<int> hosts;                  // as in Problem; set by the endpoint
  // Whether all ranks of the group have mapped each other's arena; set by the endpoint.
  bool tensors_shared = false;
  // Whether this rank lets others read and write its tensors in place; set by the endpoint.
  bool lends = true;
  std::vector<int64_t> dims;  // Send: travels with the first message
  const void* input = nullptr;
  void* output = nullptr;
  // AllReduce: used instead of `input` and `output` if the elements are in several places.
  std::vector<Piece> pieces;
  // Recv of a shape that is not known before: called once, on the engine's thread, with the
  // sender's shape; returns the destination.
  std::function<Status(const std::vector<int64_t>& dims, uint64_t bytes, void** destination)> place;
  std::shared_ptr<void> owner;
  std::function<void(const Status&)> done;  // called once, on the engine's thread; must not block
};

// Identifies an invocation of an operation: equal on the ranks that take part, even if they
// disagree about what the operation is.
uint64_t operation_tag(const Request& request, int rank, uint64_t call);
// The name under which invocations are counted on a rank.
std::string counter_name(const Request& request);
// Such as "AllReduce 'key'".
std::string title_of(const Request& request);
// What the operation is for, if the caller has said so; else its title.
std::string purpose_of(const Request& request);
// Bytes of the elements that this rank gives or gets, whichever is more.
int64_t bytes_of(const Request& request);
// An error about the request's arguments.
Status invalid(const Request& request, const std::string& what);

}  // namespace whale
