"""Stands for `ssh` on hosts of namespaces: runs a command on another host, over its port 22, as `init.py` answers.

Nothing is encrypted, and nobody has to show who they are. As ssh does, it waits for as long as the network is silent,
ends with the command's exit code, and with 255 where the host is not reached.
"""

import os
import select
import socket
import struct
import sys

PORT = 22
HEADER = struct.Struct("!cI")
_WITH_VALUE = ("-o", "-p", "-l", "-i", "-F")
_READ_BYTES = 1 << 16


def main() -> int:
    """Usage: ssh [options] host command ..."""
    arguments = sys.argv[1:]
    timeout_s = None
    while arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option in _WITH_VALUE:
            name, _, text = arguments.pop(0).partition("=")
            if name == "ConnectTimeout":
                timeout_s = float(text)
    host, *words = arguments
    try:
        connection = socket.create_connection((host, PORT), timeout=timeout_s)
    except OSError as error:
        sys.stderr.write(f"ssh: connect to host {host} port {PORT}: {error.strerror or error}\n")
        return 255
    connection.settimeout(None)
    command = " ".join(words).encode()
    connection.sendall(struct.pack("!I", len(command)) + command)
    sources: list = [connection, 0]
    said = b""
    while True:
        for source in select.select(sources, [], [])[0]:
            if source == 0:
                data = os.read(0, _READ_BYTES)
                if data:
                    connection.sendall(data)
                else:
                    sources.remove(0)
                    connection.shutdown(socket.SHUT_WR)
                continue
            try:
                data = connection.recv(_READ_BYTES)
            except OSError as error:
                sys.stderr.write(f"ssh: {host}: {error.strerror}\n")
                return 255
            if not data:
                return 255
            said += data
            while len(said) >= HEADER.size:
                kind, size = HEADER.unpack_from(said)
                if len(said) < HEADER.size + size:
                    break
                content, said = said[HEADER.size : HEADER.size + size], said[HEADER.size + size :]
                if kind == b"x":
                    return content[0]
                os.write(1 if kind == b"o" else 2, content)


if __name__ == "__main__":
    sys.exit(main())
