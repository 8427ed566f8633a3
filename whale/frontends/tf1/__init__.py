"""TensorFlow 1 as it is: sessions, Saver, summaries, Supervisor and Estimators of a script, over the ranks of a run."""
