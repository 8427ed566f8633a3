#!/usr/bin/env python3
"""The living nodes of a Ray cluster, for an elastic run: `whale run --hosts-from ./ray_nodes.py train.py`.

Ranks follow Ray's autoscaler: the list is read every two seconds. A rank for every CPU_PER_RANK processors (default 1).
"""

import os

import ray

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
for node in ray.nodes():
    if node["Alive"]:
        ranks = int(node["Resources"].get("CPU", 0)) // int(os.environ.get("CPU_PER_RANK", "1"))
        if ranks:
            print(f"{node['NodeManagerAddress']} slots={ranks}")
