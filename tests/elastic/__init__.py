"""Ranks that are killed or frozen in the middle of training: the others end with what one device computes."""
