#include "whale_ops/core/compute/run_loop.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "whale_ops/core/compute/small_products.h"

// Allows fused multiply-add where the processor has it, in this file only, which is compiled
// together with others.
#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

#include "whale_ops/core/compute/elements.h"

namespace whale {
namespace {

constexpr int64_t kChunk = 256;  // elements of an operand that are copied at a time
constexpr int64_t kLoopBlockBytes =
    1 << 14;  // of a temporary, so that those of a block stay in the cache
constexpr size_t kCacheLine = 64;
constexpr int64_t kFlopsPerCycle = 16;

template <typename T>
using ApplyLoop = void (*)(LoopOp, T*, const T*, const T*, const T*, int64_t);

template <typename T>
void loop_anywhere(LoopOp op, T* to, const T* a, const T* b, const T* c, int64_t n) {
  Lanes<T, 16>::apply(op, to, a, b, c, n);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma"))) void loop_avx2(LoopOp op, T* to, const T* a, const T* b,
                                                   const T* c, int64_t n) {
  Lanes<T, 32>::apply(op, to, a, b, c, n);
}
template <typename T>
__attribute__((target("avx512f"))) void loop_avx512(LoopOp op, T* to, const T* a, const T* b,
                                                    const T* c, int64_t n) {
  Lanes<T, 64>::apply(op, to, a, b, c, n);
}
template <typename T>
ApplyLoop<T> choose_loop_code(ProcessorCode code) {
  switch (code) {
    case ProcessorCode::kAvx512: return loop_avx512<T>;
    case ProcessorCode::kAvx2: return loop_avx2<T>;
    default: return loop_anywhere<T>;
  }
}
#else
template <typename T>
ApplyLoop<T> choose_loop_code(ProcessorCode) {
  return loop_anywhere<T>;
}
#endif

// Uninitialised memory that begins at a cache line.
template <typename T>
class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t elements) : all_(new T[elements + kCacheLine / sizeof(T)]) {}
  T* data() const {
    const auto past = reinterpret_cast<uintptr_t>(all_.get()) % kCacheLine;
    return all_.get() + (kCacheLine - past) % kCacheLine / sizeof(T);
  }

 private:
  std::unique_ptr<T[]> all_;
};

template <typename T>
class Runner {
 public:
  Runner(ProcessorCode code, const LoopProgram& program, const LoopBuffers<T>& buffers,
         const Parallel& parallel)
      : code_(code),
        apply_(choose_loop_code<T>(code)),
        program_(program),
        buffers_(buffers),
        parallel_(parallel),
        packed_(program.steps.size(), nullptr) {
    for (int kind = 0; kind < kLoopBuffers; ++kind)
      bases_[kind].resize(program.elements[kind].size());
    base_of(LoopBuffer::kSlice).resize(buffers.slices.size());
    base_of(LoopBuffer::kSame).resize(buffers.same.size());
    base_of(LoopBuffer::kStacked).resize(buffers.stacked.size());
    const auto& temporary = program.elements[static_cast<int>(LoopBuffer::kTemporary)];
    for (size_t i = 0; i < temporary.size(); ++i) {
      memory_.emplace_back(temporary[i]);
      base_of(LoopBuffer::kTemporary)[i] = memory_.back().data();
    }
    for (size_t i = 0; i < buffers.same.size(); ++i)
      bases_[static_cast<int>(LoopBuffer::kSame)][i] = const_cast<T*>(buffers.same[i]);
    for (const auto& state : buffers.states) {
      memory_.emplace_back(state.elements);
      before_.push_back(memory_.back().data());
      memory_.emplace_back(state.elements);
      after_.push_back(memory_.back().data());
      std::copy_n(state.initial, state.elements, before_.back());
    }
    pack_what_stays_the_same();
  }

  void run(int64_t turns) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      for (size_t i = 0; i < buffers_.slices.size(); ++i) {
        const auto& one = buffers_.slices[i];
        base_of(LoopBuffer::kSlice)[i] = const_cast<T*>(one.data + one.first + turn * one.step);
      }
      for (size_t i = 0; i < buffers_.stacked.size(); ++i) {
        const auto& one = buffers_.stacked[i];
        base_of(LoopBuffer::kStacked)[i] = one.data + turn * one.elements;
      }
      base_of(LoopBuffer::kState) = before_;
      base_of(LoopBuffer::kNext) = after_;
      for (const LoopBlock& block : program_.blocks) run_block(block);
      std::swap(before_, after_);
    }
    for (size_t i = 0; i < buffers_.states.size(); ++i)
      std::copy_n(before_[i], buffers_.states[i].elements, buffers_.states[i].last);
  }

 private:
  std::vector<T*>& base_of(LoopBuffer kind) { return bases_[static_cast<int>(kind)]; }

  T* place(const LoopView& view) const {
    return bases_[static_cast<int>(view.buffer)][view.index] + view.first;
  }

  static ProductSizes sizes_of(const LoopStep& step) {
    const LoopView &left = step.from[0], &right = step.from[1];
    return {{step.rows, left.row, 0, step.to.row},
            {step.columns, 0, right.column, 1},
            {step.summed, left.column, right.row, 0}};
  }

  // Packs the right operands of products that are the same in every turn.
  void pack_what_stays_the_same() {
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      const LoopStep& step = program_.steps[i];
      if (step.op != LoopOp::kMatMul || step.from[1].buffer != LoopBuffer::kSame) continue;
      const ProductSizes sizes = sizes_of(step);
      for (size_t j = 0; j < i && packed_[i] == nullptr; ++j) {
        if (packed_[j] != nullptr && is_same(program_.steps[j], step)) packed_[i] = packed_[j];
      }
      if (packed_[i] != nullptr) continue;
      const int64_t panels = count_panels<T>(code_, step.columns);
      const int64_t elements = panel_elements<T>(code_, step.summed);
      memory_.emplace_back(panels * elements);
      T* const packed = memory_.back().data();
      const T* right = place(step.from[1]);
      parallel_(panels, elements, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
          pack_panel<T>(code_, sizes, right, panel, packed + panel * elements);
      });
      packed_[i] = packed;
    }
  }

  static bool is_same(const LoopStep& a, const LoopStep& b) {
    const LoopView &x = a.from[1], &y = b.from[1];
    return x.index == y.index && x.first == y.first && x.row == y.row && x.column == y.column &&
           a.columns == b.columns && a.summed == b.summed;
  }

  void run_block(const LoopBlock& block) {
    const LoopStep& first = program_.steps[block.begin];
    if (!is_elementwise(first.op)) return run_step(block.begin);
    int64_t columns = 0, widest = 1;
    for (size_t i = block.begin; i < block.end; ++i) {
      columns += program_.steps[i].columns;
      widest = std::max(widest, program_.steps[i].columns);
    }
    const int64_t many =
        std::max<int64_t>(1, kLoopBlockBytes / static_cast<int64_t>(sizeof(T)) / widest);
    parallel_(first.rows, columns, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += many) {
        for (size_t i = block.begin; i < block.end; ++i)
          run_rows(program_.steps[i], row, std::min(end, row + many));
      }
    });
  }

  static bool is_dense(const LoopView& view, int64_t columns) {
    return view.column == 1 && view.row == columns;
  }

  void run_rows(const LoopStep& step, int64_t begin, int64_t end) {
    const int count = operands_of(step.op);
    int64_t rows = end - begin, columns = step.columns;
    bool dense = is_dense(step.to, columns) || rows == 1;
    for (int k = 0; k < count; ++k)
      dense = dense && (step.from[k].buffer == LoopBuffer::kNumber ||
                        (rows == 1 ? step.from[k].column == 1 : is_dense(step.from[k], columns)));
    if (dense) {
      columns *= rows;
      rows = 1;
    }
    T repeated[3][kChunk];
    const T* from[3] = {repeated[0], repeated[1], repeated[2]};
    bool scattered = false;
    for (int k = 0; k < count; ++k) {
      if (step.from[k].buffer == LoopBuffer::kNumber)
        std::fill_n(repeated[k], std::min(kChunk, columns), T(step.from[k].number));
      scattered = scattered || step.from[k].column != 1;
    }
    // An operand that the operation does not have points to memory that is read anyway.
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t at = 0, n = 0; at < columns; at += n) {
        n = scattered ? std::min(kChunk, columns - at) : columns - at;
        for (int k = 0; k < count; ++k) {
          const LoopView& view = step.from[k];
          if (view.buffer == LoopBuffer::kNumber) continue;
          const T* data = place(view) + (begin + row) * view.row + at * view.column;
          if (view.column == 1) {
            from[k] = data;
          } else if (view.column == 0) {
            std::fill_n(repeated[k], n, *data);
          } else {
            for (int64_t i = 0; i < n; ++i) repeated[k][i] = data[i * view.column];
          }
        }
        apply_(step.op, place(step.to) + (begin + row) * step.to.row + at, from[0],
               count > 1 ? from[1] : from[0], count > 2 ? from[2] : from[0], n);
      }
    }
  }

  void run_step(size_t number) {
    const LoopStep& step = program_.steps[number];
    switch (step.op) {
      case LoopOp::kMatMul: return multiply_step(number);
      case LoopOp::kSumRows: return sum_rows(step);
      default: return sum_columns(step);
    }
  }

  void multiply_step(size_t number) {
    const LoopStep& step = program_.steps[number];
    const ProductSizes sizes = sizes_of(step);
    const T* left = place(step.from[0]);
    T* to = place(step.to);
    const T* packed = packed_[number];
    const int64_t panels = count_panels<T>(code_, step.columns);
    const int64_t elements = panel_elements<T>(code_, step.summed);
    const int64_t cycles = 2 * step.rows * elements / kFlopsPerCycle;
    if (packed != nullptr) {
      parallel_(panels, cycles, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
          multiply_panel<T>(code_, sizes, left, packed + panel * elements, panel, to);
      });
      return;
    }
    const T* right = place(step.from[1]);
    parallel_(panels, cycles, [&](int64_t begin, int64_t end) {
      const AlignedMemory<T> own(elements);
      for (int64_t panel = begin; panel < end; ++panel) {
        pack_panel<T>(code_, sizes, right, panel, own.data());
        multiply_panel<T>(code_, sizes, left, own.data(), panel, to);
      }
    });
  }

  void sum_rows(const LoopStep& step) {
    const LoopView& view = step.from[0];
    T* to = place(step.to);
    std::fill_n(to, step.columns, T(0));
    for (int64_t row = 0; row < step.rows; ++row) {
      const T* from = place(view) + row * view.row;
      if (view.column == 1) {
        apply_(LoopOp::kAdd, to, to, from, from, step.columns);
      } else {
        for (int64_t i = 0; i < step.columns; ++i) to[i] += from[i * view.column];
      }
    }
  }

  void sum_columns(const LoopStep& step) {
    const LoopView& view = step.from[0];
    for (int64_t row = 0; row < step.rows; ++row) {
      const T* from = place(view) + row * view.row;
      T sums[8] = {};
      for (int64_t i = 0; i < step.columns; ++i) sums[i % 8] += from[i * view.column];
      T sum = 0;
      for (const T one : sums) sum += one;
      place(step.to)[row * step.to.row] = sum;
    }
  }

  const ProcessorCode code_;
  const ApplyLoop<T> apply_;
  const LoopProgram& program_;
  const LoopBuffers<T>& buffers_;
  const Parallel& parallel_;
  std::vector<AlignedMemory<T>> memory_;
  std::vector<T*> bases_[kLoopBuffers];
  std::vector<T*> before_, after_;  // of states
  std::vector<const T*> packed_;    // by step: packed right operand, if it stays the same
};

}  // namespace

template <typename T>
void run_loop_by(ProcessorCode code, const LoopProgram& program, const LoopBuffers<T>& buffers,
                 int64_t turns, const Parallel& parallel) {
  Runner<T>(code, program, buffers, parallel).run(turns);
}

template <typename T>
void run_loop(const LoopProgram& program, const LoopBuffers<T>& buffers, int64_t turns,
              const Parallel& parallel) {
  static const ProcessorCode best = processor_codes().front();
  run_loop_by<T>(best, program, buffers, turns, parallel);
}

template void run_loop<float>(const LoopProgram&, const LoopBuffers<float>&, int64_t,
                              const Parallel&);
template void run_loop<double>(const LoopProgram&, const LoopBuffers<double>&, int64_t,
                               const Parallel&);
template void run_loop_by<float>(ProcessorCode, const LoopProgram&, const LoopBuffers<float>&,
                                 int64_t, const Parallel&);
template void run_loop_by<double>(ProcessorCode, const LoopProgram&, const LoopBuffers<double>&,
                                  int64_t, const Parallel&);

}  // namespace whale

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC pop_options
#endif
