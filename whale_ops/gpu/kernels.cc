#include "whale_ops/gpu/kernels.h"

#include <algorithm>

#include "whale_ops/gpu/kernel_arguments.h"

namespace whale::cuda {
namespace {

// Blocks per tensor; a thread handles several elements of a large tensor.
constexpr int64_t kMaxBlocks = 1024;

// Returns null for dtypes without kernels.
const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    default: return nullptr;
  }
}

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
constexpr Reduction kReductions[] = {Reduction::kSum, Reduction::kMin, Reduction::kMax,
                                     Reduction::kProd};

std::string copy_name(bool packs, DType tensor, DType buffer) {
  return std::string(packs ? "pack_" : "unpack_") + dtype_name(tensor) + "_" + dtype_name(buffer);
}

std::string reduce_name(Reduction reduction, DType dtype) {
  return std::string("reduce_") + whale::name_of(reduction) + "_" + dtype_name(dtype);
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

Status launch(CUfunction kernel, unsigned blocks_x, unsigned blocks_y, void* argument,
              CUstream stream) {
  void* arguments[] = {argument};
  return check(driver().cuLaunchKernel(kernel, blocks_x, blocks_y, 1, kThreads, 1, 1, 0, stream,
                                       arguments, nullptr),
               "cuLaunchKernel");
}

Status copy_all(const Gpu& gpu, bool packs, const std::vector<Span>& tensors, DType tensor,
                void* buffer, DType dtype, float scale, CUstream stream) {
  if (!is_supported(tensor, dtype))
    return Status::Error(
        Code::kInvalidArgument,
        "no kernel for GPUs copies tensors of this dtype into a buffer of this dtype; report this");
  CUfunction kernel = nullptr;
  Status status = gpu.kernel(copy_name(packs, tensor, dtype), &kernel);
  int64_t offset = 0;
  for (size_t begin = 0; status.ok() && begin < tensors.size(); begin += kPieces) {
    const size_t end = std::min(begin + kPieces, tensors.size());
    CopyArguments arguments = {};
    arguments.buffer = buffer;
    arguments.scale = scale;
    int64_t largest = 0;
    for (size_t i = begin; i < end; ++i) {
      arguments.pieces[i - begin] = {tensors[i].data, offset, tensors[i].count};
      offset += tensors[i].count;
      largest = std::max(largest, tensors[i].count);
    }
    status =
        launch(kernel, blocks_for(largest), static_cast<unsigned>(end - begin), &arguments, stream);
  }
  return status;
}

}  // namespace

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const DType tensor : kFloats) {
    for (const DType buffer : kFloats) {
      for (const bool packs : {true, false}) {
        if (is_supported(tensor, buffer)) names.push_back(copy_name(packs, tensor, buffer));
      }
    }
    for (const Reduction reduction : kReductions) names.push_back(reduce_name(reduction, tensor));
  }
  return names;
}

size_t bytes_of(DType dtype) {
  return dtype_name(dtype) == nullptr ? 0
         : dtype == DType::kFloat64   ? 8
         : dtype == DType::kFloat32   ? 4
                                      : 2;
}

bool is_supported(DType tensor, DType buffer) {
  const bool narrow = buffer == DType::kFloat16 || buffer == DType::kBFloat16;
  if (tensor == DType::kFloat32) return narrow || buffer == tensor;
  return tensor == buffer && (narrow || tensor == DType::kFloat64);
}

Status pack(const Gpu& gpu, const std::vector<Span>& tensors, DType tensor, void* buffer,
            DType dtype, float scale, CUstream stream) {
  return copy_all(gpu, true, tensors, tensor, buffer, dtype, scale, stream);
}

Status unpack(const Gpu& gpu, const void* buffer, DType dtype, const std::vector<Span>& tensors,
              DType tensor, float scale, CUstream stream) {
  return copy_all(gpu, false, tensors, tensor, const_cast<void*>(buffer), dtype, scale, stream);
}

Status reduce(const Gpu& gpu, const std::vector<const void*>& sources, void* dst, int64_t count,
              DType dtype, Reduction reduction, CUstream stream) {
  if (sources.empty() || sources.size() > kMaxSources || dtype_name(dtype) == nullptr) {
    return Status::Error(Code::kInvalidArgument,
                         "no kernel for GPUs reduces buffers of this dtype, or of more than " +
                             std::to_string(kMaxSources) + " ranks");
  }
  ReduceArguments arguments = {};
  std::copy(sources.begin(), sources.end(), arguments.sources);
  arguments.dst = dst;
  arguments.count = count;
  arguments.size = static_cast<int>(sources.size());
  CUfunction kernel = nullptr;
  const Status status = gpu.kernel(reduce_name(reduction, dtype), &kernel);
  return status.ok() ? launch(kernel, blocks_for(count), 1, &arguments, stream) : status;
}

}  // namespace whale::cuda
