"""Finds a placement for every tensor along one mesh axis.

``propagate`` chooses strategies node by node, ``node_choice`` for one node; ``partial_sums`` decides where partial sums
are reduced; ``local_statistics`` handles values that differ between ranks on purpose; ``reference_plan`` reuses the
plan of a similar program.
"""
