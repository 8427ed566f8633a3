"""Lets ranks continue when others are slow or gone: divides rows again, and keeps copies of data that only one rank
has.
"""
