// Devices of TensorFlow's type "GPU" on the GPUs of streams.h: a PluggableDevice
// (tensorflow/c/experimental/stream_executor) for TensorFlow without CUDA. Its placer, executor,
// allocator and copies between devices are the real ones, and so are Whale's kernels for GPUs and
// its library for GPUs, which finds the driver beside this.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tests/host_gpu/late_kernels.h"
#include "tests/host_gpu/streams.h"

namespace host_gpu {
namespace {

constexpr size_t kHostAlignmentBytes = 64;

Gpu* gpu_at(const SP_Device* device) { return gpus()[static_cast<size_t>(device->ordinal)].get(); }
Stream* stream_at(SP_Stream stream) { return reinterpret_cast<Stream*>(stream); }
PointPtr* point_at(SP_Event event) { return reinterpret_cast<PointPtr*>(event); }
void succeed(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void create_stream(const SP_Device* device, SP_Stream* stream, TF_Status* status) {
  Gpu* gpu = gpu_at(device);
  Stream* made = gpu->make_stream();
  // TensorFlow makes the one on which it computes first.
  if (gpu->compute_stream() == nullptr) gpu->compute_on(made);
  *stream = reinterpret_cast<SP_Stream>(made);
  succeed(status);
}
void destroy_stream(const SP_Device* device, SP_Stream stream) {
  gpu_at(device)->destroy(stream_at(stream));
}
void wait_for_stream(const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status* status) {
  stream_at(dependent)->wait(stream_at(other)->record());
  succeed(status);
}
void stream_status(const SP_Device*, SP_Stream, TF_Status* status) { succeed(status); }

void create_event(const SP_Device*, SP_Event* event, TF_Status* status) {
  *event = reinterpret_cast<SP_Event>(new PointPtr());
  succeed(status);
}
void destroy_event(const SP_Device*, SP_Event event) { delete point_at(event); }
SE_EventStatus event_status(const SP_Device*, SP_Event event) {
  const PointPtr& point = *point_at(event);
  return point == nullptr || point->has_come() ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}
void record_event(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status* status) {
  *point_at(event) = stream_at(stream)->record();
  succeed(status);
}
void wait_for_event(const SP_Device* const, SP_Stream stream, SP_Event event,
                    TF_Status* const status) {
  if (const PointPtr point = *point_at(event); point != nullptr) stream_at(stream)->wait(point);
  succeed(status);
}
void block_for_event(const SP_Device*, SP_Event event, TF_Status* status) {
  if (const PointPtr point = *point_at(event); point != nullptr) point->wait();
  succeed(status);
}
void block_until_done(const SP_Device*, SP_Stream stream, TF_Status* status) {
  stream_at(stream)->drain();
  succeed(status);
}
void synchronize(const SP_Device* device, TF_Status* status) {
  gpu_at(device)->drain();
  succeed(status);
}
TF_Bool call_host(const SP_Device*, SP_Stream stream, SE_StatusCallbackFn call, void* argument) {
  stream_at(stream)->wait([call, argument] {
    TF_Status* status = TF_NewStatus();
    call(argument, status);
    TF_DeleteStatus(status);
  });
  return true;
}

void create_timer(const SP_Device*, SP_Timer* timer, TF_Status* status) {
  *timer = nullptr;
  succeed(status);
}
void destroy_timer(const SP_Device*, SP_Timer) {}
void use_timer(const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { succeed(status); }
uint64_t nanoseconds(SP_Timer) { return 0; }

void allocate_on(const SP_Device* device, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = size == 0 ? nullptr : allocate(gpu_at(device), size);
  memory->size = memory->opaque == nullptr ? 0 : size;
}
void deallocate_on(const SP_Device* device, SP_DeviceMemoryBase* memory) {
  gpu_at(device)->drain();  // as cuMemFree does
  deallocate(memory->opaque);
  memory->opaque = nullptr;
}
void* allocate_host(const SP_Device*, uint64_t size) {
  return std::aligned_alloc(kHostAlignmentBytes, (size + kHostAlignmentBytes - 1) /
                                                     kHostAlignmentBytes * kHostAlignmentBytes);
}
void deallocate_host(const SP_Device*, void* memory) { std::free(memory); }
TF_Bool memory_usage(const SP_Device* device, int64_t* free, int64_t* total) {
  const Gpu* gpu = gpu_at(device);
  *total = static_cast<int64_t>(gpu->settings().memory_bytes);
  *free = *total - static_cast<int64_t>(gpu->used_bytes());
  return true;
}
TF_Bool allocator_stats(const SP_Device*, SP_AllocatorStats* stats) {
  stats->struct_size = SP_ALLOCATORSTATS_STRUCT_SIZE;
  return false;
}

void copy(Stream* stream, void* to, const void* from, uint64_t size, TF_Status* status) {
  stream->call([=] { std::memmove(to, from, size); }, to == from ? nullptr : to, size);
  succeed(status);
}
void copy_to_host(const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from,
                  uint64_t size, TF_Status* status) {
  copy(stream_at(stream), to, from->opaque, size, status);
}
void copy_to_device(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from,
                    uint64_t size, TF_Status* status) {
  copy(stream_at(stream), to->opaque, from, size, status);
}
void copy_on_device(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to,
                    const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
  copy(stream_at(stream), to->opaque, from->opaque, size, status);
}
void copy_now(const SP_Device* device, void* to, const void* from, uint64_t size,
              TF_Status* status) {
  gpu_at(device)->drain();
  std::memmove(to, from, size);
  succeed(status);
}
void copy_to_host_now(const SP_Device* device, void* to, const SP_DeviceMemoryBase* from,
                      uint64_t size, TF_Status* status) {
  copy_now(device, to, from->opaque, size, status);
}
void copy_to_device_now(const SP_Device* device, SP_DeviceMemoryBase* to, const void* from,
                        uint64_t size, TF_Status* status) {
  copy_now(device, to->opaque, from, size, status);
}
void copy_on_device_now(const SP_Device* device, SP_DeviceMemoryBase* to,
                        const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
  copy_now(device, to->opaque, from->opaque, size, status);
}
void set_bytes(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint8_t pattern,
               uint64_t size, TF_Status* status) {
  stream_at(stream)->call([to = at->opaque, pattern, size] { std::memset(to, pattern, size); });
  succeed(status);
}
void set_zero(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t size,
              TF_Status* status) {
  set_bytes(device, stream, at, 0, size, status);
}
void set_words(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint32_t pattern,
               uint64_t size, TF_Status* status) {
  stream_at(stream)->call([to = static_cast<uint32_t*>(at->opaque), pattern, size] {
    std::fill_n(to, size / sizeof(pattern), pattern);
  });
  succeed(status);
}

void count_devices(const SP_Platform*, int* count, TF_Status* status) {
  *count = static_cast<int>(gpus().size());
  succeed(status);
}
void create_device(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status* status) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  // Kept by name until the process ends.
  params->device->hardware_name =
      gpus()[static_cast<size_t>(params->ordinal)]->settings().name.c_str();
  params->device->device_vendor = "the host";
  params->device->pci_bus_id = "0000:00:00.0";
  succeed(status);
}
void destroy_device(const SP_Platform*, SP_Device*) {}
int32_t numa_node(const SP_Device*) { return -1; }
int64_t bandwidth(const SP_Device*) { return 1; }
double gflops(const SP_Device*) { return 1; }
void create_device_fns(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status* status) {
  *params->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE, nullptr, numa_node, bandwidth, gflops};
  succeed(status);
}
void destroy_device_fns(const SP_Platform*, SP_DeviceFns*) {}
void create_executor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  SP_StreamExecutor* it = params->stream_executor;
  it->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  it->allocate = allocate_on;
  it->deallocate = deallocate_on;
  it->host_memory_allocate = allocate_host;
  it->host_memory_deallocate = deallocate_host;
  it->get_allocator_stats = allocator_stats;
  it->device_memory_usage = memory_usage;
  it->create_stream = create_stream;
  it->destroy_stream = destroy_stream;
  it->create_stream_dependency = wait_for_stream;
  it->get_stream_status = stream_status;
  it->create_event = create_event;
  it->destroy_event = destroy_event;
  it->get_event_status = event_status;
  it->record_event = record_event;
  it->wait_for_event = wait_for_event;
  it->create_timer = create_timer;
  it->destroy_timer = destroy_timer;
  it->start_timer = it->stop_timer = use_timer;
  it->memcpy_dtoh = copy_to_host;
  it->memcpy_htod = copy_to_device;
  it->memcpy_dtod = copy_on_device;
  it->sync_memcpy_dtoh = copy_to_host_now;
  it->sync_memcpy_htod = copy_to_device_now;
  it->sync_memcpy_dtod = copy_on_device_now;
  it->block_host_for_event = block_for_event;
  it->block_host_until_done = block_until_done;
  it->synchronize_all_activity = synchronize;
  it->mem_zero = set_zero;
  it->memset = set_bytes;
  it->memset32 = set_words;
  it->host_callback = call_host;
  succeed(status);
}
void destroy_executor(const SP_Platform*, SP_StreamExecutor*) {}
void create_timer_fns(const SP_Platform*, SP_TimerFns* fns, TF_Status* status) {
  fns->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
  fns->nanoseconds = nanoseconds;
  succeed(status);
}
void destroy_timer_fns(const SP_Platform*, SP_TimerFns*) {}
void destroy_platform(SP_Platform*) {}
void destroy_platform_fns(SP_PlatformFns*) {}

}  // namespace
}  // namespace host_gpu

extern "C" HOST_GPU_EXPORT void SE_InitPlugin(SE_PlatformRegistrationParams* params,
                                              TF_Status* status) {
  using namespace host_gpu;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "WHALE_HOST";  // "HOST" is taken
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = false;
  params->platform->use_bfc_allocator = true;
  params->platform->force_memory_growth = false;
  SP_PlatformFns* fns = params->platform_fns;
  fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  fns->get_device_count = count_devices;
  fns->create_device = create_device;
  fns->destroy_device = destroy_device;
  fns->create_device_fns = create_device_fns;
  fns->destroy_device_fns = destroy_device_fns;
  fns->create_stream_executor = create_executor;
  fns->destroy_stream_executor = destroy_executor;
  fns->create_timer_fns = create_timer_fns;
  fns->destroy_timer_fns = destroy_timer_fns;
  params->destroy_platform = destroy_platform;
  params->destroy_platform_fns = destroy_platform_fns;
  const std::string error = register_late_kernels(std::getenv("HOST_GPU_KERNELS"));
  TF_SetStatus(status, error.empty() ? TF_OK : TF_INTERNAL, error.c_str());
}
