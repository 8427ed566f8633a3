"""Predicts step time and memory of distributed training on unequal devices. No TensorFlow.

The data, from hardware to prediction (every value is a frozen struct; units are in the names):

    Device, Link, Network, Efficiency  hardware/             what they are and what kernels reach of them; cited data
    Cluster                            cluster.cluster_file  hosts of devices and the networks between them; a YAML file
    (the local machine)                cluster.discover      the machine at hand: driver, processors, affinity, quota
    Pool, Machines                     cluster.pools         a cluster's equal devices, and what groups of ranks have
    Group                              kernels.collectives   ranks, how many share a host, what they share -> seconds
    Rates                              kernels.compute       one kernel -> seconds: roofline with a curve of size
    Tasks, Timeline                    simulator             discrete events: what runs where, after what, for how long
    Transformer                        analytic.transformer  a model by hyper-parameters
    Stack                              analytic.stacks       habits of training software
    Matmul, Streaming, Attention       analytic.transformer_kernels  what one rank runs for one layer
    LayerCosts, Model                  analytic.layer_costs  seconds and bytes of any range of layers on a kind of rank
    ParallelStrategy, Stage, Degrees   whale.ir.strategy     stages on devices, equal or not; how a job says equal ones
    StageCost, Evaluation              analytic.evaluate     what a strategy takes, the one place where that is said
    JobPrediction                      analytic.predict      a job's step: time, bubble, exposed communication, memory
    Profile                            analytic.layer_profile  measured layers, instead of formulas
    programs of ranks                  graph/                what the operations of a captured program take

`python -m cost_model.validation` sets predictions against published measurements. docs/guides/cost_model.md explains.
"""
