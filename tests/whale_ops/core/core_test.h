// The parts of the core's test: each ends the program with an error where the core is wrong.
#pragma once

#include <string>

constexpr double kTimeoutS = 30.0;

void require(bool condition, const std::string& what);
// For millions of elements: no text is made where nothing is wrong.
inline void require(bool condition, const char* what) {
  if (!condition) require(false, std::string(what));
}

// core_test_schedules.cc: schedules whose messages fit together.
void schedules();

// core_test_products.cc: products of small matrices, by each code that this processor has.
void products();

// core_test_loops.cc: turns of a loop, by each code that this processor has.
void loops();

// core_test_ranks.cc: ranks as threads over the in-process transport.
void sums(int size);
void disagreement();
void abort_while_waiting();

// core_test_order.cc: operations that start in one order on all ranks.
void one_order_of_starts(int size);
void starts_that_fail();

// core_test_device.cc: ranks whose devices exchange what lies in their memory
// (tests/whale_ops/gpu/host_device.cc).
void overlapping_groups(int size, int orders, unsigned seed, const char* transport);
void devices_that_hang(int size);

// core_test_blocks.cc: blocks of memory that threads take and give back.
void blocks();

// core_test_memory.cc: ranks as threads that exchange as processes do.
void shared_memory(int size);
void submitting_threads(int size);
void sockets(int size);
