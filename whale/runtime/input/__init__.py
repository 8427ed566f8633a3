"""What a rank reads of a dataset, and what the ranks bring to one batch."""
