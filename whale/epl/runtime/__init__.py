"""``epl.runtime``."""
