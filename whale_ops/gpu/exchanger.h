// Implements whale::Device for a GPU: exchanges tensors in its memory, in parallel with the
// computation.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/kernels.h"
#include "whale_ops/gpu/marks.h"
#include "whale_ops/gpu/transport.h"

namespace whale::cuda {

// Packs, sends and unpacks on a stream of its own. An operation is reported as done when its event
// has completed, so that the computation goes on meanwhile, or, with `let_wait`, as soon as the
// computation's stream has been made to wait for that event. A mark is an event: first on the
// computation's stream, and on this object's stream once the operation is queued. An all-reduce of
// a single tensor that needs no conversion is not packed.
class Exchanger final : public Device {
 public:
  // `buffer_bytes`: size of the buffer for packed tensors; longer all-reduces are cut into parts.
  static Status open(std::unique_ptr<DeviceTransport> transport, const Gpu& gpu,
                     size_t buffer_bytes, std::unique_ptr<Exchanger>* exchanger);
  ~Exchanger() override;

  const char* kind() const override { return "GPU"; }
  Status mark(void* stream, void** mark) override { return marks_.mark(stream, mark); }
  void release(void* mark) override { marks_.release(mark); }
  Status launch(const DeviceOperation& what, void* mark) override;
  Status finished(void* mark, bool* yes) override {
    const Status status = Marks::finished(mark, yes);
    return status.ok() && !*yes ? transport_->failure() : status;
  }
  bool orders_streams() const override { return true; }
  Status let_wait(void* stream, void* mark) override;
  void abandon() override;

 private:
  explicit Exchanger(const Gpu& gpu) : gpu_(gpu), marks_(gpu) {}
  Status all_reduce(const DeviceOperation& what);
  Status packed(const DeviceOperation& what, const std::vector<DeviceTensor>& chunk);

  std::unique_ptr<DeviceTransport> transport_;
  const Gpu& gpu_;
  size_t buffer_bytes_ = 0;
  CUdeviceptr buffer_ = 0;
  CUstream stream_ = nullptr;
  Marks marks_;
};

}  // namespace whale::cuda
