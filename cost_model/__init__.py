"""Predicts step time and memory of distributed training on unequal devices. Needs no TensorFlow.

The data, from hardware to prediction (every value is a frozen struct; units are in the names):

    Device, Link, Network, Efficiency  hardware/             catalogue of hardware and what kernels reach of it; cited
        data
    Cluster                            cluster.cluster_file  hosts of devices and the networks between them; a YAML file
    (the local machine)                cluster.discover      this machine as a cluster: driver, processors, affinity,
        quota
    Pool, Machines                     cluster.pools         a cluster's equal devices; bandwidth between groups of
        ranks
    Group                              kernels.collectives   ranks and the links they share -> seconds of a collective
    Rates                              kernels.compute       one kernel -> seconds: roofline with efficiency by size
    Tasks, Timeline                    simulator             discrete-event simulation of tasks on streams
    Transformer                        analytic.transformer  a model by hyper-parameters
    Stack                              analytic.stacks       what training software fuses, overlaps and spends on the
        host
    Matmul, Streaming, Attention       analytic.transformer_kernels  kernels that one rank runs for one layer
    LayerCosts, Model                  analytic.layer_costs  seconds and bytes of any range of layers on a kind of rank
    ParallelStrategy, Stage, Degrees   whale.ir.strategy     stages on devices; Degrees: equal stages, as in a job file
    StageCost, Evaluation              analytic.evaluate     step time and memory of a strategy, for planner and jobs
        alike
    JobPrediction                      analytic.predict      a job's step: time, bubble, exposed communication, memory
    Profile                            analytic.layer_profile  measured layers, used instead of formulas
    programs of ranks                  graph/                predictions for captured programs, operation by operation

`python -m cost_model.validation` compares predictions with published measurements. docs/guides/cost_model.md explains.
"""
