"""The search for the fastest spread of a described model that fits."""
