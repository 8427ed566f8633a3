// An op that passes its input on after some time, as a layer of known length: for benchmarks of
// schedules only.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

REGISTER_OP("BenchmarkSleep")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("seconds: float")
    .Attr("backward_s: float")
    .Attr("what: string")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

namespace {

using Clock = std::chrono::steady_clock;

class Sleep : public tensorflow::OpKernel {
 public:
  explicit Sleep(tensorflow::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("seconds", &seconds_));
    OP_REQUIRES_OK(c, c->GetAttr("what", &what_));
  }

  void Compute(tensorflow::OpKernelContext* c) override {
    const auto start = Clock::now();
    std::this_thread::sleep_until(start + std::chrono::duration<double>(seconds_));
    c->set_output(0, c->input(0));
    static const char* path = std::getenv("BENCHMARK_SLEEP_LOG");
    if (path == nullptr || what_.empty()) return;
    static std::mutex lock;
    static std::FILE* file =
        std::fopen((std::string(path) + std::to_string(getpid())).c_str(), "a");
    const double end = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    const double begin = std::chrono::duration<double>(start.time_since_epoch()).count();
    std::lock_guard<std::mutex> guard(lock);
    std::fprintf(file, "%s %.6f %.6f\n", what_.c_str(), begin, end);
    std::fflush(file);
  }

 private:
  float seconds_;
  std::string what_;
};

REGISTER_KERNEL_BUILDER(Name("BenchmarkSleep").Device(tensorflow::DEVICE_CPU), Sleep);

}  // namespace
