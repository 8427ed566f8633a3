"""Hosts on one machine, each of namespaces of Linux: own network, hostname, processes, /proc, /dev/shm, /tmp, boot.

They are joined by a switch, which is a namespace too, on addresses that exist nowhere else, and reach each other by an
`ssh` of their own (`ssh.py`, `init.py`). Links are as fast as asked (`tc`), lose packets, are cut, or let some ports
through only (`packets.py`); memory is limited by control groups. A host ends with the process that has made it, however
that ends, and nothing is left of it.

    with Hosts(folder, 2) as hosts:
        hosts.run("h0", sys.executable, "-m", "whale", "run", "-np", "2", "--hosts", "h0:1,h1:1", "train.py")
        hosts.shape("h1", mbit_per_s=100)

Decision: 0150.
"""
