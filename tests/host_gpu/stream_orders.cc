// Exchanges between GPUs of the host in groups that overlap, many of them in stream: the core and
// whale_ops/gpu, with the stand-ins of the driver and of NCCL, and no TensorFlow. What computes is
// a stream on which operands are written behind whatever was queued before, and results are
// compared and their memory given back behind the exchange; so a sanitizer sees who does not wait.
// tests/whale_ops/sanitize.py compiles and runs it:
//
//   stream_orders LIBRARY ORDERS TRANSPORT SEED [FAULT KERNELS_MS]
//
// LIBRARY: the kernels as host code. FAULT: of the driver (streams.h), after which this ends with
// an error if whoever does not wait comes before kernels end, which take so many milliseconds.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "tests/host_gpu/streams.h"
#include "tests/whale_ops/core/overlapping_groups.h"
#include "whale_ops/gpu/driver.h"

extern "C" const whale::DevicePlugin whale_device_plugin;  // whale_ops/gpu
extern "C" void host_gpu_plant(int fault);

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::_Exit(1);
}

namespace {

constexpr int kRanks = 4;
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

int own_device(int rank) { return rank; }

// What lies in a GPU's memory, as long as the stream has not come behind the exchange.
struct Tensors {
  std::vector<double> input, output;
};

// A side's operation, between tensors of its own. All-reduces of an even number of elements are of
// two tensors, which are packed; others travel as they are.
DeviceOperation between(const Side& side, Tensors* tensors) {
  DeviceOperation what = side.what;
  const int64_t count = what.tensors[0].count;
  const double* input = tensors->input.data();
  double* output = tensors->output.data();
  what.tensors = {{input, output, count}};
  if (what.kind == OpKind::kAllReduce && count > 0 && count % 2 == 0) {
    const int64_t first = count / 2;
    what.tensors = {{input, output, first}, {input + first, output + first, count - first}};
  }
  return what;
}

// `kernels_take`: what writes the operands.
void exchange(int orders, const char* transport, unsigned seed,
              std::chrono::milliseconds kernels_take) {
  // CUDA IPC has room for a part of each rank, at the places that kernels want.
  const bool divides = std::strcmp(transport, "cuda-ipc") == 0;
  Ranks ranks("stream orders", kRanks, whale_device_plugin, transport, own_device,
              divides ? 4096 : kBufferBytes);
  std::atomic<int> in_stream{0};
  ranks.each([&](int rank) {
    host_gpu::Gpu* gpu = host_gpu::gpus()[static_cast<size_t>(rank)].get();
    host_gpu::Stream* stream = gpu->make_stream();
    gpu->compute_on(stream);
    const auto device = ranks.device(rank);
    const auto start = [&, stream](const Flight& flight, const Step& next, const Step& ended) {
      const Side* side = flight.side.get();
      auto tensors = std::make_shared<Tensors>();
      tensors->input.assign(side->input.size(), kNothing);
      tensors->output.assign(side->output.size(), kNothing);
      stream->call([=] {
        std::this_thread::sleep_for(kernels_take);
        std::copy(side->input.begin(), side->input.end(), tensors->input.begin());
      });
      whale::DeviceCall call;
      call.text = std::to_string(flight.exchange.count);
      call.what = between(*side, tensors.get());
      call.what.key = flight.exchange.key();
      // As of a step: nothing waits for it at once, or the stream does. Equal on all ranks.
      call.in_stream = flight.exchange.seed % 4 != 0;
      const auto take = [=, key = flight.exchange.key()] {
        require(tensors->output == side->wanted, "GPUs exchange what they should: " + key);
        *tensors = Tensors();  // given back: whoever uses it now is late
      };
      if (call.in_stream) ++in_stream;
      call.done = [=, on_stream = call.in_stream](const whale::Status& status) {
        require(status.ok(), status.message);
        if (!on_stream) take();
        next();
        if (!on_stream) return ended();
        stream->call([=] {
          take();
          ended();
        });
      };
      device->start(std::move(call));
    };
    in_random_orders(rank, kRanks, orders, seed, start);
    stream->drain();
  });
  std::printf("%d orders through %s, %d exchanges of ranks in stream\n", orders, transport,
              in_stream.load());
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 5 || count == 7, "arguments: LIBRARY ORDERS TRANSPORT SEED [FAULT KERNELS_MS]");
  const std::string image = std::string("HOST:") + arguments[1];
  for (int rank = 0; rank < kRanks; ++rank) {
    const whale::Status loaded = whale::cuda::Gpu::load_kernels(rank, image.c_str());
    require(loaded.ok(), loaded.message);
  }
  if (count > 5) host_gpu_plant(std::atoi(arguments[5]));
  // Ranks meet before they exchange: what nobody waits for has to be later than that.
  exchange(std::atoi(arguments[2]), arguments[3], static_cast<unsigned>(std::atoi(arguments[4])),
           std::chrono::milliseconds(count > 5 ? std::atoi(arguments[6]) : 0));
  whale::Engine::instance().stop();
}
