"""The pipeline: stages of groups of ranks, micro-batches as loops of function calls, schedules, sends and receives."""
