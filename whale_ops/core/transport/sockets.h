// Transport over TCP, between hosts and between processes that were not started together.
//
// A message is announced; a small payload comes with the announcement. A larger payload follows at
// once, as long as its receiver has not too many bytes that it has not requested; it goes straight
// to its destination if that is known when it arrives, else into a buffer until it is received.
// Other payloads, and very large ones, stay with their sender until they are requested.
// Decision: 0160 (docs/decisions).
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// `sockets`: connected sockets, by rank, which this takes over; the entry of `rank` itself is -1.
// Called on the engine's thread.
WHALE_EXPORT std::unique_ptr<Transport> make_socket_transport(int rank,
                                                              const std::vector<int>& sockets);

// Gathers fixed-size data of all ranks that such a transport connects, before its first message;
// collective, on the engine's thread. It is an error if another rank is gone or does not come
// within ten seconds.
WHALE_EXPORT Status gather_by_sockets(Transport* sockets, const void* mine, size_t bytes,
                                      void* all);

}  // namespace whale
