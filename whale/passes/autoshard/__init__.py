"""Chooses layouts under `wh.split`: what may be chosen, candidates, what is not left to cost, and the solver."""
