// Byte strings of any length between the ranks: the host side's exchanges, and the shapes and sizes
// that ops do not know.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/progress/endpoint.h"

namespace whale {

using BytesCallback = std::function<void(const Status&, std::vector<std::string>)>;

// Every rank's bytes, in group order. `text` must be equal on all ranks; `alone` as in Request. Two
// rounds: lengths, then contents. `id`: a reservation of the endpoint, for its cancel(); it stands
// for the first round.
WHALE_EXPORT void gather_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id,
                               const std::string& key, const std::string& text,
                               const std::string& alone, const std::vector<int>& group,
                               std::string bytes, BytesCallback done);

// The root's bytes; `root` indexes the group. The callback's vector has one element.
WHALE_EXPORT void broadcast_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id,
                                  const std::string& key, const std::string& text,
                                  const std::string& alone, const std::vector<int>& group, int root,
                                  std::string bytes, BytesCallback done);

}  // namespace whale
