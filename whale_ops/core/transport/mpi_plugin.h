// What libwhale_mpi.so offers to the core, which knows nothing of MPI.
#pragma once

#include <memory>

#include "whale_ops/core/transport/host_transport.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

struct MpiPlugin {
  // MPI_Init_thread unless somebody else did; checks the thread level.
  Status (*initialize)();
  // A duplicate of MPI_COMM_WORLD. Collective; on the engine's thread.
  Status (*open)(std::unique_ptr<Transport>* transport);
  // Fixed-size data of all ranks of MPI_COMM_WORLD. Collective; on the engine's thread.
  GatherFixed gather;
  // MPI_Finalize, if initialize() started MPI and no transport is open any more.
  Status (*finalize_if_last)();
};

}  // namespace whale
