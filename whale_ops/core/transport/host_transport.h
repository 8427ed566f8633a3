// Ranks of one machine speak through memory that they share; a network carries what goes to other
// machines.
//
// Every rank owns one segment of memory with a ring per peer of its machine, into which that peer
// writes announcements and small payloads. Large payloads are not copied into shared memory: the
// receiver reads them out of the sender's memory (process_vm_readv) straight to where they belong.
// Segments have no name: they are files that exist in memory only (memfd), which a peer opens
// through /proc, so nothing is left when a process dies, in whatever way.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/transport/doorbell.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// Collective over all ranks: every rank gives `bytes` bytes, `all` receives those of all ranks in
// rank order.
using GatherFixed = std::function<Status(const void* mine, size_t bytes, void* all)>;

// Wraps `network`, which connects all ranks: ranks of one machine that may read each other's
// memory, and of which both want it, do not need it any more. Collective, for those that do not
// want it too; on the engine's thread, whose doorbell is `bell`. `notes` receives a sentence for
// each peer of this machine that has to be reached through the network, with the reason; that is no
// error. `hosts`: of each rank; different ones count as different machines. Empty: as the machines
// are.
WHALE_EXPORT Status share_memory(std::unique_ptr<Transport> network, bool wanted,
                                 const std::vector<int>& hosts, const GatherFixed& gather,
                                 const Doorbell& bell, std::unique_ptr<Transport>* transport,
                                 std::vector<std::string>* notes);

}  // namespace whale
