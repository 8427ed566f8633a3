"""Independent of how a plan was found: whether it is legal, and why it is what it is."""
