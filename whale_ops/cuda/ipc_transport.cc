#include <string>
#include <utility>
#include <vector>

#include "whale_ops/cuda/kernels.h"
#include "whale_ops/cuda/transport.h"

namespace whale::cuda {
namespace {

size_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    default: return 0;
  }
}

// What a rank tells the others once.
struct Card {
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t written, taken;
};

// Every rank copies its buffer into memory that all have mapped, and adds up all of them in rank order: all ranks hold the
// same bits. An event of another process orders a stream only after it was recorded there, so the ranks meet on the host
// after recording. To wait inside a kernel instead would be a deadlock on a GPU that runs one rank's kernels at a time.
class IpcTransport final : public DeviceTransport {
 public:
  IpcTransport(int rank, int size, size_t max_bytes, DeviceGather gather)
      : rank_(rank), max_bytes_(max_bytes), gather_(std::move(gather)), peers_(static_cast<size_t>(size)) {}

  ~IpcTransport() override {
    for (size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      if (peer.memory != nullptr) static_cast<int>(i) == rank_ ? cudaFree(peer.memory) : cudaIpcCloseMemHandle(peer.memory);
      if (peer.written != nullptr) cudaEventDestroy(peer.written);
      if (peer.taken != nullptr) cudaEventDestroy(peer.taken);
    }
  }

  Status open() {
    Peer& own = peers_[static_cast<size_t>(rank_)];
    Card card = {};
    Status status = check(cudaMalloc(&own.memory, max_bytes_), "cudaMalloc");
    constexpr unsigned kFlags = cudaEventDisableTiming | cudaEventInterprocess;
    if (status.ok()) status = check(cudaEventCreateWithFlags(&own.written, kFlags), "cudaEventCreateWithFlags");
    if (status.ok()) status = check(cudaEventCreateWithFlags(&own.taken, kFlags), "cudaEventCreateWithFlags");
    if (status.ok()) status = check(cudaIpcGetMemHandle(&card.memory, own.memory), "cudaIpcGetMemHandle");
    if (status.ok()) status = check(cudaIpcGetEventHandle(&card.written, own.written), "cudaIpcGetEventHandle");
    if (status.ok()) status = check(cudaIpcGetEventHandle(&card.taken, own.taken), "cudaIpcGetEventHandle");
    std::vector<Card> cards(peers_.size());
    const Status met = gather_(&card, sizeof(card), cards.data());
    if (status.ok()) status = met;
    for (size_t i = 0; status.ok() && i < peers_.size(); ++i) {
      if (static_cast<int>(i) == rank_) continue;
      status = check(cudaIpcOpenMemHandle(&peers_[i].memory, cards[i].memory, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
      if (status.ok()) status = check(cudaIpcOpenEventHandle(&peers_[i].written, cards[i].written), "cudaIpcOpenEventHandle");
      if (status.ok()) status = check(cudaIpcOpenEventHandle(&peers_[i].taken, cards[i].taken), "cudaIpcOpenEventHandle");
    }
    return agree(status);
  }

  const char* name() const override { return "ipc"; }

  Status all_reduce(void* buffer, int64_t count, DType dtype, Reduction reduction, cudaStream_t stream) override {
    const size_t bytes = static_cast<size_t>(count) * bytes_of(dtype);
    if (bytes_of(dtype) == 0 || bytes > max_bytes_) {
      return Status::Error(Code::kInvalidArgument, std::to_string(count) + " elements do not fit the shared buffer of " +
                                                       std::to_string(max_bytes_) + " bytes, or are no floats; divide or cast them");
    }
    const Peer& own = peers_[static_cast<size_t>(rank_)];
    Status status;
    for (const Peer& peer : peers_) {  // the last operation's readers of this rank's memory
      if (status.ok() && used_) status = check(cudaStreamWaitEvent(stream, peer.taken, 0), "cudaStreamWaitEvent");
    }
    if (status.ok()) status = check(cudaMemcpyAsync(own.memory, buffer, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    if (status.ok()) status = check(cudaEventRecord(own.written, stream), "cudaEventRecord");
    status = agree(status);
    std::vector<const void*> sources;
    for (const Peer& peer : peers_) {
      if (status.ok()) status = check(cudaStreamWaitEvent(stream, peer.written, 0), "cudaStreamWaitEvent");
      sources.push_back(peer.memory);
    }
    if (status.ok()) status = check(reduce(sources, buffer, count, dtype, reduction, stream), "the kernel that adds");
    if (status.ok()) status = check(cudaEventRecord(own.taken, stream), "cudaEventRecord");
    used_ = true;
    return agree(status);
  }

  void abandon() override {}  // streams wait only for what was recorded before, and a lost rank's events come when its process ends

 private:
  struct Peer {
    void* memory = nullptr;
    cudaEvent_t written = nullptr;
    cudaEvent_t taken = nullptr;
  };

  // Meets the other ranks; an error of one is an error of all, so that nobody waits for who has given up.
  Status agree(const Status& status) {
    const auto mine = static_cast<int32_t>(status.code);
    std::vector<int32_t> all(peers_.size());
    const Status met = gather_(&mine, sizeof(mine), all.data());
    if (!status.ok() || !met.ok()) return status.ok() ? met : status;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == 0) continue;
      return Status::Error(Code::kUnavailable, "rank " + std::to_string(i) + " had an error of its GPU; look at its log");
    }
    return Status::Ok();
  }

  const int rank_;
  const size_t max_bytes_;
  const DeviceGather gather_;
  std::vector<Peer> peers_;  // by rank, this one too
  bool used_ = false;
};

}  // namespace

Status check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return Status::Ok();
  return Status::Error(Code::kUnavailable, std::string(call) + " failed: " + cudaGetErrorString(error));
}

Status open_ipc(int rank, int size, size_t max_bytes, DeviceGather gather, std::unique_ptr<DeviceTransport>* transport) {
  auto made = std::make_unique<IpcTransport>(rank, size, max_bytes, std::move(gather));
  const Status status = made->open();
  if (status.ok()) *transport = std::move(made);
  return status;
}

}  // namespace whale::cuda
