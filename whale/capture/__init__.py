"""From TensorFlow graphs and traced functions to programs, and from a program's nodes back to protos."""
