"""Training programs over tensors whose sizes only the run knows, drawn and compared with one device."""
