#include "whale_ops/gpu/driver.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <vector>

#include "whale_ops/gpu/kernels.h"

namespace whale::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

Driver* driver_calls() {
  // Never destroyed, because TensorFlow's threads may still use it while the process exits.
  static auto* driver = new Driver();
  return driver;
}

Status load_calls() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return Status::Error(
        Code::kUnavailable,
        std::string("NVIDIA's driver was not found: ") + (error == nullptr ? kLibrary : error) +
            "; install it, or start the container with its runtime (docker run --gpus all)");
  }
#define WHALE_DRIVER_CALL(name, symbol, arguments)                                             \
  *reinterpret_cast<void**>(&driver_calls()->name) = dlsym(library, symbol);                   \
  if (driver_calls()->name == nullptr) {                                                       \
    return Status::Error(Code::kUnavailable, std::string("NVIDIA's driver has no ") + symbol + \
                                                 "; install version 525 or newer");            \
  }
  WHALE_DRIVER_CALLS(WHALE_DRIVER_CALL)
#undef WHALE_DRIVER_CALL
  return check(driver().cuInit(0), "cuInit");
}

struct Gpus {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Gpu>> at;
};

Gpus& gpus() {
  static auto* made = new Gpus();
  return *made;
}

}  // namespace

Status load_driver() {
  static const auto* status = new Status(load_calls());
  return *status;
}

const Driver& driver() { return *driver_calls(); }

Status check(CUresult error, const char* call) {
  if (error == kSuccess) return Status::Ok();
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(error, &name);
  driver().cuGetErrorString(error, &text);
  return Status::Error(Code::kUnavailable,
                       std::string(call) + " failed: " +
                           (name == nullptr ? "error " + std::to_string(error) : name) +
                           (text == nullptr ? "" : std::string(" (") + text + ")"));
}

Status Gpu::find_locked(int ordinal, Gpu** gpu) {
  std::unique_ptr<Gpu>& known = gpus().at[ordinal];
  if (known == nullptr) {
    auto made = std::make_unique<Gpu>();
    CUdevice device = 0;
    Status status = load_driver();
    if (status.ok()) status = check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
    if (status.ok())
      status = check(driver().cuDevicePrimaryCtxRetain(&made->context_, device),
                     "cuDevicePrimaryCtxRetain");
    if (!status.ok()) return status;
    known = std::move(made);
  }
  *gpu = known.get();
  return Status::Ok();
}

Status Gpu::find(int ordinal, const Gpu** gpu) {
  const std::lock_guard<std::mutex> lock(gpus().mutex);
  Gpu* found = nullptr;
  const Status status = find_locked(ordinal, &found);
  if (status.ok()) *gpu = found;
  return status;
}

Status Gpu::load_kernels(int ordinal, const void* image) {
  const std::lock_guard<std::mutex> lock(gpus().mutex);
  Gpu* gpu = nullptr;
  Status status = find_locked(ordinal, &gpu);
  if (!status.ok() || !gpu->kernels_.empty()) return status;
  const Current current(*gpu);
  CUmodule module = nullptr;
  std::map<std::string, CUfunction> found;
  status = current.status();
  if (status.ok()) status = check(driver().cuModuleLoadData(&module, image), "cuModuleLoadData");
  // Loads all kernels now: a driver that loads a kernel on first use may wait for running kernels,
  // and these may wait for other ranks.
  for (const std::string& name : kernel_names()) {
    if (status.ok())
      status = check(driver().cuModuleGetFunction(&found[name], module, name.c_str()),
                     "cuModuleGetFunction");
  }
  if (status.ok()) gpu->kernels_ = std::move(found);
  return status;
}

Status Gpu::kernel(const std::string& name, CUfunction* found) const {
  const auto known = kernels_.find(name);
  if (known == kernels_.end()) {
    return Status::Error(Code::kInternal, "no machine code of the kernel " + name +
                                              " was loaded for this GPU; report this");
  }
  *found = known->second;
  return Status::Ok();
}

Status Gpu::create_stream(CUstream* stream) const {
  int least = 0, greatest = 0;
  const Status status =
      check(driver().cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  return status.ok()
             ? check(driver().cuStreamCreateWithPriority(stream, kStreamNonBlocking, greatest),
                     "cuStreamCreateWithPriority")
             : status;
}

}  // namespace whale::cuda
