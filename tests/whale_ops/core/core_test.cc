// The core without Python. Bazel runs it, also under the thread and the address sanitizer (bazel
// test --config=tsan
// //tests:core_cc_test), and tests/whale_ops/sanitize.py does.
#include "tests/whale_ops/core/core_test.h"

#include <cstdio>
#include <cstdlib>

#include "whale_ops/core/c_api/c_api.h"
#include "whale_ops/core/device/device_rank.h"
#include "whale_ops/core/transport/arena.h"

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// Arguments: how many orders of overlapping groups are tried, and from which seed on.
int main(int count, char** arguments) {
  schedules();
  products();
  loops();
  blocks();
  for (const int size : {1, 2, 3, 5}) sums(size);
  disagreement();
  abort_while_waiting();
  for (const int size : {1, 2, 3, 5}) one_order_of_starts(size);
  starts_that_fail();
  const int orders = count > 1 ? std::atoi(arguments[1]) : 1000;
  const auto seed = static_cast<unsigned>(count > 2 ? std::atoi(arguments[2]) : 0);
  overlapping_groups(4, orders, seed, "");
  overlapping_groups(7, orders / 10, seed, "");
  overlapping_groups(4, orders / 10, seed, whale::kPinned);
  devices_that_hang(4);
  for (const int size : {2, 3, 4}) shared_memory(size);
  for (const int size : {2, 3}) submitting_threads(size);
  for (const int size : {2, 3, 4}) sockets(size);
  require(whale::Arena::open(256 << 20) == 0, "an arena can be made");
  for (const int size : {2, 3, 4}) shared_memory(size);
  whale_stop();
  std::puts("core: all well");
}
