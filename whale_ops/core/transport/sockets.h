// Ranks that TCP connects: those of different hosts, and processes that were not started together.
//
// A message is announced; a small payload comes with the announcement. A larger one follows at
// once, as long as its receiver has not too much that it has not asked for; it goes straight to
// where it belongs if that is known when it comes, else into memory of its own until somebody takes
// it. Others, and very large ones, stay with their sender until they are pulled.
// Decision: 0160 (docs/decisions).
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
