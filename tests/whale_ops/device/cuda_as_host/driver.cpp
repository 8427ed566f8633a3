// A driver (libcuda) as whale_ops/gpu_driver.py asks it, without GPUs. FAKE_GPUS: their memory in bytes, "4096,8192"; the first two reach
// each other. FAKE_CUDA_ERROR: what cuInit says.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

std::vector<size_t> gpus() {
  std::vector<size_t> found;
  const char* listed = std::getenv("FAKE_GPUS");
  for (const char* at = listed; at != nullptr && *at != '\0'; at = std::strchr(at, ',') == nullptr ? nullptr : std::strchr(at, ',') + 1) {
    found.push_back(std::strtoull(at, nullptr, 10));
  }
  return found;
}

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
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(gpus().size()), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int bytes, int) { return std::snprintf(name, static_cast<size_t>(bytes), "NVIDIA Something"), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = gpus()[static_cast<size_t>(device)], 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 8 : 0, attribute == 75 ? 0 : 1; }
int cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device < 2 && peer < 2, 0; }

}  // extern "C"
