"""Predicts captured programs: the seconds and bytes of the ranks' programs under a plan.

Program         unroll_loops     with its loops unrolled
Graph           executor_graph   a rank's program by numbers: dependencies, and which results share memory
Exchange        traffic          the bytes that a communication op moves and allocates
MachineProfile  machine_profile  the measurements of `whale profile` on a machine; a JSON file
Played          simulate         discrete events over all ranks: executor threads, the cores that they share, exchanges
Allocator       liveness         TensorFlow's best fit by sizes, on which a step's order is simulated
Machine         machine          seconds of operations and exchanges, measured or by the catalogue
predict_ranks   predict          predicts a step of ranks on a machine
"""
