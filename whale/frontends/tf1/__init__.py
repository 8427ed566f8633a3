"""Runs TensorFlow 1 scripts unchanged over the ranks: sessions, Saver, summaries, Supervisor and Estimators."""
