"""Makes ``fit``, ``evaluate``, ``predict`` and the other methods of Keras models run over all ranks.

Works for Keras 3 with the TensorFlow backend, tf_keras and Keras 2.
"""
