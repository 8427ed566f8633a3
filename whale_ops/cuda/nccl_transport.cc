#include <string>
#include <utility>
#include <vector>

#include "whale_ops/cuda/transport.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

namespace whale::cuda {
namespace {

Status check_nccl(ncclResult_t result, const char* call, ncclComm_t communicator) {
  if (result == ncclSuccess) return Status::Ok();
  return Status::Error(Code::kUnavailable, std::string(call) + " failed: " + ncclGetErrorString(result) + " (" +
                                               ncclGetLastError(communicator) + "); NCCL_DEBUG=WARN tells more");
}

bool type_of(DType dtype, ncclDataType_t* type) {
  switch (dtype) {
    case DType::kFloat16: *type = ncclFloat16; return true;
    case DType::kBFloat16: *type = ncclBfloat16; return true;
    case DType::kFloat32: *type = ncclFloat32; return true;
    case DType::kFloat64: *type = ncclFloat64; return true;
    default: return false;
  }
}

ncclRedOp_t operation_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return ncclSum;
    case Reduction::kMin: return ncclMin;
    case Reduction::kMax: return ncclMax;
    case Reduction::kProd: return ncclProd;
  }
  return ncclSum;
}

class NcclTransport final : public DeviceTransport {
 public:
  explicit NcclTransport(ncclComm_t communicator) : communicator_(communicator) {}
  ~NcclTransport() override {
    if (communicator_ != nullptr) ncclCommDestroy(communicator_);
  }

  const char* name() const override { return "nccl"; }

  Status all_reduce(void* buffer, int64_t count, DType dtype, Reduction reduction, cudaStream_t stream) override {
    ncclDataType_t type;
    if (!type_of(dtype, &type)) return Status::Error(Code::kInvalidArgument, "NCCL adds floats here; cast the tensor first");
    const ncclResult_t result =
        ncclAllReduce(buffer, buffer, static_cast<size_t>(count), type, operation_of(reduction), communicator_, stream);
    return check_nccl(result, "ncclAllReduce", communicator_);
  }

  // Its kernels wait for other ranks' as long as nobody tells them to end.
  void abandon() override {
    if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
  }

 private:
  ncclComm_t communicator_;
};

}  // namespace

Status open_nccl(int rank, int size, const DeviceGather& gather, std::unique_ptr<DeviceTransport>* transport) {
  ncclUniqueId mine = {};
  ncclResult_t made = rank == 0 ? ncclGetUniqueId(&mine) : ncclSuccess;
  std::vector<ncclUniqueId> all(static_cast<size_t>(size));
  Status status = gather(&mine, sizeof(mine), all.data());  // also when the first rank has none: the others wait for it
  if (status.ok()) status = check_nccl(made, "ncclGetUniqueId", nullptr);
  if (!status.ok()) return status;
  ncclComm_t communicator = nullptr;
  status = check_nccl(ncclCommInitRank(&communicator, size, all[0], rank), "ncclCommInitRank", nullptr);
  if (status.ok()) *transport = std::make_unique<NcclTransport>(communicator);
  return status;
}

}  // namespace whale::cuda

#else

namespace whale::cuda {

Status open_nccl(int, int, const DeviceGather&, std::unique_ptr<DeviceTransport>*) {
  return Status::Error(Code::kUnavailable, "this library was built without NCCL; pip install nvidia-nccl-cu12, then python -m whale_ops.build_cuda");
}

}  // namespace whale::cuda

#endif
