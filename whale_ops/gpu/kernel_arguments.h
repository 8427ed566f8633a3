// What kernels.cu is launched with. NVRTC compiles this for the GPU and g++ for the host: it
// includes nothing.
#pragma once

namespace whale::cuda {

constexpr int kThreads = 256;  // threads of a block
constexpr int kPieces = 128;   // pieces of one launch, whose arguments may have 4 KB in all
constexpr int kMaxSources = 64;

// A tensor, and its place in the buffer, in elements.
struct Piece {
  void* data;
  long long offset, count;
};

// Arguments of the copy kernels: blocks (x, y) copy the tensor pieces[y].
struct CopyArguments {
  Piece pieces[kPieces];
  void* buffer;
  float scale;
};

struct ReduceArguments {
  const void* sources[kMaxSources];
  void* dst;
  long long count;
  int size;  // how many sources there are
};

}  // namespace whale::cuda
