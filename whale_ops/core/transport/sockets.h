// Ranks that are connected by sockets, one for each pair: processes that were not started together,
// and that MPI connects not.
//
// A message is announced; a small payload comes with the announcement. Another one stays with the
// sender until the receiver pulls it, and then goes straight from tensor to tensor, so nobody
// buffers what nobody has asked for.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// `sockets`: connected ones, by rank, that this takes over; that of `rank` itself is -1. On the
// engine's thread.
WHALE_EXPORT std::unique_ptr<Transport> make_socket_transport(int rank,
                                                              const std::vector<int>& sockets);

// Fixed-size data of all ranks that such a transport connects, before its first message.
// Collective; on the engine's thread. An error where one of the others is gone or does not come
// within ten seconds.
WHALE_EXPORT Status gather_by_sockets(Transport* sockets, const void* mine, size_t bytes,
                                      void* all);

}  // namespace whale
