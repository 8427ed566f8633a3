"""Chooses layouts under `wh.split`: lists candidate strategies, imposes shardings that the scope requires, and solves
for the lowest cost.
"""
