// Implements whale::Device for a GPU: exchanges tensors in its memory, in parallel with the
// computation.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/kernels.h"
#include "whale_ops/gpu/marks.h"
#include "whale_ops/gpu/transport.h"

namespace whale::cuda {

// Exchanges on a stream of its own. An operation is reported as done when its event has completed,
// so that the computation goes on meanwhile, or, with `let_wait`, as soon as the computation's
// stream has been made to wait for that event. A mark is an event: first on the computation's
// stream, and on one of this object's streams once the operation is queued. An all-reduce of a
// single tensor that needs no conversion is not packed. All others are packed on a second stream
// and unpacked on a third one, into two buffers in turn: while one is exchanged, the next is packed
// and the one before unpacked. Those that are small take less time than the streams' waiting for
// each other: they are packed, exchanged and unpacked on one stream, in a third, small buffer.
// Decision: 0210 (docs/decisions).
class Exchanger final : public Device {
 public:
  // `buffer_bytes`: size of each of the two buffers for packed tensors; longer all-reduces are cut
  // into parts.
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
  // A buffer for packed tensors, and when what was packed into it last has been unpacked.
  struct Buffer {
    CUdeviceptr memory = 0;
    CUevent free = nullptr;
  };
  // Queues an all-reduce; sets the stream whose next event comes after all of it.
  Status all_reduce(const DeviceOperation& what, CUevent mark, CUstream* last);
  // Queues a chunk of it through the next of the two buffers.
  Status reduce_in_turn(const DeviceOperation& what, const std::vector<DeviceTensor>& chunk,
                        CUevent mark);
  // Packs a chunk on one stream, exchanges it on stream_ and unpacks it on another one; each is
  // the same stream, or waits for the one before.
  Status reduce_packed(const DeviceOperation& what, const std::vector<DeviceTensor>& chunk,
                       CUdeviceptr memory, CUstream packing, CUstream unpacking);
  // Makes what is queued on `later` from now on come after what is queued on `earlier`.
  Status make_wait(CUstream later, CUstream earlier);
  void synchronize();

  std::unique_ptr<DeviceTransport> transport_;
  const Gpu& gpu_;
  size_t buffer_bytes_ = 0;
  std::array<Buffer, 2> buffers_;
  size_t turn_ = 0;  // of the buffers
  CUdeviceptr small_ = 0;
  CUstream stream_ = nullptr, packing_ = nullptr, unpacking_ = nullptr;
  CUevent behind_ = nullptr;  // recorded on one stream, and at once waited for by another
  Marks marks_;
};

}  // namespace whale::cuda
