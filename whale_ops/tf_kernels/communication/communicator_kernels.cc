// The communicator's handle, Barrier and Check.
#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/progress/exchange.h"
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

class CommunicatorOp : public OpKernel {
 public:
  explicit CommunicatorOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    read(ctx, "communicator", &name_, "rank", &rank_);
  }
  void Compute(OpKernelContext* ctx) override {
    whale::Status status;
    const EndpointPtr endpoint = whale::Engine::instance().find(name_, rank_, &status);
    OP_REQUIRES_OK(ctx, exchange_error(status));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    // The handle holds the only reference, so that the communicator's lifetime does not depend on a
    // session's resource manager.
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(new CommunicatorResource(endpoint),
                                                          ctx->device()->name());
  }

 private:
  std::string name_;
  int rank_ = -1;
};

class BarrierOp : public CommunicationOp {
 public:
  using CommunicationOp::CommunicationOp;

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    return launch_last(ctx, group, make_request(whale::OpKind::kBarrier, tensorflow::DT_UINT8, ""),
                       std::move(*done));
  }
};

// Checks with one message in each direction, since a round trip between hosts takes longer than
// many a step. Descriptions are exchanged only if the ranks' digests differ.
class CheckOp : public CommunicationOp {
 public:
  explicit CheckOp(OpKernelConstruction* ctx) : CommunicationOp(ctx) {
    read(ctx, "fingerprint", &fingerprint_, "what", &what_);
  }

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    auto digests = std::make_shared<std::vector<uint64_t>>(group.size);
    auto own = std::make_shared<uint64_t>(whale::hash64(fingerprint_));
    whale::Request request =
        make_request(whale::OpKind::kAllGather, tensorflow::DT_UINT64, "digests of fingerprints");
    request.dtype_name = whale::kBytes;  // data beside tensors
    request.counts.assign(group.size, 1);
    request.input = own.get();
    request.output = digests->data();
    request.owner =
        std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(own, digests);
    launch(ctx, group, std::move(request),
           [this, ctx, group, digests, done = std::move(*done)](const whale::Status& status) {
             const auto differs = [&](uint64_t digest) { return digest != digests->front(); };
             if (!status.ok() || std::none_of(digests->begin(), digests->end(), differs))
               return end(ctx, status, done);
             explain(ctx, group, done);
           });
    return absl::OkStatus();
  }

 private:
  void explain(OpKernelContext* ctx, const Group& group, const DoneCallback& done) const {
    launch_with(
        ctx, group,
        [this, endpoint = group.endpoint](uint64_t id, whale::BytesCallback finished) {
          whale::gather_bytes(endpoint, id, key() + "/said", "fingerprints", "", ranks(),
                              fingerprint_ + '\0' + what_, std::move(finished));
        },
        [this, ctx, endpoint = group.endpoint, done](const whale::Status& status,
                                                     const std::vector<std::string>& parts) {
          whale::Status outcome = status;
          if (status.ok()) outcome = compare(parts);
          // Every rank of the group sees the difference; the abort informs ranks outside of the
          // group.
          if (status.ok() && !outcome.ok()) endpoint->abort(outcome);
          end(ctx, outcome, done);
        });
  }

  whale::Status compare(const std::vector<std::string>& parts) const {
    std::map<std::string, std::vector<int>> ranks_by_part;
    for (size_t i = 0; i < parts.size(); ++i) {
      ranks_by_part[parts[i]].push_back(group_rank(static_cast<int>(i)));
    }
    const std::string first = parts[0].substr(0, parts[0].find('\0'));
    bool equal = true;
    for (const auto& [part, members] : ranks_by_part)
      equal = equal && part.substr(0, part.find('\0')) == first;
    if (equal) return whale::Status::Ok();
    std::string message = "the ranks are about to run different things: ";
    for (const auto& [part, members] : ranks_by_part) {
      const size_t split = part.find('\0');
      message += (members.size() == 1 ? "rank " : "ranks ") + whale::join_ranks(members) + ": " +
                 part.substr(split + 1) + " (fingerprint " + part.substr(0, split) + "); ";
    }
    return whale::Status::Error(
        whale::Code::kInvalidArgument,
        message + "run the same script with the same arguments and data shapes on every rank");
  }

  std::string fingerprint_;
  std::string what_;
};

}  // namespace

WHALE_CPU_KERNEL("WhaleCommunicator", CommunicatorOp);
WHALE_CPU_KERNEL("WhaleBarrier", BarrierOp);
WHALE_CPU_KERNEL("WhaleCheck", CheckOp);

}  // namespace whale_ops
