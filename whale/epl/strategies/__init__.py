"""``epl.strategies``."""
