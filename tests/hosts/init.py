"""Runs as the first process of a host of namespaces: makes its mounts, then answers its remote shell (`ssh.py`).

    python -I -S init.py '{"name": "h0", "hosts": "/...", "shm_bytes": 1073741824, "visible": ["/..."], ...}'

Its standard input is held open by who made the host: when that ends, in whatever way, this process ends, and the kernel
with it all of the host. It is run by the interpreter alone, and imports nothing of the project.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys

PORT = 22
HEADER = struct.Struct("!cI")  # what a frame is, and how long: b"o" and b"e" output, b"x" the exit code
_READ_BYTES = 1 << 16
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Ends with its standard input."""
    host = json.loads(sys.argv[1])
    socket.sethostname(host["name"])
    _mount_all(host)
    listener = socket.create_server(("0.0.0.0", PORT), backlog=64)
    waker, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    sources: list = [0, listener, waker]
    while True:
        ready = select.select(sources, [], [])[0]
        if 0 in ready and not os.read(0, 1):
            os._exit(0)
        if waker in ready:
            os.read(waker, _READ_BYTES)
            _reap()
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                try:
                    _serve(connection, host["environment"])
                finally:
                    os._exit(255)
            connection.close()


def _mount_all(host: dict) -> None:
    """Makes what a host has of its own: /proc, /tmp, /dev/shm, /run, /etc/hosts, its boot's number."""
    mount("none", "/", "", _RECURSIVE | _PRIVATE)
    mount("proc", "/proc", "proc")
    # What is asked to be seen may lie under /tmp, which is about to be covered.
    held = [(path, os.open(path, os.O_PATH)) for path in host["visible"]]
    mount("tmpfs", "/tmp", "tmpfs", options="mode=1777")
    for path, descriptor in held:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, "", _BIND | _RECURSIVE)
        os.close(descriptor)
    mount("tmpfs", "/dev/shm", "tmpfs", options=f"mode=1777,size={host['shm_bytes']}")
    if host["shm_read_only"]:
        mount("none", "/dev/shm", "", _REMOUNT | _READ_ONLY)
    mount("tmpfs", "/run", "tmpfs", options="mode=755")
    os.makedirs("/tmp/home")
    mount(host["hosts"], "/etc/hosts", "", _BIND)
    mount(host["boot"], "/proc/sys/kernel/random/boot_id", "", _BIND)


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Mounts, as the system call does."""
    if _LIBRARY.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _serve(connection: socket.socket, environment: dict) -> None:
    """Runs the command that a client sends, in a session of its own, and relays what goes in and out."""
    (size,) = struct.unpack("!I", _read_exactly(connection, 4))
    command = _read_exactly(connection, size).decode()
    pipes = [os.pipe() for _ in range(3)]
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, (reader, writer) in enumerate(pipes):
            os.dup2(writer if number else reader, number)
        os.chdir("/tmp/home")
        os.closerange(3, 1 << 10)
        os.execve("/bin/sh", ["sh", "-c", command], environment)
    for number, (reader, writer) in enumerate(pipes):
        os.close(writer if number else reader)
    into, out, err = pipes[0][1], pipes[1][0], pipes[2][0]
    kinds = {out: b"o", err: b"e"}
    sources: list = [connection, out, err]
    while out in sources or err in sources:
        for source in select.select(sources, [], [])[0]:
            if source is connection:
                data = connection.recv(_READ_BYTES)
                if data:
                    os.write(into, data)
                else:  # no more input
                    sources.remove(connection)
                    os.close(into)
                continue
            data = os.read(source, _READ_BYTES)
            if data:
                connection.sendall(HEADER.pack(kinds[source], len(data)) + data)
            else:
                sources.remove(source)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(HEADER.pack(b"x", 1) + bytes([code & 0xFF if code >= 0 else 128 - code]))


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


if __name__ == "__main__":
    main()
