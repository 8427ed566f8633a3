// Threads on the cores of waiting ranks, for a step that one rank computes on behalf of all ranks
// of a host.
#pragma once

#include <functional>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace whale_ops {

// Two pools, as TensorFlow has them: operations run on one, and share their work among the threads
// of the other, whose work must not wait for the first. Created on demand and kept, since
// TensorFlow's own pools have only as many threads as the rank was started with.
struct BorrowedThreads {
  tensorflow::thread::ThreadPoolInterface* within_operations;
  std::function<void(std::function<void()>)> run_operation;

  static BorrowedThreads& of(int count);
};

}  // namespace whale_ops
