// Scratch memory of operations.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace whale {

// Scratch memory that is handed from operation to operation instead of being mapped and faulted in
// anew.
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
