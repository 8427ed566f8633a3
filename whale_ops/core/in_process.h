// Ranks of one process: messages are moved between queues, large payloads are copied once, from tensor to tensor.
#pragma once

#include <memory>
#include <vector>

#include "transport.h"

namespace whale {

std::vector<std::unique_ptr<Transport>> make_in_process_transports(int size);

}  // namespace whale
