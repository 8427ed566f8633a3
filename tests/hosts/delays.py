"""A switch that delays what it forwards, in user space: kernels without netem have none.

    delays.py MILLISECONDS DEVICE...      until its standard input ends

Frames pass as the kernel's sockets give them, with their virtio headers: unfinished checksums stay so, and what TCP
hands over in one piece of up to 64 KiB is one frame here.
"""

import heapq
import select
import socket
import struct
import sys
import time

_ALL, _PACKET = 3, 263  # ETH_P_ALL, SOL_PACKET
_VNET_HEADER, _IGNORE_OUTGOING = 15, 23
_HEADER_BYTES, _MOST_BYTES, _BUFFER_BYTES = 10, 1 << 17, 32 << 20
_FORCE_BUFFER = 33  # SO_RCVBUFFORCE


def forward(delay_s: float, devices: list[str]) -> None:
    """Forwards between devices of this network, each frame after so many seconds, as long as standard input is open."""
    ports = []
    for device in devices:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        port.setsockopt(_PACKET, _VNET_HEADER, 1)
        port.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, _BUFFER_BYTES)
        port.bind((device, 0))
        ports.append(port)
    poll = select.poll()
    for descriptor in (*ports, sys.stdin):
        poll.register(descriptor, select.POLLIN)
    of = {port.fileno(): port for port in ports}
    at: dict[bytes, socket.socket] = {}  # by hardware address
    due: list[tuple[float, int, bytes, socket.socket]] = []
    number = 0
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
        for descriptor, _ in poll.poll(1e3 * wait_s):
            if descriptor not in of:
                return
            port = of[descriptor]
            frame = port.recv(_MOST_BYTES)
            target, source = struct.unpack_from("6s6s", frame, _HEADER_BYTES)
            at[source] = port
            for other in (at[target],) if target in at else ports:
                if other is not port:
                    number += 1
                    heapq.heappush(due, (time.monotonic() + delay_s, number, frame, other))
        while due and due[0][0] <= time.monotonic():
            _, _, frame, port = heapq.heappop(due)
            try:
                port.send(frame)
            except OSError:
                pass  # the device is full or down: the frame is lost, as on other wires


if __name__ == "__main__":
    print("ready", flush=True)
    forward(1e-3 * float(sys.argv[1]), sys.argv[2:])
