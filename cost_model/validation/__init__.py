"""Compares predictions with published measurements: `python -m cost_model.validation [--rows file.csv ...]`.

data/ has rows of publications, clusters/ the machines they ran on, cases.py turns a row into a model, a plan, a
software stack and a cluster, report.py prints errors. Constants are the catalogue's; none is chosen per row or table.
"""
