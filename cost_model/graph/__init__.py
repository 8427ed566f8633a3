"""Predicts captured programs: the seconds and bytes of the ranks' programs under a plan.

unroll          unroll_loops     returns a program with its loops unrolled
Graph           executor_graph   a rank's program by numbers: dependencies, and which results share memory
Exchange        traffic          the bytes that a communication op moves and allocates
MachineProfile  machine_profile  the measurements of `whale profile` on a machine; a JSON file
Played          simulate         result of the simulation of all ranks: executor threads, shared cores, exchanges
Allocator       liveness         simulates TensorFlow's best-fit allocator over the order of a step
Machine         machine          seconds of operations and exchanges, measured or from the catalogue
predict_ranks   predict          predicts a step of ranks on a machine
"""
