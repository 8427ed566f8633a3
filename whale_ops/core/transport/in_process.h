// Ranks of one process: messages are moved between queues, large payloads are copied once, from
// tensor to tensor.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/transport/transport.h"

namespace whale {

// `hosts`: of each rank; ranks of different ones do not count as sharing memory. Empty: all are of
// one host.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int size,
                                                                   std::vector<int> hosts = {});

}  // namespace whale
