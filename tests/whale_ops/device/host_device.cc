// A device whose memory is the host's, for tests of everything around a device's library (core/device/device.h): TensorFlow's CPU is its
// device. A reduction meets the other ranks through the gathering that it is given, as CUDA IPC does, and is done some time later, as
// a stream's would be. What the ranks launch as their n-th reduction must be the same on all.
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <string>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/device/device.h"

#ifndef WHALE_CORE_DIGEST  // what the headers are: nothing to compare with in a program of one compilation
#define WHALE_CORE_DIGEST ""
#endif

namespace {

using whale::Code;
using whale::DeviceReduction;
using whale::DType;
using whale::Status;

struct Mark {
  int64_t finished_ns = 0;
};

struct Header {
  int64_t number, tensors, elements;
  int32_t dtype, wire, reduction, refused;
};

size_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

class HostDevice final : public whale::Device {
 public:
  HostDevice(int rank, int size, size_t buffer_bytes, whale::DeviceGather gather, std::string fault)
      : rank_(rank), size_(size), buffer_bytes_(buffer_bytes), gather_(std::move(gather)), fault_(std::move(fault)), draw_(rank) {}
  ~HostDevice() override {
    if (!marks_.empty()) std::terminate();  // a mark was not given back
  }

  const char* kind() const override { return fault_ == "elsewhere" ? "GPU" : "CPU"; }

  Status mark(void*, void** mark) override {
    if (fault_ == "mark" && rank_ == 1) return Status::Error(Code::kUnavailable, "no mark can be made");
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* made = new Mark();
    marks_.insert(made);
    *mark = made;
    return Status::Ok();
  }
  void release(void* mark) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    marks_.erase(static_cast<Mark*>(mark));
    delete static_cast<Mark*>(mark);
  }
  Status launch(const DeviceReduction& what, void* mark) override {
    if (fault_ == "launch" && rank_ == 1) return Status::Error(Code::kUnavailable, "nothing can be launched");
    for (const DeviceReduction& chunk : whale::in_chunks(what, bytes_of(what.dtype), static_cast<int64_t>(buffer_bytes_ / bytes_of(what.wire)))) {
      const Status status = reduce(chunk);
      if (!status.ok()) return status;
    }
    // "hang": it never is, as a kernel of NCCL's when another rank is gone.
    const int64_t later_ns = std::uniform_int_distribution<int64_t>(0, 300'000)(draw_);
    static_cast<Mark*>(mark)->finished_ns = fault_ == "hang" ? INT64_MAX : whale::now_ns() + later_ns;
    return Status::Ok();
  }
  Status finished(void* mark, bool* yes) override {
    *yes = whale::now_ns() >= static_cast<Mark*>(mark)->finished_ns;
    return fault_ == "finish" && rank_ == 1 ? Status::Error(Code::kUnavailable, "the device has fallen off the bus") : Status::Ok();
  }
  void abandon() override {}

 private:
  Status reduce(const DeviceReduction& chunk) {
    const size_t bytes = bytes_of(chunk.dtype), wire_bytes = bytes_of(chunk.wire);
    Header header = {number_++, static_cast<int64_t>(chunk.tensors.size()), 0, static_cast<int32_t>(chunk.dtype),
                     static_cast<int32_t>(chunk.wire), static_cast<int32_t>(chunk.reduction), 0};
    for (const auto& tensor : chunk.tensors) header.elements += tensor.count;
    const auto elements = static_cast<size_t>(header.elements);
    if (elements * wire_bytes > buffer_bytes_) return Status::Error(Code::kInternal, "a part is larger than the buffer");
    std::string packed(sizeof(Header) + elements * wire_bytes, '\0'), all(packed.size() * static_cast<size_t>(size_), '\0');
    std::memcpy(packed.data(), &header, sizeof(Header));
    char* to = packed.data() + sizeof(Header);
    for (const auto& tensor : chunk.tensors) {
      const auto count = static_cast<size_t>(tensor.count);
      if (chunk.wire == chunk.dtype) {
        std::memcpy(to, tensor.input, count * bytes);
      } else {
        whale::narrow_floats(chunk.wire, static_cast<const float*>(tensor.input), to, count);
      }
      to += count * wire_bytes;
    }
    Status status = gather_(packed.data(), packed.size(), all.data());
    if (!status.ok()) return status;
    std::vector<std::string> parts;  // aligned
    std::vector<whale::Term> terms;
    for (size_t begin = 0; begin < all.size(); begin += packed.size()) {
      if (std::memcmp(all.data() + begin, &header, sizeof(Header)) != 0) return Status::Error(Code::kInternal, "ranks launch different reductions");
      parts.push_back(all.substr(begin + sizeof(Header), packed.size() - sizeof(Header)));
    }
    for (const std::string& part : parts) terms.push_back({part.data(), false});
    std::string sum(parts[0].size(), '\0');
    whale::reduce(chunk.wire, chunk.reduction, sum.data(), false, terms, elements);
    const char* from = sum.data();
    for (const auto& tensor : chunk.tensors) {
      const auto count = static_cast<size_t>(tensor.count);
      if (chunk.wire == chunk.dtype) {
        std::memcpy(tensor.output, from, count * bytes);
      } else {
        whale::widen_floats(chunk.wire, from, static_cast<float*>(tensor.output), count);
      }
      from += count * wire_bytes;
    }
    return status;
  }

  const int rank_, size_;
  const size_t buffer_bytes_;
  const whale::DeviceGather gather_;
  const std::string fault_;
  std::mt19937 draw_;
  int64_t number_ = 0;
  std::mutex mutex_;
  std::set<Mark*> marks_;
};

Status count(int* devices) {
  *devices = 1;
  return Status::Ok();
}

// `transport`: which fault the device shall have, on the second rank where it is one rank's.
Status open(const char* transport, int rank, int size, int, size_t buffer_bytes, whale::DeviceGather gather, std::unique_ptr<whale::Device>* device) {
  if (std::strcmp(transport, "open") == 0 && rank == 1) return Status::Error(Code::kUnavailable, "no such device");
  std::string own(1, 'x'), all(static_cast<size_t>(size), '\0');
  const Status status = gather(own.data(), 1, all.data());  // as handles and identifiers are exchanged
  if (status.ok()) *device = std::make_unique<HostDevice>(rank, size, buffer_bytes, std::move(gather), transport);
  return status;
}

}  // namespace

extern "C" {

WHALE_EXPORT extern const whale::DevicePlugin whale_device_plugin;
const whale::DevicePlugin whale_device_plugin = {WHALE_CORE_DIGEST, count, open};

}  // extern "C"
