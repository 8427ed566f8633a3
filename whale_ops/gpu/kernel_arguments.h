// What kernels.cu is launched with. NVRTC compiles this for the GPU and g++ for the host: it
// includes nothing.
#pragma once

namespace whale::cuda {

constexpr int kThreads = 256;  // of a block
constexpr int kPieces = 128;   // of one launch: its arguments may have 4 KB together
constexpr int kMaxSources = 64;

// A tensor and where it lies in the buffer, in elements.
struct Piece {
  void* data;
  long long offset, count;
};

// Blocks (x, y) copy the tensor pieces[y].
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
