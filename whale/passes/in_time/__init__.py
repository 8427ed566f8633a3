"""Plans time as an axis: micro-batches, their phases, and what each group of ranks runs of a program in stages."""
