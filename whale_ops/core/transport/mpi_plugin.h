// The functions that libwhale_mpi.so offers to the core, which itself does not depend on MPI.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/transport/host_transport.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

struct MpiPlugin {
  // Calls MPI_Init_thread unless MPI is initialised already; checks the thread level.
  Status (*initialize)();
  // Connects the ranks `members` of MPI_COMM_WORLD; empty: all ranks. Called on the engine's
  // thread. With all ranks it is collective. With a subset (the other ranks may be gone) it waits
  // for nobody; all members have to give the same `members` and the same `number`, which is
  // positive and counts up.
  Status (*open)(const std::vector<int>& members, int number,
                 std::unique_ptr<Transport>* transport);
  // Gathers fixed-size data of all ranks that a transport from open() connects; collective, on the
  // engine's thread. If ranks of MPI_COMM_WORLD were left out, it is an error if one of the others
  // does not come in time.
  Status (*gather)(Transport* network, const void* mine, size_t bytes, void* all);
  // Calls MPI_Finalize, if initialize() has initialised MPI and no transport is open any more.
  Status (*finalize_if_last)();
};

}  // namespace whale
