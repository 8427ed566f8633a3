#include "whale_ops/cuda/copies.h"

#include "whale_ops/cuda/marks.h"
#include "whale_ops/cuda/transport.h"

namespace whale::cuda {
namespace {

// A stream for each direction: GPUs have an engine for each, which copy at the same time.
class Copies final : public DeviceCopies {
 public:
  explicit Copies(int ordinal) : ordinal_(ordinal), marks_(ordinal) {}
  ~Copies() override {
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  Status open() {
    Status status = check(cudaSetDevice(ordinal_), "cudaSetDevice");
    int lowest = 0, highest = 0;
    if (status.ok()) status = check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    for (cudaStream_t& stream : streams_) {
      if (status.ok()) status = check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    }
    return status;
  }

  const char* kind() const override { return "GPU"; }
  Status mark(void* stream, void** mark) override { return marks_.mark(stream, mark); }
  void release(void* mark) override { marks_.release(mark); }
  Status finished(void* mark, bool* yes) override { return Marks::finished(mark, yes); }

  Status host_memory(size_t bytes, std::shared_ptr<void>* memory) override {
    void* made = nullptr;
    Status status = check(cudaSetDevice(ordinal_), "cudaSetDevice");
    if (status.ok()) status = check(cudaHostAlloc(&made, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    if (status.ok()) memory->reset(made, [](void* data) { cudaFreeHost(data); });
    return status;
  }

  Status copy(const std::vector<DeviceCopy>& copies, bool out, void* after, void** mark) override {
    cudaStream_t stream = streams_[out];
    Status status = check(cudaSetDevice(ordinal_), "cudaSetDevice");
    if (status.ok() && after != nullptr) status = check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(after), 0), "cudaStreamWaitEvent");
    for (const DeviceCopy& one : copies) {
      if (!status.ok() || one.width == 0 || one.rows == 0) continue;
      // The directions follow from the addresses: those of the host's memory are of `host_memory`.
      status = one.rows == 1 ? check(cudaMemcpyAsync(one.to, one.from, one.width, cudaMemcpyDefault, stream), "cudaMemcpyAsync")
                             : check(cudaMemcpy2DAsync(one.to, one.to_pitch, one.from, one.from_pitch, one.width, one.rows, cudaMemcpyDefault, stream),
                                     "cudaMemcpy2DAsync");
    }
    if (!status.ok()) return status;
    if (*mark == nullptr) return marks_.mark(stream, mark);
    return check(cudaEventRecord(static_cast<cudaEvent_t>(*mark), stream), "cudaEventRecord");
  }

  void drain() override {
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamSynchronize(stream);
    }
  }

 private:
  const int ordinal_;
  Marks marks_;
  cudaStream_t streams_[2] = {nullptr, nullptr};  // into the GPU's memory, out of it
};

}  // namespace

Status open_copies(int ordinal, std::unique_ptr<DeviceCopies>* copies) {
  auto made = std::make_unique<Copies>(ordinal);
  const Status status = made->open();
  if (status.ok()) *copies = std::move(made);
  return status;
}

}  // namespace whale::cuda
