"""Chooses layouts under `wh.split`: lists the candidates, imposes required shardings, and solves for the lowest
cost.
"""
