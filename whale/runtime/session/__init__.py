"""Sessions of TensorFlow 1 whose runs are spread over the ranks."""
