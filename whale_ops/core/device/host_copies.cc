#include <cstdlib>
#include <cstring>
#include <string>

#include "whale_ops/core/device/staged.h"

namespace whale {
namespace {

// The copies of a rank whose "device" is the processor: TensorFlow's CPU kernels have written their
// results when they end, so there is nothing to wait for.
class HostCopies final : public DeviceCopies {
 public:
  const char* kind() const override { return "CPU"; }
  Status mark(void*, void** mark) override {
    *mark = new char();  // only its address matters
    return Status::Ok();
  }
  void release(void* mark) override { delete static_cast<char*>(mark); }
  Status finished(void*, bool* yes) override {
    *yes = true;
    return Status::Ok();
  }
  Status host_memory(size_t bytes, std::shared_ptr<void>* memory) override {
    constexpr size_t kAlignmentBytes = 64;
    memory->reset(std::aligned_alloc(kAlignmentBytes, (bytes + kAlignmentBytes - 1) /
                                                          kAlignmentBytes * kAlignmentBytes),
                  std::free);
    return *memory != nullptr
               ? Status::Ok()
               : Status::Error(Code::kUnavailable,
                               "the host has no memory left for an exchange's buffer of " +
                                   std::to_string(bytes) +
                                   " bytes; lower communication.bucket_bytes");
  }
  Status copy(const std::vector<DeviceCopy>& copies, bool, void*, void** mark) override {
    for (const DeviceCopy& one : copies) {
      for (size_t row = 0; row < one.rows && one.width > 0; ++row) {
        std::memcpy(static_cast<char*>(one.to) + row * one.to_pitch,
                    static_cast<const char*>(one.from) + row * one.from_pitch, one.width);
      }
    }
    return *mark == nullptr ? this->mark(nullptr, mark) : Status::Ok();
  }
  void drain() override {}
};

}  // namespace

std::unique_ptr<DeviceCopies> host_copies() { return std::make_unique<HostCopies>(); }

}  // namespace whale
