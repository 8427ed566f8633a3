// What this library exports: to the core (whale_device_plugin), to whale_ops/device_library.py (the
// GPUs' capabilities, loading of kernels), and to the programs of tests/whale_ops/gpu, which run
// without TensorFlow: single kernels, and one rank with one GPU, a stream for its computation, and
// host exchanges by callback. Functions return a status code (core/base/types.h);
// whale_cuda_last_error() returns the message.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "whale_ops/gpu/copies.h"
#include "whale_ops/gpu/exchanger.h"
#include "whale_ops/gpu/queue.h"

#define WHALE_QUOTED(text) #text
#define WHALE_TEXT(text) WHALE_QUOTED(text)

namespace {

using whale::Code;
using whale::DType;
using whale::Status;
using whale::cuda::check;
using whale::cuda::CUdeviceptr;
using whale::cuda::CUevent;
using whale::cuda::Current;
using whale::cuda::CUstream;
using whale::cuda::driver;
using whale::cuda::Gpu;

thread_local std::string last_error;

int report(const Status& status) {
  last_error = status.message;
  return static_cast<int>(status.code);
}

struct Rank {
  const Gpu* gpu = nullptr;
  std::unique_ptr<whale::Device> device;
  CUstream computation = nullptr;
  int number = 0, size = 0;
};

Status count(int* devices) {
  const Status status = whale::cuda::load_driver();
  return status.ok() ? check(driver().cuDeviceGetCount(devices), "cuDeviceGetCount") : status;
}

Status open(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes,
            whale::DeviceGather gather, const whale::DeviceFailure& failure,
            std::unique_ptr<whale::Device>* device) {
  const Gpu* gpu = nullptr;
  Status status = Gpu::find(ordinal, &gpu);
  if (!status.ok()) return status;
  const Current current(*gpu);
  std::unique_ptr<whale::cuda::DeviceTransport> opened;
  std::unique_ptr<whale::cuda::Exchanger> exchanger;
  status = current.status();
  if (!status.ok()) return status;
  if (std::strcmp(transport, "cuda-ipc") == 0) {
    status =
        whale::cuda::open_ipc(*gpu, rank, size, buffer_bytes, std::move(gather), failure, &opened);
  } else if (std::strcmp(transport, "nccl") == 0) {
    status = whale::cuda::open_nccl(rank, size, std::move(gather), failure, &opened);
  } else {
    status = Status::Error(Code::kInvalidArgument, std::string("GPUs exchange through nccl, ") +
                                                       "cuda-ipc or pinned, not through '" +
                                                       transport + "'");
  }
  if (status.ok())
    status = whale::cuda::Exchanger::open(std::move(opened), *gpu, buffer_bytes, &exchanger);
  if (status.ok()) *device = std::move(exchanger);
  return status;
}

// GPU memory filled with values of the host, for as long as this object lives. Each array is an
// allocation of its exact size, so that compute-sanitizer detects accesses beyond it.
class Arrays {
 public:
  explicit Arrays(CUstream stream) : stream_(stream) {}
  ~Arrays() {
    driver().cuStreamSynchronize(stream_);
    for (const CUdeviceptr data : memory_) driver().cuMemFree(data);
  }
  void* place(const void* from, size_t bytes) {
    CUdeviceptr made = 0;
    if (status.ok())
      status = check(driver().cuMemAlloc(&made, std::max<size_t>(bytes, 1)), "cuMemAlloc");
    if (status.ok()) memory_.push_back(made);
    auto* to = reinterpret_cast<void*>(made);
    if (status.ok() && from != nullptr) status = whale::cuda::queue_copy(to, from, bytes, stream_);
    return to;
  }
  void take(void* to, const void* from, size_t bytes) {
    if (status.ok()) status = whale::cuda::queue_copy(to, from, bytes, stream_);
  }
  void wait() {
    if (status.ok()) status = check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

  Status status;

 private:
  const CUstream stream_;
  std::vector<CUdeviceptr> memory_;
};

size_t bytes_of(int dtype) { return whale::cuda::bytes_of(static_cast<DType>(dtype)); }

// Runs `body(gpu, stream, arrays)` with the GPU's context current, on a new stream.
template <typename Body>
int on_gpu(int ordinal, const Body& body) {
  const Gpu* gpu = nullptr;
  Status status = Gpu::find(ordinal, &gpu);
  if (!status.ok()) return report(status);
  const Current current(*gpu);
  CUstream stream = nullptr;
  status = current.status().ok() ? gpu->create_stream(&stream) : current.status();
  if (!status.ok()) return report(status);
  {
    Arrays arrays(stream);
    body(*gpu, stream, &arrays);
    arrays.wait();
    status = arrays.status;
  }
  driver().cuStreamDestroy(stream);
  return report(status);
}

}  // namespace

extern "C" {

WHALE_EXPORT extern const whale::DevicePlugin whale_device_plugin;
const whale::DevicePlugin whale_device_plugin = {WHALE_TEXT(WHALE_CORE_DIGEST), count, open,
                                                 whale::cuda::open_copies};

using WhaleCudaGather = int (*)(const void* mine, size_t bytes, void* all);

// Has the same layout as the structure in tests/whale_ops/gpu/cuda_rank.py. Tensors are in host
// memory.
struct WhaleCudaOperation {
  int32_t kind, root, dtype, wire, reduction, repeats;
  float scale;
  int32_t backwards;  // the group is all ranks in reverse order
  int64_t element_bytes, largest, tensors_size, counts_size;
  void** inputs;  // of each tensor
  void** outputs;
  const int64_t* input_counts;  // elements
  const int64_t* output_counts;
  const int64_t* counts;  // as in whale::DeviceOperation
  const int64_t* recv_counts;
  double limit_s;  // seconds after which the device is told to give up; 0: never
  // Seconds of one of `repeats` operations, from the start of the first to the end of the last; an
  // output.
  double seconds;
};

WHALE_EXPORT const char* whale_cuda_last_error() { return last_error.c_str(); }

WHALE_EXPORT int whale_cuda_devices(int* count) { return report(::count(count)); }

WHALE_EXPORT int whale_cuda_device_name(int ordinal, char* name, int bytes) {
  whale::cuda::CUdevice device = 0;
  Status status = whale::cuda::load_driver();
  if (status.ok()) status = check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  if (status.ok()) status = check(driver().cuDeviceGetName(name, bytes, device), "cuDeviceGetName");
  return report(status);
}

// Returns the compute capability, such as 9 and 0 for an H100.
WHALE_EXPORT int whale_cuda_capability(int ordinal, int* major, int* minor) {
  whale::cuda::CUdevice device = 0;
  Status status = whale::cuda::load_driver();
  if (status.ok()) status = check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  if (status.ok())
    status = check(driver().cuDeviceGetAttribute(major, whale::cuda::kCapabilityMajor, device),
                   "cuDeviceGetAttribute");
  if (status.ok())
    status = check(driver().cuDeviceGetAttribute(minor, whale::cuda::kCapabilityMinor, device),
                   "cuDeviceGetAttribute");
  return report(status);
}

// Loads kernels onto a GPU. `image`: machine code of kernels.cu for that GPU, or PTX that ends with
// a zero.
WHALE_EXPORT int whale_cuda_load_kernels(int ordinal, const void* image) {
  return report(Gpu::load_kernels(ordinal, image));
}

// The following run single kernels on arrays of the host. `repeats`: how often to run each one;
// `seconds`: the time that one run takes.
WHALE_EXPORT int whale_cuda_copy(int ordinal, int packs, void** tensors, const int64_t* counts,
                                 int size, int tensor, void* buffer, int dtype, float scale,
                                 int repeats, double* seconds) {
  return on_gpu(ordinal, [&](const Gpu& gpu, CUstream stream, Arrays* arrays) {
    std::vector<whale::cuda::Span> spans;
    size_t elements = 0;
    for (int i = 0; i < size; ++i) {
      spans.push_back({arrays->place(tensors[i], static_cast<size_t>(counts[i]) * bytes_of(tensor)),
                       counts[i]});
      elements += static_cast<size_t>(counts[i]);
    }
    void* packed = arrays->place(buffer, elements * bytes_of(dtype));
    const auto run = [&] {
      if (!arrays->status.ok()) return;
      arrays->status = packs != 0 ? pack(gpu, spans, static_cast<DType>(tensor), packed,
                                         static_cast<DType>(dtype), scale, stream)
                                  : unpack(gpu, packed, static_cast<DType>(dtype), spans,
                                           static_cast<DType>(tensor), scale, stream);
    };
    run();
    arrays->wait();
    const int64_t start_ns = whale::now_ns();
    for (int i = 1; i < repeats; ++i) run();
    arrays->wait();
    *seconds = static_cast<double>(whale::now_ns() - start_ns) * 1e-9 / std::max(1, repeats - 1);
    if (packs != 0) arrays->take(buffer, packed, elements * bytes_of(dtype));
    for (int i = 0; packs == 0 && i < size; ++i)
      arrays->take(tensors[i], spans[static_cast<size_t>(i)].data,
                   static_cast<size_t>(counts[i]) * bytes_of(tensor));
  });
}

WHALE_EXPORT int whale_cuda_reduce(int ordinal, void** sources, int size, void* dst, int64_t count,
                                   int dtype, int reduction, int repeats, double* seconds) {
  return on_gpu(ordinal, [&](const Gpu& gpu, CUstream stream, Arrays* arrays) {
    const size_t bytes = static_cast<size_t>(count) * bytes_of(dtype);
    std::vector<const void*> all;
    for (int i = 0; i < size; ++i) all.push_back(arrays->place(sources[i], bytes));
    void* result = arrays->place(nullptr, bytes);
    const auto run = [&] {
      if (arrays->status.ok()) {
        arrays->status = whale::cuda::reduce(gpu, all, result, count, static_cast<DType>(dtype),
                                             static_cast<whale::Reduction>(reduction), stream);
      }
    };
    run();
    arrays->wait();
    const int64_t start_ns = whale::now_ns();
    for (int i = 1; i < repeats; ++i) run();
    arrays->wait();
    *seconds = static_cast<double>(whale::now_ns() - start_ns) * 1e-9 / std::max(1, repeats - 1);
    arrays->take(dst, result, bytes);
  });
}

// Copies `rows` rows of `width` bytes from the host to a GPU, where a row begins every `pitch`
// bytes, and back to the host.
WHALE_EXPORT int whale_cuda_rows(int ordinal, void* host, size_t width, size_t pitch, size_t rows) {
  return on_gpu(ordinal, [&](const Gpu&, CUstream stream, Arrays* arrays) {
    auto* device = static_cast<char*>(arrays->place(nullptr, pitch * (rows - 1) + width));
    const whale::DeviceCopy in{host, device, width, pitch, width, rows},
        out{device, host, pitch, width, width, rows};
    if (arrays->status.ok()) arrays->status = whale::cuda::queue_copy(in, stream);
    arrays->wait();
    std::memset(host, 0, width * rows);
    if (arrays->status.ok()) arrays->status = whale::cuda::queue_copy(out, stream);
  });
}

// Copies `bytes` bytes from pinned host memory to the GPU and back, as `rows` runs with an element
// of two bytes between them; returns the seconds of each direction. What comes back is written to
// `host`.
WHALE_EXPORT int whale_cuda_pinned(int ordinal, void* host, size_t bytes, int rows,
                                   double* seconds) {
  return on_gpu(ordinal, [&](const Gpu&, CUstream, Arrays* arrays) {
    std::unique_ptr<whale::DeviceCopies> copies;
    std::shared_ptr<void> from, back;
    const size_t width = bytes / static_cast<size_t>(rows), pitch = width + 2;
    auto* device = static_cast<char*>(arrays->place(nullptr, pitch * static_cast<size_t>(rows)));
    const auto step = [&](const Status& status) {
      if (arrays->status.ok()) arrays->status = status;
      return arrays->status.ok();
    };
    if (!step(whale::cuda::open_copies(ordinal, &copies)) ||
        !step(copies->host_memory(bytes, &from)) || !step(copies->host_memory(bytes, &back)))
      return;
    std::memcpy(from.get(), host, bytes);
    const whale::DeviceCopy in{from.get(), device, width, pitch, width, static_cast<size_t>(rows)},
        out{device, back.get(), pitch, width, width, static_cast<size_t>(rows)};
    for (int repeat = 0; repeat < 2 && arrays->status.ok(); ++repeat) {
      for (const bool outwards : {false, true}) {
        const int64_t start_ns = whale::now_ns();
        void* mark = nullptr;
        bool finished = false;
        step(copies->copy({outwards ? out : in}, outwards, nullptr, &mark));
        while (arrays->status.ok() && !finished) step(copies->finished(mark, &finished));
        copies->release(mark);
        seconds[outwards] = static_cast<double>(whale::now_ns() - start_ns) * 1e-9;
      }
    }
    copies->drain();
    std::memcpy(host, back.get(), bytes);
  });
}

// Opens a transport; collective. `transport`: "nccl" or "cuda-ipc". The GPU's kernels must have
// been loaded.
WHALE_EXPORT int whale_cuda_open(const char* transport, int rank, int size, int ordinal,
                                 size_t buffer_bytes, WhaleCudaGather gather, void** handle) {
  const whale::DeviceGather exchange = [gather, size](const std::vector<int>& group,
                                                      const void* mine, size_t bytes, void* all) {
    std::vector<char> by_rank(static_cast<size_t>(size) * bytes);
    if (gather(mine, bytes, by_rank.data()) != 0)
      return Status::Error(Code::kUnavailable,
                           "the ranks could not meet on the host, where they prepare exchanges "
                           "between GPUs; look at the logs of all ranks");
    for (size_t i = 0; i < static_cast<size_t>(size); ++i) {
      const size_t member = group.empty() ? i : static_cast<size_t>(group[i]);
      std::memcpy(static_cast<char*>(all) + i * bytes, by_rank.data() + member * bytes, bytes);
    }
    return Status::Ok();
  };
  auto made = std::make_unique<Rank>();
  made->number = rank;
  made->size = size;
  Status status = Gpu::find(ordinal, &made->gpu);
  if (status.ok())
    status = open(
        transport, rank, size, ordinal, buffer_bytes, exchange, [] { return Status::Ok(); },
        &made->device);
  if (!status.ok()) return report(status);
  const Current current(*made->gpu);
  status = made->gpu->create_stream(&made->computation);
  if (status.ok()) *handle = made.release();
  return report(status);
}

// Copies tensors to the device, exchanges them there, and copies the results back, all on streams.
WHALE_EXPORT int whale_cuda_run(void* handle, WhaleCudaOperation* operation) {
  auto* rank = static_cast<Rank*>(handle);
  const Current current(*rank->gpu);
  whale::DeviceOperation what;
  what.kind = static_cast<whale::OpKind>(operation->kind);
  for (int i = 0; i < rank->size; ++i)
    what.group.push_back(operation->backwards != 0 ? rank->size - 1 - i : i);
  what.index = operation->backwards != 0 ? rank->size - 1 - rank->number : rank->number;
  what.root = operation->root;
  what.dtype = static_cast<DType>(operation->dtype);
  what.wire = static_cast<DType>(operation->wire);
  what.reduction = static_cast<whale::Reduction>(operation->reduction);
  what.scale = operation->scale;
  what.element_bytes = static_cast<size_t>(operation->element_bytes);
  what.counts.assign(operation->counts, operation->counts + operation->counts_size);
  what.recv_counts.assign(operation->recv_counts, operation->recv_counts + operation->counts_size);
  what.largest = operation->largest;
  Arrays arrays(rank->computation);
  for (int64_t i = 0; i < operation->tensors_size; ++i) {
    const void* input = arrays.place(
        operation->inputs[i], static_cast<size_t>(operation->input_counts[i]) * what.element_bytes);
    void* output = what.kind == whale::OpKind::kSend
                       ? nullptr
                       : arrays.place(nullptr, static_cast<size_t>(operation->output_counts[i]) *
                                                   what.element_bytes);
    what.tensors.push_back({input, output,
                            what.kind == whale::OpKind::kRecv ? operation->output_counts[i]
                                                              : operation->input_counts[i]});
  }
  arrays.wait();
  Status& status = arrays.status;
  void* mark = nullptr;
  if (status.ok()) status = rank->device->mark(rank->computation, &mark);
  const int64_t start_ns = whale::now_ns();
  const auto passed_s = [start_ns] {
    return static_cast<double>(whale::now_ns() - start_ns) * 1e-9;
  };
  for (int i = 0; i < operation->repeats && status.ok(); ++i)
    status = rank->device->launch(what, mark);
  for (bool finished = false; status.ok() && !finished;) {
    status = rank->device->finished(mark, &finished);
    if (status.ok() && !finished && operation->limit_s > 0 && passed_s() > operation->limit_s) {
      status = Status::Error(
          Code::kDeadlineExceeded,
          "the device gave up what was under way, since it took longer than its limit");
    }
    if (!status.ok()) rank->device->abandon();
  }
  operation->seconds = passed_s() / operation->repeats;
  rank->device->release(mark);
  for (int64_t i = 0; i < operation->tensors_size; ++i) {
    void* output = what.tensors[static_cast<size_t>(i)].output;
    if (output != nullptr)
      arrays.take(operation->outputs[i], output,
                  static_cast<size_t>(operation->output_counts[i]) * what.element_bytes);
  }
  arrays.wait();
  return report(status);
}

WHALE_EXPORT void whale_cuda_close(void* handle) {
  auto* rank = static_cast<Rank*>(handle);
  rank->device.reset();
  {
    const Current current(*rank->gpu);
    driver().cuStreamDestroy(rank->computation);
  }
  delete rank;
}

}  // extern "C"
