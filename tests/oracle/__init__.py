"""The oracle: for every legal plan the distributed run computes what one device computes.

matrix     which runs there are, and a pairwise sample of them
metric     how far two runs are apart
execute    runs a program of the zoo for some steps
reference  worker process: one device, never imports whale
spread     worker process: the same program over ranks of the in-process transport
pool       starts these workers, keeps what the reference computed
compare    one run of the matrix judged
__main__   one run, or the full matrix as a table
"""
