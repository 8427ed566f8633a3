"""Lets programs written for Keras, TensorFlow 1, tf.distribute, Horovod and other libraries run on Whale unchanged."""
