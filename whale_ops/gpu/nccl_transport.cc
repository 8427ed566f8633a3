#include <dlfcn.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "whale_ops/gpu/nccl.h"
#include "whale_ops/gpu/transport.h"

namespace whale::cuda {
namespace {

Nccl* nccl_calls() {
  static auto* made = new Nccl();  // never destroyed, for the same reason as the driver
  return made;
}
const Nccl& nccl() { return *nccl_calls(); }

Status load_nccl() {
  constexpr char kLibrary[] = "libnccl.so.2",
                 kAction[] = "; pip install nvidia-nccl-cu12 (-cu13 where the driver has CUDA 13)";
  // Finds the library that the process has loaded (such as TensorFlow's), or else the one that the
  // loader finds.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return Status::Error(Code::kUnavailable, std::string("NCCL was not found: ") +
                                                 (error == nullptr ? kLibrary : error) + kAction);
  }
#define WHALE_NCCL_CALL(name, Result, arguments)                          \
  *reinterpret_cast<void**>(&nccl_calls()->name) = dlsym(library, #name); \
  if (nccl_calls()->name == nullptr)                                      \
    return Status::Error(Code::kUnavailable, std::string("this NCCL has no ") + #name + kAction);
  WHALE_NCCL_CALLS(WHALE_NCCL_CALL)
#undef WHALE_NCCL_CALL
  *reinterpret_cast<void**>(&nccl_calls()->ncclGetLastError) = dlsym(library, "ncclGetLastError");
  return Status::Ok();
}

// ncclInProgress is no error: a non-blocking communicator completes the call by itself
// (NcclTransport::settle).
Status check_nccl(ncclResult_t result, const char* call, ncclComm_t communicator) {
  if (result == ncclSuccess || result == ncclInProgress) return Status::Ok();
  const char* more =
      nccl().ncclGetLastError == nullptr ? nullptr : nccl().ncclGetLastError(communicator);
  return Status::Error(
      Code::kUnavailable,
      std::string(call) + " failed: " + nccl().ncclGetErrorString(result) +
          (more == nullptr || *more == '\0' ? "" : std::string(" (") + more + ")") +
          "; NCCL_DEBUG=WARN tells more");
}

bool type_of(DType dtype, int* type) {
  switch (dtype) {
    case DType::kFloat16: *type = ncclFloat16; return true;
    case DType::kBFloat16: *type = ncclBfloat16; return true;
    case DType::kFloat32: *type = ncclFloat32; return true;
    case DType::kFloat64: *type = ncclFloat64; return true;
    default: return false;
  }
}

int operation_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return ncclSum;
    case Reduction::kMin: return ncclMin;
    case Reduction::kMax: return ncclMax;
    case Reduction::kProd: return ncclProd;
  }
  return ncclSum;
}

// Several NCCL calls that become one operation.
class NcclGroup {
 public:
  explicit NcclGroup(ncclComm_t communicator) : communicator_(communicator) {
    add(nccl().ncclGroupStart(), "ncclGroupStart");
  }
  void add(ncclResult_t result, const char* call) {
    if (status_.ok()) status_ = check_nccl(result, call, communicator_);
  }
  Status end() {
    // Also after an error, since a group has to be ended.
    const Status ended = check_nccl(nccl().ncclGroupEnd(), "ncclGroupEnd", communicator_);
    return status_.ok() ? ended : status_;
  }

 private:
  const ncclComm_t communicator_;
  Status status_;
};

// Has an NCCL communicator for each group of ranks that reduces or gathers. It is created when the
// first operation of the group is launched: at that time all its ranks launch that operation, and
// no other rank has to take part, as it would in ncclCommSplit. Sends, receives and all-to-alls use
// the communicator of all ranks. Communicators are non-blocking: calls return at once, and
// connecting and queueing go on meanwhile, so that whoever waits for that can also check whether a
// rank is gone.
// Decision: 0184 (docs/decisions).
class NcclTransport final : public DeviceTransport {
 public:
  NcclTransport(int rank, int size, DeviceGather gather, DeviceFailure failure)
      : rank_(rank), size_(size), gather_(std::move(gather)), ranks_failure_(std::move(failure)) {}
  ~NcclTransport() override {
    // The ranks of a communicator destroy it together, which would wait for ranks that are gone.
    if (!failure().ok() || !ranks_failure_().ok()) abandon();
    for (const auto& [group, communicator] : communicators_) nccl().ncclCommDestroy(communicator);
  }

  Status open() {
    ncclComm_t made = nullptr;
    return communicator_of({}, rank_, &made);
  }

  Status all_reduce(const DeviceOperation& what, const void* input, void* output, int64_t count,
                    CUstream stream) override {
    int type = 0;
    if (!type_of(what.wire, &type)) return no_floats();
    ncclComm_t communicator = nullptr;
    Status status = communicator_of(what.group, what.index, &communicator);
    if (!status.ok()) return status;
    status = check_nccl(nccl().ncclAllReduce(input, output, static_cast<size_t>(count), type,
                                             operation_of(what.reduction), communicator, stream),
                        "ncclAllReduce", communicator);
    return status.ok() ? settle(communicator) : status;
  }

  Status exchange(const DeviceOperation& what, CUstream stream) override {
    const bool alone =
        what.kind == OpKind::kSend || what.kind == OpKind::kRecv || what.kind == OpKind::kAllToAll;
    ncclComm_t communicator = nullptr;
    Status status = alone ? communicator_of({}, rank_, &communicator)
                          : communicator_of(what.group, what.index, &communicator);
    if (status.ok()) status = queue(what, communicator, stream);
    return status.ok() ? settle(communicator) : status;
  }

  const char* name() const override { return "nccl"; }

  // Reports errors that NCCL's own threads have met, such as a lost connection, while kernels wait.
  Status failure() override {
    for (const auto& [group, communicator] : communicators_) {
      ncclResult_t state = ncclSuccess;
      const Status status = state_of(communicator, &state);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }

  // NCCL's kernels wait for those of other ranks until they are told to end. All communicators are
  // aborted in one group: aborting one waits for its stream, on which a kernel of another one may
  // hang.
  void abandon() override {
    nccl().ncclGroupStart();
    for (const auto& [group, communicator] : std::exchange(communicators_, {}))
      nccl().ncclCommAbort(communicator);
    nccl().ncclGroupEnd();
  }

 private:
  static Status queue(const DeviceOperation& what, ncclComm_t communicator, CUstream stream) {
    switch (what.kind) {
      case OpKind::kReduceScatter: return reduce_scatter(what, communicator, stream);
      case OpKind::kAllGather: return all_gather(what, communicator, stream);
      case OpKind::kBroadcast: return broadcast(what, communicator, stream);
      case OpKind::kAllToAll: return all_to_all(what, communicator, stream);
      case OpKind::kSend: {
        const DeviceTensor& tensor = what.tensors[0];
        return check_nccl(nccl().ncclSend(tensor.input, bytes(what, tensor.count), ncclInt8,
                                          what.group[1], communicator, stream),
                          "ncclSend", communicator);
      }
      case OpKind::kRecv: {
        const DeviceTensor& tensor = what.tensors[0];
        return check_nccl(nccl().ncclRecv(tensor.output, bytes(what, tensor.count), ncclInt8,
                                          what.group[0], communicator, stream),
                          "ncclRecv", communicator);
      }
      default:
        return Status::Error(
            Code::kInternal,
            std::string("the transport NCCL does not support the operation ") + name_of(what.kind));
    }
  }

  static Status state_of(ncclComm_t communicator, ncclResult_t* state) {
    const Status asked = check_nccl(nccl().ncclCommGetAsyncError(communicator, state),
                                    "ncclCommGetAsyncError", communicator);
    return asked.ok() ? check_nccl(*state, "an exchange through NCCL", communicator) : asked;
  }

  // Waits until the communicator has completed its last call, that is, until it is connected and
  // the kernels are queued. What follows on the stream is then behind them.
  Status settle(ncclComm_t communicator) const {
    constexpr int kTries = 100;  // a connected communicator completes after a few
    constexpr auto kPause = std::chrono::microseconds(20);
    for (int number = 0;; ++number) {
      ncclResult_t state = ncclSuccess;
      Status status = state_of(communicator, &state);
      if (!status.ok() || state == ncclSuccess) return status;
      status = ranks_failure_();
      if (!status.ok()) return status;
      if (number > kTries) std::this_thread::sleep_for(kPause);
    }
  }

  static Status no_floats() {
    return Status::Error(Code::kInvalidArgument,
                         "Whale uses NCCL only to reduce floats; cast the tensor first");
  }
  static size_t bytes(const DeviceOperation& what, int64_t count) {
    return static_cast<size_t>(count) * what.element_bytes;
  }
  static bool even(const std::vector<int64_t>& counts) {
    for (const int64_t count : counts) {
      if (count != counts[0]) return false;
    }
    return true;
  }

  static Status reduce_scatter(const DeviceOperation& what, ncclComm_t communicator,
                               CUstream stream) {
    int type = 0;
    if (!type_of(what.dtype, &type)) return no_floats();
    const int operation = operation_of(what.reduction);
    const auto* input = static_cast<const char*>(what.tensors[0].input);
    auto* output = static_cast<char*>(what.tensors[0].output);
    if (even(what.counts)) {
      return check_nccl(nccl().ncclReduceScatter(input, output, static_cast<size_t>(what.counts[0]),
                                                 type, operation, communicator, stream),
                        "ncclReduceScatter", communicator);
    }
    const std::vector<int64_t> offsets = offsets_of(what.counts);
    NcclGroup calls(communicator);
    for (size_t root = 0; root < what.size(); ++root) {
      if (what.counts[root] == 0) continue;
      calls.add(nccl().ncclReduce(input + bytes(what, offsets[root]), output,
                                  static_cast<size_t>(what.counts[root]), type, operation,
                                  static_cast<int>(root), communicator, stream),
                "ncclReduce");
    }
    return calls.end();
  }

  static Status all_gather(const DeviceOperation& what, ncclComm_t communicator, CUstream stream) {
    const void* input = what.tensors[0].input;
    auto* output = static_cast<char*>(what.tensors[0].output);
    if (even(what.counts)) {
      return check_nccl(nccl().ncclAllGather(input, output, bytes(what, what.counts[0]), ncclInt8,
                                             communicator, stream),
                        "ncclAllGather", communicator);
    }
    const std::vector<int64_t> offsets = offsets_of(what.counts);
    NcclGroup calls(communicator);
    for (size_t root = 0; root < what.size(); ++root) {
      if (what.counts[root] == 0) continue;
      calls.add(nccl().ncclBroadcast(input, output + bytes(what, offsets[root]),
                                     bytes(what, what.counts[root]), ncclInt8,
                                     static_cast<int>(root), communicator, stream),
                "ncclBroadcast");
    }
    return calls.end();
  }

  static Status broadcast(const DeviceOperation& what, ncclComm_t communicator, CUstream stream) {
    NcclGroup calls(communicator);
    for (const DeviceTensor& tensor : what.tensors) {
      if (tensor.count == 0) continue;
      calls.add(nccl().ncclBroadcast(tensor.input, tensor.output, bytes(what, tensor.count),
                                     ncclInt8, what.root, communicator, stream),
                "ncclBroadcast");
    }
    return calls.end();
  }

  static Status all_to_all(const DeviceOperation& what, ncclComm_t communicator, CUstream stream) {
    const std::vector<int64_t> from = offsets_of(what.counts), to = offsets_of(what.recv_counts);
    const auto* input = static_cast<const char*>(what.tensors[0].input);
    auto* output = static_cast<char*>(what.tensors[0].output);
    NcclGroup calls(communicator);
    for (size_t peer = 0; peer < what.size(); ++peer) {
      if (what.counts[peer] > 0) {
        calls.add(nccl().ncclSend(input + bytes(what, from[peer]), bytes(what, what.counts[peer]),
                                  ncclInt8, what.group[peer], communicator, stream),
                  "ncclSend");
      }
      if (what.recv_counts[peer] > 0) {
        calls.add(
            nccl().ncclRecv(output + bytes(what, to[peer]), bytes(what, what.recv_counts[peer]),
                            ncclInt8, what.group[peer], communicator, stream),
            "ncclRecv");
      }
    }
    return calls.end();
  }

  // Returns the communicator of a group, creating it the first time, which is collective in the
  // group. `group`: empty for all ranks in order.
  Status communicator_of(const std::vector<int>& group, int index, ncclComm_t* communicator) {
    bool in_order = static_cast<int>(group.size()) == size_;
    for (size_t i = 0; i < group.size() && in_order; ++i)
      in_order = group[i] == static_cast<int>(i);
    const std::vector<int>& known = in_order ? everyone_ : group;
    const auto found = communicators_.find(known);
    if (found != communicators_.end()) {
      *communicator = found->second;
      return Status::Ok();
    }
    return connect(known, index, communicator);
  }

  Status connect(const std::vector<int>& group, int index, ncclComm_t* communicator) {
    const size_t members = group.empty() ? static_cast<size_t>(size_) : group.size();
    ncclUniqueId mine = {};
    const ncclResult_t made = index == 0 ? nccl().ncclGetUniqueId(&mine) : ncclSuccess;
    std::vector<ncclUniqueId> all(members);
    // Also if the first rank has no identifier, since the others wait for it.
    Status status = gather_(group, &mine, sizeof(mine), all.data());
    if (status.ok()) status = check_nccl(made, "ncclGetUniqueId", nullptr);
    ncclConfig config;
    if (status.ok())
      status = check_nccl(nccl().ncclCommInitRankConfig(communicator, static_cast<int>(members),
                                                        all[0], index, &config),
                          "ncclCommInitRankConfig", nullptr);
    if (!status.ok()) return status;
    communicators_[group] = *communicator;  // destroyed with all others if it does not connect
    return settle(*communicator);
  }

  const int rank_, size_;
  const std::vector<int> everyone_;  // empty: all ranks, in order
  const DeviceGather gather_;
  const DeviceFailure ranks_failure_;
  std::map<std::vector<int>, ncclComm_t> communicators_;  // by group
};

}  // namespace

Status open_nccl(int rank, int size, DeviceGather gather, DeviceFailure failure,
                 std::unique_ptr<DeviceTransport>* transport) {
  static const auto* found = new Status(load_nccl());
  if (!found->ok()) return *found;
  auto made = std::make_unique<NcclTransport>(rank, size, std::move(gather), std::move(failure));
  const Status status = made->open();
  if (status.ok()) *transport = std::move(made);
  return status;
}

}  // namespace whale::cuda
