"""Tools behind the command line and public functions such as `wh.plan`: plans without processes, checks,
measurements.
"""
