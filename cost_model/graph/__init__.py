"""Captured programs: what the ranks' own programs of a plan take, in seconds and in bytes.

Program         unroll_loops     with its loops written out
Graph           executor_graph   a rank's program as numbers: who waits for whom, which results share memory
Exchange        traffic          what a communication op moves and holds
MachineProfile  machine_profile  what `whale profile` measured on a machine; a JSON file
Played          simulate         discrete events over all ranks: executor threads, the cores that they share, exchanges
Allocator       allocator        TensorFlow's best fit, as far as sizes go; liveness plays a step's order on it
Machine         machine          seconds of operations and exchanges, measured or by the catalogue
predict_ranks   predict          a step of ranks on a machine
"""
