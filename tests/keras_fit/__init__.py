"""``fit`` and the rest of Keras' interface, under plans, against plain Keras: ``python -m tests.keras_fit``."""
