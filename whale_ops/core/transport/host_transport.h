// Ranks of one machine exchange through memory that they share; a network carries messages to other
// machines.
//
// Every rank owns one segment of memory with a ring for each peer on its machine, into which that
// peer writes announcements and small payloads. Large payloads are not copied into shared memory:
// the receiver reads them from the sender's memory (process_vm_readv) straight to where they
// belong. Segments have no name: they are files in memory (memfd) that a peer opens through /proc,
// so nothing is left behind however a process dies.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/transport/doorbell.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// Gathers `bytes` bytes of every rank into `all`, in the order of ranks; collective.
using GatherFixed = std::function<Status(const void* mine, size_t bytes, void* all)>;

// Wraps `network`, which connects all ranks, so that ranks of one machine use memory instead, if
// they can read each other's memory and both want that. Collective, also for ranks that do not want
// it; called on the engine's thread, whose doorbell is `bell`. `notes` gets a sentence for each
// peer of this machine that has to be reached through the network, with the reason; that is no
// error. `hosts`: the host of each rank; ranks with different numbers count as on different
// machines. Empty: the real machines count.
WHALE_EXPORT Status share_memory(std::unique_ptr<Transport> network, bool wanted,
                                 const std::vector<int>& hosts, const GatherFixed& gather,
                                 const Doorbell& bell, std::unique_ptr<Transport>* transport,
                                 std::vector<std::string>* notes);

}  // namespace whale
