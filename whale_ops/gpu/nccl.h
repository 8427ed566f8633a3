// The part of NCCL that exchanges need, loaded from libnccl.so.2 when a run asks for it, so that
// NCCL need not be installed where this is compiled. Names, numbers and layouts are those of nccl.h
// since NCCL 2.14.
#pragma once

#include <cstddef>

#include "whale_ops/core/base/types.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

using ncclComm_t = struct ncclComm*;
using ncclResult_t = int;
struct ncclUniqueId {
  char internal[128];
};
constexpr ncclResult_t ncclSuccess = 0, ncclInProgress = 7;
// ncclConfig_t as of NCCL 2.14; later versions use defaults for the fields that they have added.
struct ncclConfig {
  size_t size = sizeof(ncclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
constexpr int ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3;
constexpr int ncclInt8 = 0, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9;

#define WHALE_NCCL_CALLS(CALL)                                                                     \
  CALL(ncclGetErrorString, const char*, (ncclResult_t result))                                     \
  CALL(ncclGetUniqueId, ncclResult_t, (ncclUniqueId * id))                                         \
  CALL(ncclCommInitRankConfig, ncclResult_t,                                                       \
       (ncclComm_t * made, int ranks, ncclUniqueId id, int rank, ncclConfig* config))              \
  CALL(ncclCommDestroy, ncclResult_t, (ncclComm_t communicator))                                   \
  CALL(ncclCommAbort, ncclResult_t, (ncclComm_t communicator))                                     \
  CALL(ncclCommGetAsyncError, ncclResult_t, (ncclComm_t communicator, ncclResult_t * error))       \
  CALL(ncclGroupStart, ncclResult_t, ())                                                           \
  CALL(ncclGroupEnd, ncclResult_t, ())                                                             \
  CALL(ncclAllReduce, ncclResult_t,                                                                \
       (const void* in, void* out, size_t count, int type, int operation, ncclComm_t communicator, \
        CUstream stream))                                                                          \
  CALL(ncclReduceScatter, ncclResult_t,                                                            \
       (const void* in, void* out, size_t count, int type, int operation, ncclComm_t communicator, \
        CUstream stream))                                                                          \
  CALL(ncclReduce, ncclResult_t,                                                                   \
       (const void* in, void* out, size_t count, int type, int operation, int root,                \
        ncclComm_t communicator, CUstream stream))                                                 \
  CALL(ncclAllGather, ncclResult_t,                                                                \
       (const void* in, void* out, size_t count, int type, ncclComm_t communicator,                \
        CUstream stream))                                                                          \
  CALL(ncclBroadcast, ncclResult_t,                                                                \
       (const void* in, void* out, size_t count, int type, int root, ncclComm_t communicator,      \
        CUstream stream))                                                                          \
  CALL(ncclSend, ncclResult_t,                                                                     \
       (const void* in, size_t count, int type, int peer, ncclComm_t communicator,                 \
        CUstream stream))                                                                          \
  CALL(ncclRecv, ncclResult_t,                                                                     \
       (void* out, size_t count, int type, int peer, ncclComm_t communicator, CUstream stream))

struct Nccl {
#define WHALE_NCCL_CALL(name, Result, arguments) Result(*name) arguments = nullptr;
  WHALE_NCCL_CALLS(WHALE_NCCL_CALL)
#undef WHALE_NCCL_CALL
  const char* (*ncclGetLastError)(ncclComm_t communicator) = nullptr;  // since 2.13
};

}  // namespace whale::cuda
