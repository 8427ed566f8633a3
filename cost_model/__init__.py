"""Predicts step time and memory of distributed training on unequal devices. No TensorFlow.

The data, from hardware to prediction (every value is a frozen struct; units are in the names):

    Device, Link, Network, Efficiency  hardware/    what they are and what kernels reach of them; cited data
    Cluster                            cluster      hosts of devices and the networks between them; a YAML file
    (the local machine)                discover     the machine at hand: driver, processors, affinity, quota
    Matmul, Streaming, Attention       compute      one kernel -> seconds: roofline with a curve of size
    Group                              collectives  ranks, how many share a host, what they share -> seconds
    Transformer, Parallel, Stack       describe     a model by hyper-parameters, how it is spread, the software's habits
    Footprint                          memory       bytes of parameters, gradients, optimizer, activations, buffers
    Phase                              whale.ir.schedule   (chunk, micro-batch, forward/backward) of each stage
    Task, Timeline                     simulate     discrete events: what runs where, after what, for how long
    Profile                            profile      measured times and memory of a model's layers, instead of formulas
    Prediction                         predict      step time, bubble, exposed communication, memory

`python -m cost_model.validation` sets predictions against published measurements. docs/guides/cost_model.md explains.
"""
