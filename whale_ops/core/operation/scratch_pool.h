// Scratch memory of operations.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace whale {

// Passes scratch memory from one operation to the next, since mapping new memory and faulting in
// its pages takes time.
class ScratchPool {
 public:
  struct Block {
    std::unique_ptr<char[]> data;
    size_t bytes = 0;
  };
  Block take(size_t bytes);
  void give(Block block);

 private:
  std::vector<Block> free_;
  size_t retained_bytes_ = 0;
};

}  // namespace whale
