// Threads on the cores of ranks that wait, for a step that one rank computes for all of a host.
#pragma once

#include <functional>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace whale_ops {

// Two pools, as TensorFlow has them: operations run on one, and divide their work among the threads
// of the other, which may wait for nothing of the first. Made when first asked for, and kept:
// TensorFlow's own have as many threads as the rank was started with.
struct BorrowedThreads {
  tensorflow::thread::ThreadPoolInterface* within_operations;
  std::function<void(std::function<void()>)> run_operation;

  static BorrowedThreads& of(int count);
};

}  // namespace whale_ops
