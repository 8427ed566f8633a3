// Recurrent layers of cuDNN (CudnnRNNV3) as kernels for processors, which TensorFlow has not: LSTM
// and GRU of one layer and one direction, as Keras calls them. late_kernels.cc lets them stand for
// those of GPUs. Of each row and step the reserve space has what the gradient needs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace host_gpu {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// y[units] += w[units, inputs] x
template <typename T>
void add_product(const T* w, const T* x, int64_t units, int64_t inputs, T* y) {
  for (int64_t u = 0; u < units; ++u) {
    for (int64_t i = 0; i < inputs; ++i) y[u] += w[u * inputs + i] * x[i];
  }
}

// The gradients of that: dw += dy x^T, dx += w^T dy.
template <typename T>
void add_gradients(const T* w, const T* x, const T* dy, int64_t units, int64_t inputs, T* dw,
                   T* dx) {
  for (int64_t u = 0; u < units; ++u) {
    for (int64_t i = 0; i < inputs; ++i) {
      dw[u * inputs + i] += dy[u] * x[i];
      dx[i] += w[u * inputs + i] * dy[u];
    }
  }
}

// Sizes, and where things lie. Weights are one matrix [units, inputs] for each gate, then those of
// the state, then the biases of both. Gates: i, f, c, o of an LSTM; z, r, n of a GRU, which is the
// order of a TensorFlow without CUDA.
struct Layer {
  bool lstm = true, time_major = false;
  int64_t rows = 0, steps = 0, inputs = 0, units = 0;

  int64_t gates() const { return lstm ? 4 : 3; }
  int64_t kept() const {
    return (lstm ? 5 : 4) * units;
  }  // of a row and step, in the reserve space
  int64_t at(int64_t row, int64_t step) const {
    return time_major ? step * rows + row : row * steps + step;
  }
  int64_t of_input(int64_t gate) const { return gate * units * inputs; }
  int64_t of_state(int64_t gate) const { return gates() * units * inputs + gate * units * units; }
  int64_t bias(int64_t gate, bool of_state) const {
    return gates() * units * (inputs + units) + ((of_state ? gates() : 0) + gate) * units;
  }
};

class CudnnRnn : public OpKernel {
 public:
  explicit CudnnRnn(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string mode, direction, input_mode;
    float dropout = 0;
    int projected = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rnn_mode", &mode));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("direction", &direction));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("input_mode", &input_mode));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dropout", &dropout));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_proj", &projected));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time_major", &layer_.time_major));
    layer_.lstm = mode == "lstm";
    OP_REQUIRES(ctx,
                (mode == "lstm" || mode == "gru") && direction == "unidirectional" &&
                    input_mode == "linear_input" && dropout == 0 && projected == 0,
                absl::UnimplementedError("not among cuDNN's layers that have a stand-in"));
  }

 protected:
  Layer layer_of(OpKernelContext* ctx) const {
    Layer layer = layer_;
    const Tensor& input = ctx->input(0);
    layer.rows = input.dim_size(layer.time_major ? 1 : 0);
    layer.steps = input.dim_size(layer.time_major ? 0 : 1);
    layer.inputs = input.dim_size(2);
    layer.units = ctx->input(1).dim_size(2);
    return layer;
  }
  Layer layer_;
};

template <typename T>
const T* data(const Tensor& tensor) {
  return tensor.flat<T>().data();
}

template <typename T>
class Forward final : public CudnnRnn {
 public:
  using CudnnRnn::CudnnRnn;
  void Compute(OpKernelContext* ctx) override {
    const Layer layer = layer_of(ctx);
    const int64_t units = layer.units;
    TensorShape shape = ctx->input(0).shape();
    shape.set_dim(2, units);
    Tensor *output = nullptr, *last_h = nullptr, *last_c = nullptr, *reserve = nullptr,
           *host = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &output));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ctx->input(1).shape(), &last_h));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            2, layer.lstm ? ctx->input(1).shape() : TensorShape({}), &last_c));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            3, TensorShape({layer.rows * layer.steps * layer.kept()}), &reserve));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({0}), &host));
    const T *x = data<T>(ctx->input(0)), *w = data<T>(ctx->input(3));
    const auto lengths = ctx->input(4).flat<int>();
    std::fill_n(output->flat<T>().data(), output->NumElements(), T(0));
    std::fill_n(reserve->flat<T>().data(), reserve->NumElements(), T(0));
    if (!layer.lstm) std::fill_n(last_c->flat<T>().data(), last_c->NumElements(), T(0));
    for (int64_t row = 0; row < layer.rows; ++row) {
      std::vector<T> h(data<T>(ctx->input(1)) + row * units,
                       data<T>(ctx->input(1)) + (row + 1) * units),
          c(static_cast<size_t>(units));
      if (layer.lstm) std::copy_n(data<T>(ctx->input(2)) + row * units, units, c.data());
      for (int64_t step = 0; step < lengths(row); ++step) {
        T* kept = reserve->flat<T>().data() + layer.at(row, step) * layer.kept();
        turn(layer, x + layer.at(row, step) * layer.inputs, w, h.data(), c.data(), kept);
        std::copy_n(h.data(), units, output->flat<T>().data() + layer.at(row, step) * units);
      }
      std::copy_n(h.data(), units, last_h->flat<T>().data() + row * units);
      if (layer.lstm) std::copy_n(c.data(), units, last_c->flat<T>().data() + row * units);
    }
  }

 private:
  static void turn(const Layer& layer, const T* x, const T* w, T* h, T* c, T* kept) {
    const int64_t units = layer.units;
    std::vector<T> of_input(static_cast<size_t>(units)), of_state(static_cast<size_t>(units));
    for (int64_t gate = 0; gate < layer.gates(); ++gate) {
      std::copy_n(w + layer.bias(gate, false), units, of_input.data());
      std::copy_n(w + layer.bias(gate, true), units, of_state.data());
      add_product(w + layer.of_input(gate), x, units, layer.inputs, of_input.data());
      add_product(w + layer.of_state(gate), h, units, units, of_state.data());
      T* made = kept + gate * units;
      for (int64_t u = 0; u < units; ++u) {
        const auto i = static_cast<size_t>(u);
        if (layer.lstm) {
          const T sum = of_input[i] + of_state[i];
          made[u] = gate == 2 ? std::tanh(sum) : sigmoid(sum);
        } else if (gate == 2) {
          kept[3 * units + u] = of_state[i];
          made[u] = std::tanh(of_input[i] + kept[units + u] * of_state[i]);
        } else {
          made[u] = sigmoid(of_input[i] + of_state[i]);
        }
      }
    }
    for (int64_t u = 0; u < units; ++u) {
      if (layer.lstm) {
        c[u] = kept[units + u] * c[u] + kept[u] * kept[2 * units + u];
        kept[4 * units + u] = c[u];
        h[u] = kept[3 * units + u] * std::tanh(c[u]);
      } else {
        h[u] = (T(1) - kept[u]) * kept[2 * units + u] + kept[u] * h[u];
      }
    }
  }
};

template <typename T>
class Backward final : public CudnnRnn {
 public:
  using CudnnRnn::CudnnRnn;
  void Compute(OpKernelContext* ctx) override {
    const Layer layer = layer_of(ctx);
    const int64_t units = layer.units;
    const auto size = static_cast<size_t>(units);
    std::vector<Tensor*> made(4);
    for (int i = 0; i < 4; ++i) {
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_output(i, ctx->input(i).shape(), &made[static_cast<size_t>(i)]));
      auto flat = made[static_cast<size_t>(i)]->flat<T>();
      std::fill_n(flat.data(), flat.size(), T(0));
    }
    T *dx = made[0]->flat<T>().data(), *dw = made[3]->flat<T>().data();
    const T *x = data<T>(ctx->input(0)), *w = data<T>(ctx->input(3)),
            *output = data<T>(ctx->input(5)), *d_output = data<T>(ctx->input(8)),
            *reserve = data<T>(ctx->input(11));
    const auto lengths = ctx->input(4).flat<int>();
    for (int64_t row = 0; row < layer.rows; ++row) {
      const T* first_h = data<T>(ctx->input(1)) + row * units;
      const T* first_c = layer.lstm ? data<T>(ctx->input(2)) + row * units : nullptr;
      std::vector<T> dh(data<T>(ctx->input(9)) + row * units,
                        data<T>(ctx->input(9)) + (row + 1) * units),
          dc(size);
      if (layer.lstm) std::copy_n(data<T>(ctx->input(10)) + row * units, units, dc.data());
      for (int64_t step = lengths(row) - 1; step >= 0; --step) {
        const int64_t at = layer.at(row, step);
        for (int64_t u = 0; u < units; ++u) dh[static_cast<size_t>(u)] += d_output[at * units + u];
        const T* h = step == 0 ? first_h : output + layer.at(row, step - 1) * units;
        const T* c = !layer.lstm ? nullptr
                     : step == 0 ? first_c
                                 : reserve + layer.at(row, step - 1) * layer.kept() + 4 * units;
        turn(layer, x + at * layer.inputs, w, h, c, reserve + at * layer.kept(), dh.data(),
             dc.data(), dx + at * layer.inputs, dw);
      }
      std::copy_n(dh.data(), units, made[1]->flat<T>().data() + row * units);
      if (layer.lstm) std::copy_n(dc.data(), units, made[2]->flat<T>().data() + row * units);
    }
  }

 private:
  // `dh`, `dc`: of what the step gives, and then of what it was given.
  static void turn(const Layer& layer, const T* x, const T* w, const T* h, const T* c,
                   const T* kept, T* dh, T* dc, T* dx, T* dw) {
    const int64_t units = layer.units;
    const auto size = static_cast<size_t>(units);
    // Of the sums of each gate over the input, and over the state.
    std::vector<std::vector<T>> of_input(static_cast<size_t>(layer.gates()), std::vector<T>(size));
    std::vector<std::vector<T>> of_state = of_input;
    std::vector<T> earlier(size);
    for (int64_t u = 0; u < units; ++u) {
      const auto i = static_cast<size_t>(u);
      if (layer.lstm) {
        const T in = kept[u], forget = kept[units + u], cell = kept[2 * units + u],
                out = kept[3 * units + u], tanh_c = std::tanh(kept[4 * units + u]);
        const T d_c = dc[u] + dh[u] * out * (T(1) - tanh_c * tanh_c);
        of_input[0][i] = d_c * cell * in * (T(1) - in);
        of_input[1][i] = d_c * c[u] * forget * (T(1) - forget);
        of_input[2][i] = d_c * in * (T(1) - cell * cell);
        of_input[3][i] = dh[u] * tanh_c * out * (T(1) - out);
        for (size_t gate = 0; gate < 4; ++gate) of_state[gate][i] = of_input[gate][i];
        dc[u] = d_c * forget;
      } else {
        const T z = kept[u], r = kept[units + u], n = kept[2 * units + u], q = kept[3 * units + u];
        const T d_n = dh[u] * (T(1) - z) * (T(1) - n * n);
        of_input[0][i] = of_state[0][i] = dh[u] * (h[u] - n) * z * (T(1) - z);
        of_input[1][i] = of_state[1][i] = d_n * q * r * (T(1) - r);
        of_input[2][i] = d_n;
        of_state[2][i] = d_n * r;
        earlier[i] = dh[u] * z;
      }
    }
    for (int64_t gate = 0; gate < layer.gates(); ++gate) {
      const auto g = static_cast<size_t>(gate);
      add_gradients(w + layer.of_input(gate), x, of_input[g].data(), units, layer.inputs,
                    dw + layer.of_input(gate), dx);
      add_gradients(w + layer.of_state(gate), h, of_state[g].data(), units, units,
                    dw + layer.of_state(gate), earlier.data());
      for (int64_t u = 0; u < units; ++u) {
        dw[layer.bias(gate, false) + u] += of_input[g][static_cast<size_t>(u)];
        dw[layer.bias(gate, true) + u] += of_state[g][static_cast<size_t>(u)];
      }
    }
    std::copy_n(earlier.data(), units, dh);
  }
};

#define HOST_GPU_RNN(T)                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("CudnnRNNV3").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), Forward<T>); \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("CudnnRNNBackpropV3").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),      \
      Backward<T>)

HOST_GPU_RNN(float);
HOST_GPU_RNN(double);

}  // namespace
}  // namespace host_gpu
