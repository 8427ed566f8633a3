// The part of CUDA's driver API that exchanges need, loaded from libcuda.so.1 when a GPU is first
// asked for, so that neither CUDA's headers nor its runtime are needed to build or run this. Names,
// numbers and layouts are those of cuda.h, unchanged since CUDA 11.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "whale_ops/core/base/types.h"

namespace whale::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;  // TensorFlow's and NCCL's cudaStream_t is the same
using CUevent = struct CUevent_st*;
struct CUipcMemHandle {
  char reserved[64];
};
struct CUipcEventHandle {
  char reserved[64];
};
struct CUmemcpy2D {  // CUDA_MEMCPY2D_v2
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  size_t srcPitch;
  size_t dstXInBytes, dstY;
  int dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  size_t dstPitch;
  size_t WidthInBytes, Height;
};

constexpr CUresult kSuccess = 0, kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kEventInterprocess = 4,
                   kIpcLazyEnablePeerAccess = 1;
constexpr int kMemoryUnified = 4;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;

// (name, name in the library, parameters)
#define WHALE_DRIVER_CALLS(CALL)                                                                   \
  CALL(cuInit, "cuInit", (unsigned flags))                                                         \
  CALL(cuGetErrorName, "cuGetErrorName", (CUresult error, const char** text))                      \
  CALL(cuGetErrorString, "cuGetErrorString", (CUresult error, const char** text))                  \
  CALL(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                         \
  CALL(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                               \
  CALL(cuDeviceGetName, "cuDeviceGetName", (char* name, int bytes, CUdevice device))               \
  CALL(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice device)) \
  CALL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                                       \
       (CUcontext * context, CUdevice device))                                                     \
  CALL(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                               \
  CALL(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                               \
  CALL(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))    \
  CALL(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void* image))               \
  CALL(cuModuleGetFunction, "cuModuleGetFunction",                                                 \
       (CUfunction * function, CUmodule module, const char* name))                                 \
  CALL(cuLaunchKernel, "cuLaunchKernel",                                                           \
       (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,                \
        void** parameters, void** extra))                                                          \
  CALL(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * memory, size_t bytes))                          \
  CALL(cuMemFree, "cuMemFree_v2", (CUdeviceptr memory))                                            \
  CALL(cuMemHostAlloc, "cuMemHostAlloc", (void** memory, size_t bytes, unsigned flags))            \
  CALL(cuMemFreeHost, "cuMemFreeHost", (void* memory))                                             \
  CALL(cuMemcpyAsync, "cuMemcpyAsync",                                                             \
       (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                          \
  CALL(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", (const CUmemcpy2D* copy, CUstream stream))           \
  CALL(cuStreamCreateWithPriority, "cuStreamCreateWithPriority",                                   \
       (CUstream * stream, unsigned flags, int priority))                                          \
  CALL(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                   \
  CALL(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                              \
  CALL(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))   \
  CALL(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                          \
  CALL(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                       \
  CALL(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                           \
  CALL(cuEventQuery, "cuEventQuery", (CUevent event))                                              \
  CALL(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CUipcMemHandle * handle, CUdeviceptr memory))      \
  CALL(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2",                                                \
       (CUdeviceptr * memory, CUipcMemHandle handle, unsigned flags))                              \
  CALL(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr memory))                           \
  CALL(cuIpcGetEventHandle, "cuIpcGetEventHandle", (CUipcEventHandle * handle, CUevent event))     \
  CALL(cuIpcOpenEventHandle, "cuIpcOpenEventHandle", (CUevent * event, CUipcEventHandle handle))

struct Driver {
#define WHALE_DRIVER_CALL(name, symbol, arguments) CUresult(*name) arguments = nullptr;
  WHALE_DRIVER_CALLS(WHALE_DRIVER_CALL)
#undef WHALE_DRIVER_CALL
};

// Loads and initialises the driver, the first time; an error if this machine has none, or the
// driver does not answer.
Status load_driver();

// The driver's functions, once `load_driver` has succeeded.
const Driver& driver();

// Converts a CUDA error to a status that names the call.
Status check(CUresult error, const char* call);

inline CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

// A GPU of this process, by its primary context, which TensorFlow and NCCL use as well. It is kept
// until the process ends.
class Gpu {
 public:
  // Finds the GPU of that number, and retains its context the first time. Callable from any thread.
  static Status find(int ordinal, const Gpu** gpu);
  // Loads the machine code of kernels.cu for that GPU (compiled by whale_ops/device_code.py), the
  // first time. Callable from any thread.
  static Status load_kernels(int ordinal, const void* image);

  CUcontext context() const { return context_; }
  // Finds a kernel by name; an error if no machine code was loaded.
  Status kernel(const std::string& name, CUfunction* found) const;
  // Creates a stream of the highest priority that does not wait for the default stream; the context
  // has to be current.
  Status create_stream(CUstream* stream) const;

 private:
  static Status find_locked(int ordinal, Gpu** gpu);

  CUcontext context_ = nullptr;
  std::map<std::string, CUfunction> kernels_;
};

// Makes a GPU's context the calling thread's current one for as long as this object lives.
class Current {
 public:
  explicit Current(const Gpu& gpu)
      : status_(check(driver().cuCtxPushCurrent(gpu.context()), "cuCtxPushCurrent")) {}
  ~Current() {
    CUcontext last = nullptr;
    if (status_.ok()) driver().cuCtxPopCurrent(&last);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Status& status() const { return status_; }

 private:
  const Status status_;
};

}  // namespace whale::cuda
