"""Every feature with every other one, against one device: ``python -m tests.combinations``."""
