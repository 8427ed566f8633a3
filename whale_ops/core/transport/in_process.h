// Transport between ranks of one process: messages are moved between queues, large payloads are
// copied once, from tensor to tensor.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/transport/transport.h"

namespace whale {

// `hosts`: the host of each rank; ranks with different numbers do not count as sharing memory.
// Empty: all ranks are on one host.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int size,
                                                                   std::vector<int> hosts = {});

}  // namespace whale
