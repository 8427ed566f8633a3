"""Programs of others, as they are: alone and under plans, ``python -m tests.outside FOLDER``.

A folder has one program a file, written for one device. Nothing of it stands in this repository, and no program knows
that it is watched: what it computes is taken by hooks in Keras and TensorFlow.
"""
