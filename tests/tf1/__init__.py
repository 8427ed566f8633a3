"""Programs of TensorFlow 1 on two ranks, against the same programs on one."""
