// A driver (libcuda) without GPUs, for whale_ops/gpu_driver.py and whale_ops/gpu: memory is the
// host's, other processes map it as CUDA IPC does, and all is done when a call returns. FAKE_GPUS:
// their memory in bytes, "4096,8192"; the first two reach each other. FAKE_CUDA_ERROR: what cuInit
// says. Machine code is the text "HOST:" and the path of kernels.cpp's library.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400,
              kNotFound = 500;

std::vector<size_t> gpus() {
  std::vector<size_t> found;
  const char* listed = std::getenv("FAKE_GPUS");
  for (const char* at = listed; at != nullptr && *at != '\0';
       at = std::strchr(at, ',') == nullptr ? nullptr : std::strchr(at, ',') + 1) {
    found.push_back(std::strtoull(at, nullptr, 10));
  }
  return found;
}

struct Memory {
  int file = -1;  // below 0: another process's
  size_t bytes = 0;
};

std::mutex mutex;
std::map<unsigned long long, Memory> memories;
thread_local std::vector<void*> contexts;  // of this thread, the current one last

int map(int file, size_t bytes, bool own, unsigned long long* memory) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (made == MAP_FAILED) return kInvalidValue;
  *memory = reinterpret_cast<unsigned long long>(made);
  const std::lock_guard<std::mutex> lock(mutex);
  memories[*memory] = {own ? file : -1, bytes};
  return 0;
}

int unmap(unsigned long long memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = memories.find(memory);
  if (found == memories.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(memory), found->second.bytes);
  if (found->second.file >= 0) close(found->second.file);
  memories.erase(found);
  return 0;
}

struct Handle {
  char reserved[64];
};
struct Dim3 {
  unsigned x, y, z;
};
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

void* module = nullptr;

}  // namespace

extern "C" {

int cuInit(unsigned) {
  const char* error = std::getenv("FAKE_CUDA_ERROR");
  return error == nullptr ? 0 : std::atoi(error);
}
int cuGetErrorName(int code, const char** text) {
  *text = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : nullptr;
  return code == 803 ? 0 : 1;
}
int cuGetErrorString(int, const char**) { return 1; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(gpus().size()), 0; }
int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal < static_cast<int>(gpus().size()) ? 0 : 101;
}
int cuDeviceGetName(char* name, int bytes, int) {
  return std::snprintf(name, static_cast<size_t>(bytes), "NVIDIA Something"), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  return *bytes = gpus()[static_cast<size_t>(device)], 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 6 : 0;
  return *value == 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device < 2 && peer < 2, 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(0x1000L + device), 0;
}
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), 0; }
int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, contexts.empty() ? kInvalidContext : 0;
}

int cuModuleLoadData(void** loaded, const void* image) {
  const std::string text = static_cast<const char*>(image);
  if (text.rfind("HOST:", 0) != 0) return kInvalidImage;
  *loaded = module = dlopen(text.c_str() + 5, RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  return module == nullptr ? kInvalidImage : contexts.empty() ? kInvalidContext : 0;
}
int cuModuleGetFunction(void** function, void* from, const char* name) {
  return *function = dlsym(from, name), *function == nullptr ? kNotFound : 0;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned, void* stream,
                   void** parameters, void**) {
  if (stream == nullptr || grid_x * grid_y * grid_z * block_x * block_y * block_z == 0)
    return kInvalidValue;
  if (contexts.empty()) return kInvalidContext;
  const std::lock_guard<std::mutex> lock(mutex);  // the places of threads are the library's
  const auto at = [](const char* name) { return static_cast<Dim3*>(dlsym(module, name)); };
  Dim3 *block = at("blockIdx"), *thread = at("threadIdx");
  *at("gridDim") = {grid_x, grid_y, grid_z};
  *at("blockDim") = {block_x, block_y, block_z};
  const auto kernel = reinterpret_cast<void (*)(const void*)>(function);
  for (block->y = 0; block->y < grid_y; ++block->y) {
    for (block->x = 0; block->x < grid_x; ++block->x) {
      for (thread->x = 0; thread->x < block_x; ++thread->x) kernel(parameters[0]);
    }
  }
  return 0;
}

int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  if (bytes == 0) return kInvalidValue;
  if (contexts.empty()) return kInvalidContext;
  const int file = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kInvalidValue;
  const int code = map(file, bytes, true, memory);
  if (code == 0) std::memset(reinterpret_cast<void*>(*memory), 0xAB, bytes);
  return code;
}
int cuMemFree_v2(unsigned long long memory) { return unmap(memory); }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return *memory = std::malloc(bytes), contexts.empty() ? kInvalidContext : 0;
}
int cuMemFreeHost(void* memory) { return std::free(memory), 0; }
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return stream == nullptr ? kInvalidHandle : 0;
}
int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  if (stream == nullptr || copy->from_type != 4 || copy->to_type != 4 ||
      copy->width > copy->from_pitch || copy->width > copy->to_pitch)
    return kInvalidValue;
  for (size_t row = 0; row < copy->height; ++row) {
    std::memmove(reinterpret_cast<char*>(copy->to) + row * copy->to_pitch,
                 reinterpret_cast<char*>(copy->from) + row * copy->from_pitch, copy->width);
  }
  return 0;
}

int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  return *stream = new int(0), contexts.empty() ? kInvalidContext : 0;
}
int cuStreamDestroy_v2(void* stream) { return delete static_cast<int*>(stream), 0; }
int cuStreamSynchronize(void* stream) { return stream == nullptr ? kInvalidHandle : 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return stream == nullptr || event == nullptr ? kInvalidHandle : 0;
}
int cuEventCreate(void** event, unsigned) {
  return *event = new int(0), contexts.empty() ? kInvalidContext : 0;
}
int cuEventDestroy_v2(void* event) { return delete static_cast<int*>(event), 0; }
int cuEventRecord(void* event, void* stream) {
  return stream == nullptr || event == nullptr ? kInvalidHandle : 0;
}
int cuEventQuery(void* event) { return event == nullptr ? kInvalidHandle : 0; }

int cuIpcGetMemHandle(Handle* handle, unsigned long long memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = memories.find(memory);
  if (found == memories.end()) return kInvalidValue;
  std::snprintf(handle->reserved, sizeof(handle->reserved), "%zu /proc/%d/fd/%d",
                found->second.bytes, getpid(), found->second.file);
  return 0;
}
int cuIpcOpenMemHandle_v2(unsigned long long* memory, Handle handle, unsigned) {
  size_t bytes = 0;
  char path[64] = "";
  if (std::sscanf(handle.reserved, "%zu %63s", &bytes, path) != 2) return kInvalidHandle;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidHandle;
  const int code = map(file, bytes, false, memory);
  close(file);
  return code;
}
int cuIpcCloseMemHandle(unsigned long long memory) { return unmap(memory); }
int cuIpcGetEventHandle(Handle* handle, void*) {
  return std::memset(handle, 1, sizeof(*handle)), 0;
}
int cuIpcOpenEventHandle(void** event, Handle) { return *event = new int(0), 0; }

}  // extern "C"
