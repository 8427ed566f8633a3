#include "whale_ops/gpu/copies.h"

#include "whale_ops/gpu/marks.h"
#include "whale_ops/gpu/queue.h"

namespace whale::cuda {
namespace {

// A stream for each direction, since GPUs have a copy engine for each, which work in parallel.
class Copies final : public DeviceCopies {
 public:
  explicit Copies(const Gpu& gpu) : gpu_(gpu), marks_(gpu) {}
  ~Copies() override {
    for (CUstream stream : streams_) {
      if (stream != nullptr) driver().cuStreamDestroy(stream);
    }
  }

  Status open() {
    const Current current(gpu_);
    Status status = current.status();
    for (CUstream& stream : streams_) {
      if (status.ok()) status = gpu_.create_stream(&stream);
    }
    return status;
  }

  const char* kind() const override { return "GPU"; }
  Status mark(void* stream, void** mark) override { return marks_.mark(stream, mark); }
  void release(void* mark) override { marks_.release(mark); }
  Status finished(void* mark, bool* yes) override { return Marks::finished(mark, yes); }

  Status host_memory(size_t bytes, std::shared_ptr<void>* memory) override {
    void* made = nullptr;
    const Current current(gpu_);
    Status status = current.status();
    if (status.ok()) status = check(driver().cuMemHostAlloc(&made, bytes, 0), "cuMemHostAlloc");
    if (status.ok()) {
      memory->reset(made, [gpu = &gpu_](void* data) {
        const Current of_gpu(*gpu);
        driver().cuMemFreeHost(data);
      });
    }
    return status;
  }

  Status copy(const std::vector<DeviceCopy>& copies, bool out, void* after, void** mark) override {
    CUstream stream = streams_[out];
    const Current current(gpu_);
    Status status = current.status();
    if (status.ok() && after != nullptr)
      status = check(driver().cuStreamWaitEvent(stream, static_cast<CUevent>(after), 0),
                     "cuStreamWaitEvent");
    for (const DeviceCopy& one : copies) {
      if (status.ok()) status = queue_copy(one, stream);
    }
    if (!status.ok()) return status;
    if (*mark == nullptr) return marks_.mark(stream, mark);
    return check(driver().cuEventRecord(static_cast<CUevent>(*mark), stream), "cuEventRecord");
  }

  void drain() override {
    for (CUstream stream : streams_) {
      if (stream != nullptr) driver().cuStreamSynchronize(stream);
    }
  }

 private:
  const Gpu& gpu_;
  Marks marks_;
  CUstream streams_[2] = {nullptr, nullptr};  // into the GPU's memory, out of it
};

}  // namespace

Status open_copies(int ordinal, std::unique_ptr<DeviceCopies>* copies) {
  const Gpu* gpu = nullptr;
  Status status = Gpu::find(ordinal, &gpu);
  if (!status.ok()) return status;
  auto made = std::make_unique<Copies>(*gpu);
  status = made->open();
  if (status.ok()) *copies = std::move(made);
  return status;
}

}  // namespace whale::cuda
