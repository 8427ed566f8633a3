"""The search for the fastest strategy of a described model that fits."""
