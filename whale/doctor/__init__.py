"""Implements `whale doctor`: finds what stops or slows a run in this environment, and says what to do about it.

software.py  Python, TensorFlow, Keras, NumPy, op library, compiler, MPI, Horovod; imports none of them
machine.py   CPUs and their quotas (whale.cgroup), memory, shared memory, limits, temporary folder
gpus.py      GPUs: driver, peer access, the library for exchanges between them, NCCL, MPI and CUDA
trial.py     a run of two processes (whale/tools/doctor_step.py) with a time limit
report.py    the table and the JSON
"""
