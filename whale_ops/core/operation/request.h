// What a caller asks of an operation, and by which names ranks know it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"

namespace whale {

constexpr char kBytes[] = "bytes";  // dtype_name of what is no tensor

// One of several tensors that are reduced as if they lay one behind the other.
struct Piece {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
};

// What a caller asks for. Buffers stay valid until `done`; if the operation fails while messages
// are still in flight, `owner` keeps them alive until the network has let go of them.
struct Request {
  OpKind kind = OpKind::kBarrier;
  std::string key;
  std::string text;  // shapes, axis, sizes: must be the same text on all ranks of the group
  // Of an operation beside which its rank runs no other: what it is for, in words; else empty.
  std::string alone;
  DType dtype = DType::kRaw;
  std::string dtype_name;  // of kRaw elements; empty: the name of `dtype`
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
  std::vector<int> hosts;                  // as in Problem; the endpoint says so
  // All ranks of the group have mapped each other's arena; the endpoint says so, also:
  bool tensors_shared = false;
  // Whether this rank lets others read and write its tensors where they lie.
  bool lends = true;
  std::vector<int64_t> dims;  // Send: travels with the first message
  const void* input = nullptr;
  void* output = nullptr;
  // AllReduce: instead of `input` and `output`, where the elements lie in several places.
  std::vector<Piece> pieces;
  // Recv of a shape not known before: called once, on the engine's thread, with the sender's shape;
  // gives the destination.
  std::function<Status(const std::vector<int64_t>& dims, uint64_t bytes, void** destination)> place;
  std::shared_ptr<void> owner;
  std::function<void(const Status&)> done;  // called once, on the engine's thread; must not block
};

// Which invocation of which operation: equal on the ranks that take part, whatever they believe it
// to be.
uint64_t operation_tag(const Request& request, int rank, uint64_t call);
// Name under which invocations are counted on one rank.
std::string counter_name(const Request& request);
// "AllReduce 'key'"
std::string title_of(const Request& request);
// What it is for, where that was told, else the title.
std::string purpose_of(const Request& request);
// Of the elements that this rank gives, or gets if these are more.
int64_t bytes_of(const Request& request);
// An error about what was asked for.
Status invalid(const Request& request, const std::string& what);

}  // namespace whale
