"""Describes clusters: cluster files, the local machine, a scheduler's allocation, pools of equal devices."""
