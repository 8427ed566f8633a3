"""Reads a rank's part of a dataset (``wh.shard``), forms global batches of what ranks bring, and checks that the ranks'
inputs agree.
"""
