// Exchanges byte strings of any length between ranks: for the host program, and for shapes and
// sizes that ops do not know in advance.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/progress/endpoint.h"

namespace whale {

using BytesCallback = std::function<void(const Status&, std::vector<std::string>)>;

// Gathers every rank's bytes, in group order. `text` must be equal on all ranks; `alone` is as in
// Request. Takes two rounds: lengths, then contents. `id`: a reservation of the endpoint, with
// which the first round can be cancelled.
WHALE_EXPORT void gather_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id,
                               const std::string& key, const std::string& text,
                               const std::string& alone, const std::vector<int>& group,
                               std::string bytes, BytesCallback done);

// Broadcasts the root's bytes; `root` is an index of the group. The callback gets a vector of one
// element.
WHALE_EXPORT void broadcast_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id,
                                  const std::string& key, const std::string& text,
                                  const std::string& alone, const std::vector<int>& group, int root,
                                  std::string bytes, BytesCallback done);

}  // namespace whale
