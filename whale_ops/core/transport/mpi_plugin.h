// What libwhale_mpi.so offers to the core, which knows nothing of MPI.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/transport/host_transport.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

struct MpiPlugin {
  // MPI_Init_thread unless somebody else did; checks the thread level.
  Status (*initialize)();
  // Connects the ranks `members` of MPI_COMM_WORLD; none: all of them. On the engine's thread. With
  // all ranks it is collective. Without some, who may be gone, nothing is waited for: the others
  // say the same `members` with the same number, which is positive and counts up.
  Status (*open)(const std::vector<int>& members, int number,
                 std::unique_ptr<Transport>* transport);
  // Fixed-size data of all ranks that a transport of open() connects. Collective; on the engine's
  // thread. Where some ranks of MPI_COMM_WORLD were left out, an error when one of the others does
  // not come in time.
  Status (*gather)(Transport* network, const void* mine, size_t bytes, void* all);
  // MPI_Finalize, if initialize() started MPI and no transport is open any more.
  Status (*finalize_if_last)();
};

}  // namespace whale
