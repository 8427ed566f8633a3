"""Scripts with a LayoutMap, as they are written for JAX, on the TensorFlow backend."""
