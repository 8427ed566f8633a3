// Runs the turns of a loop, given as a LoopProgram.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "whale_ops/core/base/types.h"
#include "whale_ops/core/compute/loop_program.h"
#include "whale_ops/core/compute/processor.h"

namespace whale {

// Where the tensors of a loop lie.
template <typename T>
struct LoopBuffers {
  // A tensor of which each turn reads a slice: turn t begins at element `first + t * step`.
  struct Sliced {
    const T* data;
    int64_t first, step;
  };
  // A state: its value before the first turn, and where its value after the last turn is written.
  struct State {
    const T* initial;
    T* last;
    int64_t elements;
  };
  // A stacked result: turn t writes its slice at element `t * elements`.
  struct Stacked {
    T* data;
    int64_t elements;
  };
  std::vector<Sliced> slices;
  std::vector<const T*> same;
  std::vector<State> states;
  std::vector<Stacked> stacked;
};

// Calls `work(begin, end)` for parts of [0, count), possibly in parallel. `cycles`: approximate
// cost of one of the `count` items.
using Parallel = std::function<void(int64_t count, int64_t cycles,
                                    const std::function<void(int64_t, int64_t)>& work)>;

// Runs turns of a loop, one after the other. Threads share products by columns and elements by
// rows, so results are the same for any number of threads.
template <typename T>
WHALE_EXPORT void run_loop(const LoopProgram& program, const LoopBuffers<T>& buffers, int64_t turns,
                           const Parallel& parallel);
// The same with a given code path of the processor.
template <typename T>
WHALE_EXPORT void run_loop_by(ProcessorCode code, const LoopProgram& program,
                              const LoopBuffers<T>& buffers, int64_t turns,
                              const Parallel& parallel);

extern template void run_loop<float>(const LoopProgram&, const LoopBuffers<float>&, int64_t,
                                     const Parallel&);
extern template void run_loop<double>(const LoopProgram&, const LoopBuffers<double>&, int64_t,
                                      const Parallel&);
extern template void run_loop_by<float>(ProcessorCode, const LoopProgram&,
                                        const LoopBuffers<float>&, int64_t, const Parallel&);
extern template void run_loop_by<double>(ProcessorCode, const LoopProgram&,
                                         const LoopBuffers<double>&, int64_t, const Parallel&);

}  // namespace whale
