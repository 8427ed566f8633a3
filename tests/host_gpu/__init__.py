"""GPUs that are the host's: CUDA's driver, and devices of TensorFlow's, whose streams are late.

TensorFlow for processors sees GPUs (`/GPU:0`, `/GPU:1`, ...) with its own placer, executor, allocator and copies, and
Whale its library for GPUs with NVIDIA's driver. What is queued on a stream happens later, in the stream's order; until
then memory holds NaN, or what was there before. So what does not wait for what it reads, or gives memory away too
early, computes something else than one device does.

  build.py          compiles what follows, once for the same sources
  streams.cc        GPUs, their memory, and their streams, which are threads
  driver.cc         libcuda.so.1 on them
  nccl.cc           libnccl.so.2 on their streams
  kernels.cc        the device code of `whale_ops/gpu` as host code
  plugin.cc         devices of TensorFlow's on them (a PluggableDevice)
  late_kernels.cc   kernels for processors in the place of those for GPUs, whose results are late
  cudnn_rnn.cc      cuDNN's LSTM and GRU, as kernels for processors
  kernels-*.txt     which kernels for GPUs there are (dump_kernels.py)
  on_host_gpus.py   a script as a rank of `whale run` that has such a GPU

Decision: 0153.
"""
