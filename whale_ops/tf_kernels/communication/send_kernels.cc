// Send and Recv.
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

class SendOp : public TensorOp {
 public:
  explicit SendOp(OpKernelConstruction* ctx) : TensorOp(ctx) { read(ctx, "peer", &peer_); }

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    const Tensor& input = ctx->input(1);
    whale::Request request = request_of(whale::OpKind::kSend, "");
    request.root = peer_;
    request.counts = {input.NumElements()};
    for (int d = 0; d < input.dims(); ++d) request.dims.push_back(input.dim_size(d));
    request.input = data_of(input);
    request.owner = owner_of(input);
    return launch_last(ctx, group, std::move(request), std::move(*done));
  }

 private:
  int peer_ = 0;
};

class RecvOp : public TensorOp {
 public:
  explicit RecvOp(OpKernelConstruction* ctx) : TensorOp(ctx) {
    read(ctx, "peer", &peer_, "shape", &shape_);
  }

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    whale::Request request = request_of(whale::OpKind::kRecv, "");
    request.root = peer_;
    request.counts = {0};
    auto held = std::make_shared<Tensor>();
    request.place = [this, ctx, held = held.get()](const std::vector<int64_t>& dims, uint64_t bytes,
                                                   void** destination) {
      TensorShape sent;
      for (const int64_t dim : dims) sent.AddDim(dim);
      const whale::Status fits = check_sent(key(), peer_, sent, shape_);
      if (!fits.ok()) return fits;
      Tensor* output = nullptr;
      const absl::Status status = ctx->allocate_output(0, sent, &output);
      if (!status.ok() || output->TotalBytes() != bytes) {
        return whale::Status::Error(
            whale::Code::kInternal,
            absl::StrCat("Recv '", key(), "': memory for shape ", sent.DebugString(),
                         " could not be had: ", std::string(status.message())));
      }
      *held = *output;
      *destination = data_of(*output);
      return whale::Status::Ok();
    };
    request.owner = std::move(held);
    return launch_last(ctx, group, std::move(request), std::move(*done));
  }

 private:
  int peer_ = 0;
  PartialTensorShape shape_;
};

}  // namespace

WHALE_CPU_KERNEL("WhaleSend", SendOp);
WHALE_CPU_KERNEL("WhaleRecv", RecvOp);

}  // namespace whale_ops
