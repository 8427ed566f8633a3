// NVIDIA's driver (libcuda.so.1, and as much of NVML as is asked of it) for GPUs that are the
// host's: whale_ops/gpu and whale_ops/gpu_driver.py use it as they use the real one. What is queued
// on streams happens later (streams.h); other processes map memory and share events as through CUDA
// IPC. Variables:
//
//   HOST_GPUS            the GPUs, as Settings says; the first two reach each other
//   HOST_GPU_INIT_ERROR  the code with which cuInit fails
//   CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER   as for CUDA
//
// Machine code is the text "HOST:" and the path of the library that kernels.cc makes.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include "tests/host_gpu/streams.h"

namespace host_gpu {
namespace {

constexpr size_t kMostPoisonedBytes = size_t{64} << 20, kUuidOctets = 16,
                 kMostPitchBytes = 0x7fffffff;

struct ManagedMemory {  // nvmlMemory_v2_t
  unsigned version = 0;
  unsigned long long total = 0, reserved = 0, free = 0, used = 0;
};

struct Memory {
  Gpu* gpu = nullptr;
  int file = -1;  // below 0: another process's
  size_t bytes = 0;
  bool is_shown = false;  // to other processes
};

// Never destroyed: threads of streams may still run while the process exits.
struct Memories {
  std::mutex mutex;
  std::map<char*, Memory> at;
};
Memories& memories() {
  static auto* all = new Memories();
  return *all;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

std::vector<std::unique_ptr<Gpu>> list_gpus() {
  std::vector<Settings> all;
  for (const std::string& one : split(variable("HOST_GPUS"), ',')) {
    const std::vector<std::string> parts = split(one, ':');
    Settings found;
    found.memory_bytes = std::strtoull(parts[0].c_str(), nullptr, 10);
    if (parts.size() > 1) found.slowness = std::atof(parts[1].c_str());
    if (parts.size() > 2) found.late_us = std::atoi(parts[2].c_str());
    if (parts.size() > 3) found.name = parts[3];
    if (parts.size() > 4) found.used_bytes = std::strtoull(parts[4].c_str(), nullptr, 10);
    found.place = static_cast<int>(all.size());
    all.push_back(std::move(found));
  }
  if (variable("CUDA_DEVICE_ORDER") != "PCI_BUS_ID") {
    std::stable_sort(all.begin(), all.end(),
                     [](const Settings& a, const Settings& b) { return a.slowness < b.slowness; });
  }
  std::vector<size_t> visible(all.size());
  std::iota(visible.begin(), visible.end(), size_t{0});
  if (const char* listed = std::getenv("CUDA_VISIBLE_DEVICES"); listed != nullptr) {
    visible.clear();
    for (const std::string& one : split(listed, ',')) {
      const int number = one.empty() ? -1 : std::atoi(one.c_str());
      if (number < 0 || number >= static_cast<int>(all.size())) break;
      visible.push_back(static_cast<size_t>(number));
    }
  }
  std::vector<std::unique_ptr<Gpu>> made;
  for (const size_t number : visible)
    made.push_back(std::make_unique<Gpu>(static_cast<int>(made.size()), all[number]));
  return made;
}

void* map(Gpu* gpu, int file, size_t bytes, bool own) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (made == MAP_FAILED) return nullptr;
  const std::lock_guard<std::mutex> lock(memories().mutex);
  memories().at[static_cast<char*>(made)] = {gpu, own ? file : -1, bytes, false};
  return made;
}

std::atomic<Fault> planted{Fault::kNone};
std::atomic<int64_t> host_waits{0}, in_calls_ns{0};
thread_local int calls = 0;  // one of NCCL's may have called the driver

}  // namespace

Fault planted_fault() { return planted; }

InCall::InCall() : since_ns_(calls++ == 0 ? now_ns() : 0) {}
InCall::~InCall() {
  if (--calls == 0) in_calls_ns += now_ns() - since_ns_;
}
int64_t InCall::total_ns() { return in_calls_ns; }

const std::vector<std::unique_ptr<Gpu>>& gpus() {
  static auto* mutex = new std::mutex();
  static auto* known = new std::map<std::string, std::vector<std::unique_ptr<Gpu>>>();
  const std::string key = variable("HOST_GPUS") + "\n" + variable("CUDA_DEVICE_ORDER") + "\n" +
                          variable("CUDA_VISIBLE_DEVICES");
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = known->find(key);
  return found != known->end() ? found->second : (*known)[key] = list_gpus();
}

Gpu* find_owner(const void* at) {
  const auto* address = static_cast<const char*>(at);
  const std::lock_guard<std::mutex> lock(memories().mutex);
  auto found = memories().at.upper_bound(const_cast<char*>(address));
  if (found == memories().at.begin()) return nullptr;
  --found;
  return address < found->first + found->second.bytes ? found->second.gpu : nullptr;
}

void* allocate(Gpu* gpu, size_t bytes) {
  if (!gpu->take_room(bytes)) return nullptr;
  const int file = memfd_create("host-gpu", MFD_CLOEXEC);
  void* made = file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0
                   ? nullptr
                   : map(gpu, file, bytes, true);
  if (made == nullptr) {
    gpu->give_room(bytes);
    if (file >= 0) close(file);
  } else {
    poison(made, std::min(bytes, kMostPoisonedBytes));
  }
  return made;
}

void deallocate(void* memory) {
  const std::lock_guard<std::mutex> lock(memories().mutex);
  const auto found = memories().at.find(static_cast<char*>(memory));
  if (found == memories().at.end()) return;
  const Memory& was = found->second;
  if (was.is_shown) poison(memory, was.bytes);  // for those who read it all the same
  munmap(memory, was.bytes);
  if (was.file >= 0) {
    close(was.file);
    was.gpu->give_room(was.bytes);
  }
  memories().at.erase(found);
}

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
              kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600;

thread_local std::vector<Gpu*> contexts;  // of this thread, the current one last

Gpu* find_gpu(int ordinal) {
  return ordinal >= 0 && ordinal < static_cast<int>(gpus().size())
             ? gpus()[static_cast<size_t>(ordinal)].get()
             : nullptr;
}

// What processes know of an event that they share. Of the two that a rank has, the first one says
// what it has written, the second one what it has taken.
struct SharedEvent {
  std::atomic<uint64_t> recorded{0}, come{0};
  std::atomic<int> owner{0};
  int kind = 0;
};

struct Event {
  PointPtr point;  // null: it has come
  bool of_computation = false;
  std::shared_ptr<SharedEvent> shared;  // null: of this process alone
  int file = -1;
  bool is_own = true;
};

bool has_ended(int process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(stat, text);
  const size_t end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() || text[end + 2] == 'Z' ||
         text[end + 2] == 'X' || text[end + 2] == 'T';
}

// As on a GPU, which goes on when the process has ended or is frozen.
void wait_for_peer(const SharedEvent& event, uint64_t number) {
  for (int round = 1; event.come < number; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (round % 500 == 0 && has_ended(event.owner)) return;
  }
}

std::shared_ptr<SharedEvent> map_event(int file) {
  void* made = mmap(nullptr, sizeof(SharedEvent), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return {static_cast<SharedEvent*>(made),
          [](SharedEvent* event) { munmap(event, sizeof(SharedEvent)); }};
}

struct Handle {
  char reserved[64];
};

std::string own_file(int file) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
}

struct Copy2D {  // CUDA_MEMCPY2D_v2
  size_t from_x, from_y;
  int from_type;
  const void* from_host;
  unsigned long long from;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  int to_type;
  void* to_host;
  unsigned long long to;
  void* to_array;
  size_t to_pitch, width, height;
};

struct Dim3 {
  unsigned x, y, z;
};

struct Function {
  void (*kernel)(const void* argument) = nullptr;
  size_t argument_bytes = 0;
};

// The library with the kernels, whose threads have their places in it.
struct Module {
  std::mutex mutex;
  void* library = nullptr;
  std::map<std::string, Function> functions;
  Dim3* at(const char* name) const { return static_cast<Dim3*>(dlsym(library, name)); }
};
Module& module() {
  static auto* only = new Module();
  return *only;
}

void run_kernel(const Function& function, const std::string& argument, Dim3 grid,
                unsigned threads) {
  const std::lock_guard<std::mutex> lock(module().mutex);
  Dim3 *block = module().at("blockIdx"), *thread = module().at("threadIdx");
  *module().at("gridDim") = grid;
  *module().at("blockDim") = {threads, 1, 1};
  for (block->y = 0; block->y < grid.y; ++block->y) {
    for (block->x = 0; block->x < grid.x; ++block->x) {
      for (thread->x = 0; thread->x < threads; ++thread->x) function.kernel(argument.data());
    }
  }
}

}  // namespace
}  // namespace host_gpu

using namespace host_gpu;  // what follows is CUDA's

extern "C" {

// For exchanges.py.
HOST_GPU_EXPORT void host_gpu_plant(int fault) { planted = static_cast<Fault>(fault); }
HOST_GPU_EXPORT void host_gpu_be_late(int us) {
  for (const auto& gpu : gpus()) gpu->be_late(us);
}
// How often a thread of the host has waited for a stream.
HOST_GPU_EXPORT int64_t host_gpu_waits() { return host_waits; }
// How long threads have been in calls that queue something, all of them together.
HOST_GPU_EXPORT int64_t host_gpu_in_calls_ns() { return InCall::total_ns(); }
HOST_GPU_EXPORT void host_gpu_drain() {
  for (const auto& gpu : gpus()) gpu->drain();
}

HOST_GPU_EXPORT int cuInit(unsigned) { return std::atoi(variable("HOST_GPU_INIT_ERROR").c_str()); }
HOST_GPU_EXPORT int cuGetErrorName(int code, const char** text) {
  *text = code == 803            ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
          : code == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                 : nullptr;
  return *text == nullptr;
}
HOST_GPU_EXPORT int cuGetErrorString(int, const char**) { return kInvalidValue; }
HOST_GPU_EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
HOST_GPU_EXPORT int cuDeviceGetCount(int* count) {
  return *count = static_cast<int>(gpus().size()), 0;
}
HOST_GPU_EXPORT int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, find_gpu(ordinal) == nullptr ? kInvalidDevice : 0;
}
HOST_GPU_EXPORT int cuDeviceGetName(char* name, int bytes, int device) {
  const Gpu* gpu = find_gpu(device);
  if (gpu == nullptr) return kInvalidDevice;
  return std::snprintf(name, static_cast<size_t>(bytes), "%s", gpu->settings().name.c_str()), 0;
}
HOST_GPU_EXPORT int cuDeviceGetUuid_v2(char* octets, int device) {
  const Gpu* gpu = find_gpu(device);
  if (gpu == nullptr) return kInvalidDevice;
  std::memset(octets, 0, kUuidOctets);
  octets[kUuidOctets - 1] = static_cast<char>(gpu->settings().place + 1);
  return 0;
}
HOST_GPU_EXPORT int nvmlInit_v2() { return 0; }
HOST_GPU_EXPORT int nvmlShutdown() { return 0; }
HOST_GPU_EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, const Gpu** found) {
  const std::string text = uuid;
  for (const auto& gpu : gpus()) {
    char last[3];
    std::snprintf(last, sizeof(last), "%02x", gpu->settings().place + 1);
    if (text != std::string("GPU-00000000-0000-0000-0000-0000000000") + last) continue;
    *found = gpu.get();
    return 0;
  }
  return kInvalidValue;
}
HOST_GPU_EXPORT int nvmlDeviceGetMemoryInfo_v2(const Gpu* gpu, ManagedMemory* memory) {
  if (memory->version != (sizeof(ManagedMemory) | 2U << 24)) return kInvalidValue;
  memory->total = gpu->settings().memory_bytes;
  memory->used = gpu->used_bytes();
  memory->free = memory->total - memory->used;
  return 0;
}
HOST_GPU_EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  const Gpu* gpu = find_gpu(device);
  return gpu == nullptr ? kInvalidDevice : (*bytes = gpu->settings().memory_bytes, 0);
}
HOST_GPU_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 6 : 0;
  return *value == 0;
}
HOST_GPU_EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  const Gpu *one = find_gpu(device), *other = find_gpu(peer);
  return *can = one->settings().place < 2 && other->settings().place < 2, 0;
}

HOST_GPU_EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = find_gpu(device), *context == nullptr ? kInvalidDevice : 0;
}
HOST_GPU_EXPORT int cuCtxPushCurrent_v2(void* context) {
  return contexts.push_back(static_cast<Gpu*>(context)), 0;
}
HOST_GPU_EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
HOST_GPU_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, contexts.empty() ? kInvalidContext : 0;
}

HOST_GPU_EXPORT int cuModuleLoadData(void** loaded, const void* image) {
  const std::string text = static_cast<const char*>(image);
  if (text.rfind("HOST:", 0) != 0) return kInvalidImage;
  *loaded = module().library = dlopen(text.c_str() + 5, RTLD_NOW | RTLD_LOCAL);
  if (*loaded == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  return *loaded == nullptr ? kInvalidImage : contexts.empty() ? kInvalidContext : 0;
}
HOST_GPU_EXPORT int cuModuleGetFunction(void** function, void* from, const char* name) {
  const std::lock_guard<std::mutex> lock(module().mutex);
  Function& found = module().functions[name];
  found.kernel = reinterpret_cast<void (*)(const void*)>(dlsym(from, name));
  const bool reduces = std::strncmp(name, "reduce_", 7) == 0;
  found.argument_bytes =
      *static_cast<size_t*>(dlsym(from, reduces ? "reduce_argument_bytes" : "copy_argument_bytes"));
  return *function = &found, found.kernel == nullptr ? kNotFound : 0;
}
HOST_GPU_EXPORT int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y,
                                   unsigned grid_z, unsigned block_x, unsigned block_y,
                                   unsigned block_z, unsigned, void* stream, void** parameters,
                                   void**) {
  const InCall in_call;
  if (stream == nullptr || grid_x * grid_y * grid_z * block_x * block_y * block_z == 0)
    return kInvalidValue;
  if (contexts.empty()) return kInvalidContext;
  const auto* what = static_cast<Function*>(function);
  const std::string argument(static_cast<const char*>(parameters[0]), what->argument_bytes);
  static_cast<Stream*>(stream)->call(
      [=] { run_kernel(*what, argument, {grid_x, grid_y, grid_z}, block_x); });
  return 0;
}

HOST_GPU_EXPORT int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  if (bytes == 0) return kInvalidValue;
  if (contexts.empty()) return kInvalidContext;
  void* made = allocate(contexts.back(), bytes);
  *memory = reinterpret_cast<unsigned long long>(made);
  return made == nullptr ? kOutOfMemory : 0;
}
// As CUDA's, after all that the GPU has to do.
HOST_GPU_EXPORT int cuMemFree_v2(unsigned long long memory) {
  auto* at = reinterpret_cast<void*>(memory);
  Gpu* gpu = find_owner(at);
  if (gpu == nullptr) return kInvalidValue;
  gpu->drain();
  return deallocate(at), 0;
}
HOST_GPU_EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  if (contexts.empty()) return kInvalidContext;
  *memory = std::malloc(bytes);
  poison(*memory, std::min(bytes, kMostPoisonedBytes));
  return 0;
}
HOST_GPU_EXPORT int cuMemFreeHost(void* memory) { return std::free(memory), 0; }
HOST_GPU_EXPORT int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes,
                                  void* stream) {
  const InCall in_call;
  if (stream == nullptr) return kInvalidHandle;
  auto *target = reinterpret_cast<char*>(to), *source = reinterpret_cast<char*>(from);
  const bool apart = target + bytes <= source || source + bytes <= target;
  static_cast<Stream*>(stream)->call([=] { std::memmove(target, source, bytes); },
                                     apart ? target : nullptr, bytes);
  return 0;
}
HOST_GPU_EXPORT int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  if (stream == nullptr || copy->from_type != 4 || copy->to_type != 4 ||
      copy->width > copy->from_pitch || copy->width > copy->to_pitch ||
      std::max(copy->from_pitch, copy->to_pitch) > kMostPitchBytes)
    return kInvalidValue;
  static_cast<Stream*>(stream)->call([what = *copy] {
    for (size_t row = 0; row < what.height; ++row) {
      std::memmove(reinterpret_cast<char*>(what.to) + row * what.to_pitch,
                   reinterpret_cast<char*>(what.from) + row * what.from_pitch, what.width);
    }
  });
  return 0;
}

HOST_GPU_EXPORT int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  if (contexts.empty()) return kInvalidContext;
  return *stream = contexts.back()->make_stream(), 0;
}
HOST_GPU_EXPORT int cuStreamDestroy_v2(void* stream) {
  auto* one = static_cast<Stream*>(stream);
  return one->gpu()->destroy(one), 0;
}
HOST_GPU_EXPORT int cuStreamSynchronize(void* stream) {
  if (stream == nullptr) return kInvalidHandle;
  ++host_waits;
  return static_cast<Stream*>(stream)->drain(), 0;
}
HOST_GPU_EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const InCall in_call;
  if (event == nullptr) return kInvalidHandle;
  const auto& one = *static_cast<Event*>(event);
  auto* on = stream == nullptr && !contexts.empty() ? contexts.back()->compute_stream()
                                                    : static_cast<Stream*>(stream);
  if (on == nullptr) return kInvalidHandle;
  const Fault fault = planted_fault();
  if (stream == nullptr && fault == Fault::kNoWaitInStream) return 0;
  // TensorFlow's kernels compute at once: not into memory that is given back behind this.
  std::unique_lock<std::mutex> between_kernels;
  if (stream == nullptr) between_kernels = std::unique_lock(on->gpu()->memory_mutex());
  if (one.shared != nullptr) {
    if (fault == (one.shared->kind == 0 ? Fault::kNoWaitForWritten : Fault::kNoWaitForTaken))
      return 0;
    on->wait([shared = one.shared, number = one.shared->recorded.load()] {
      wait_for_peer(*shared, number);
    });
  } else if (one.point != nullptr && !(one.of_computation && fault == Fault::kNoWaitForMark)) {
    on->wait(one.point);
  }
  return 0;
}
HOST_GPU_EXPORT int cuEventCreate(void** event, unsigned flags) {
  if (contexts.empty()) return kInvalidContext;
  auto* made = new Event();
  *event = made;
  if ((flags & 4) == 0) return 0;  // CU_EVENT_INTERPROCESS
  static std::atomic<int> count{0};
  made->file = memfd_create("host-gpu-event", MFD_CLOEXEC);
  if (made->file < 0 || ftruncate(made->file, sizeof(SharedEvent)) != 0) return kInvalidValue;
  made->shared = map_event(made->file);
  made->shared->owner = getpid();
  made->shared->kind = count++ % 2;
  return 0;
}
HOST_GPU_EXPORT int cuEventDestroy_v2(void* event) {
  auto* one = static_cast<Event*>(event);
  if (one->file >= 0) close(one->file);
  return delete one, 0;
}
// The stream null is TensorFlow's: its devices here tell no other library which stream theirs is.
HOST_GPU_EXPORT int cuEventRecord(void* event, void* stream) {
  const InCall in_call;
  auto* one = static_cast<Event*>(event);
  if (one == nullptr) return kInvalidHandle;
  if (stream == nullptr && contexts.empty()) return kInvalidContext;
  auto* on = stream == nullptr ? contexts.back()->compute_stream() : static_cast<Stream*>(stream);
  if (on == nullptr) return kInvalidHandle;
  one->of_computation = stream == nullptr;
  const Fault fault = planted_fault();
  if (one->of_computation && fault == Fault::kMarkElsewhere) {
    static auto* idle = contexts.back()->make_stream();
    on = idle;
  }
  if (fault == (one->of_computation ? Fault::kEarlyMark : Fault::kEarlyRecord)) {
    one->point = nullptr;
    if (one->shared != nullptr) one->shared->come = ++one->shared->recorded;
  } else if (one->shared != nullptr) {
    const uint64_t number = ++one->shared->recorded;
    on->wait([shared = one->shared, number] { shared->come = number; });
  } else {
    one->point = on->record();
  }
  return 0;
}
HOST_GPU_EXPORT int cuEventQuery(void* event) {
  if (event == nullptr) return kInvalidHandle;
  const auto& one = *static_cast<Event*>(event);
  const bool come = one.shared != nullptr ? one.shared->come >= one.shared->recorded
                                          : one.point == nullptr || one.point->has_come();
  return come || planted_fault() == Fault::kEarlyQuery ? 0 : kNotReady;
}

HOST_GPU_EXPORT int cuIpcGetMemHandle(Handle* handle, unsigned long long memory) {
  const std::lock_guard<std::mutex> lock(memories().mutex);
  const auto found = memories().at.find(reinterpret_cast<char*>(memory));
  if (found == memories().at.end() || found->second.file < 0) return kInvalidValue;
  found->second.is_shown = true;
  std::snprintf(handle->reserved, sizeof(handle->reserved), "%zu %s", found->second.bytes,
                own_file(found->second.file).c_str());
  return 0;
}
HOST_GPU_EXPORT int cuIpcOpenMemHandle_v2(unsigned long long* memory, Handle handle, unsigned) {
  if (contexts.empty()) return kInvalidContext;
  size_t bytes = 0;
  char path[64] = "";
  if (std::sscanf(handle.reserved, "%zu %63s", &bytes, path) != 2) return kInvalidHandle;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidHandle;
  void* made = map(contexts.back(), file, bytes, false);
  close(file);
  *memory = reinterpret_cast<unsigned long long>(made);
  return made == nullptr ? kInvalidValue : 0;
}
HOST_GPU_EXPORT int cuIpcCloseMemHandle(unsigned long long memory) {
  auto* at = reinterpret_cast<void*>(memory);
  if (Gpu* gpu = find_owner(at); gpu != nullptr) gpu->drain();
  return deallocate(at), 0;
}
HOST_GPU_EXPORT int cuIpcGetEventHandle(Handle* handle, void* event) {
  const auto& one = *static_cast<Event*>(event);
  if (one.shared == nullptr) return kInvalidHandle;
  return std::snprintf(handle->reserved, sizeof(handle->reserved), "%s",
                       own_file(one.file).c_str()),
         0;
}
HOST_GPU_EXPORT int cuIpcOpenEventHandle(void** event, Handle handle) {
  const int file = open(handle.reserved, O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidHandle;
  auto* made = new Event();
  made->shared = map_event(file);
  close(file);
  return *event = made, 0;
}

}  // extern "C"
