"""Lets ranks continue when others are slow, lost or new: divides rows anew, and keeps copies of variable parts that
only one rank has. ``elastic_run.Elastic`` is the entry.
"""
