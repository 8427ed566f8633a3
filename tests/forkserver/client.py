"""Stands for ``python`` on a command line: has the fork server run what was asked for, and ends as that ends.

It is run by the interpreter alone (``python -I -S``), starts in some 20 ms, and imports nothing of the project. Where
the fork server cannot give what is asked (options of the interpreter, a hash seed), it becomes a real interpreter.
"""

import _socket
import os
import signal
import sys
import time

HASH_SEED_VARIABLE = "FORKSERVER_HASH_SEED"
PROTOCOL = b"forkserver 1\n"
# Variables that decide something while TensorFlow is imported: servers differ in them.
IMPORT_VARIABLES = ("TF_USE_LEGACY_KERAS", "TF_ENABLE_ONEDNN_OPTS")
# Signals that a launcher sends to what it has started. Those that cannot be caught are what real starts are for.
FORWARDED = tuple(getattr(signal, f"SIG{name}") for name in "TERM INT HUP QUIT USR1 USR2 CONT".split())


def main() -> None:
    """Usage: client.py PYTHON FOLDER KIND [options] script|-m module|-c text [arguments ...]."""
    python, folder, kind, *arguments = sys.argv[1:]
    if not _fits(arguments):
        os.execv(python, [python, *arguments])
    name = "-".join([kind, *(os.environ.get(name, "") for name in IMPORT_VARIABLES)])
    connection = _connect(python, folder, name)
    if connection is None:
        os.execv(python, [python, *arguments])
    with _ForwardedSignals() as waiting:
        _request(connection, arguments)
        sys.exit(_answer(connection, waiting))


def _fits(arguments: list[str]) -> bool:
    """Tells whether a forked process is what a real interpreter would be for these arguments and this environment."""
    options = []
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-m", "-c"):
            break
        options.append(argument)
    return len(options) < len(arguments) and set(options) <= {"-P", "-u"} and _has_hash_seed()


def _has_hash_seed() -> bool:
    """Tells whether a server hashes text as is asked for here."""
    return os.environ.get("PYTHONHASHSEED") in (None, os.environ[HASH_SEED_VARIABLE])


def _connect(python: str, folder: str, name: str):
    """Connects to the server of that name, which is started if there is none; None if it does not come up."""
    path = os.path.join(folder, name)
    connection = _connected(path)
    if connection is None and _start(python, folder, name):
        connection = _connected(path)
    return connection


def _connected(path: str):
    """Connects to who listens there; None if nobody does."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _start(python: str, folder: str, name: str) -> bool:
    """Starts a server, once however many clients want it, and waits until it listens or has ended."""
    import fcntl
    import subprocess

    path = os.path.join(folder, name)
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            connection = _connected(path)
            if connection is not None:  # another client has started it
                connection.close()
                return True
            os.unlink(path)  # of one that was killed
        with open(path + ".log", "ab") as log:
            server = subprocess.Popen(
                [python, "-m", "tests.forkserver.server", folder, name],
                cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not os.path.exists(path):
            if server.poll() is not None:
                return False
            time.sleep(0.02)
        return True


def _server_environment() -> dict[str, str]:
    """The environment in which modules are imported: nothing of a run's or a test's own."""
    prefixes = ("WHALE_", "OMP_", "TF_", "OMPI_", "PMIX", "PRTE", "HOROVOD_", "LD_PRELOAD", "GLIBC_", "KERAS_")
    found = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    found |= {name: os.environ[name] for name in IMPORT_VARIABLES if name in os.environ}
    found["PYTHONHASHSEED"] = os.environ[HASH_SEED_VARIABLE]
    return found | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}


def _request(connection, arguments: list[str]) -> None:
    """Sends arguments, folder and environment, and with the first byte the ends of this process's own streams."""
    environment = [f"{name}={text}" for name, text in os.environ.items()]
    parts = [str(len(arguments)), *arguments, os.getcwd(), *environment]
    body = "\0".join(parts).encode("utf-8", "surrogateescape")
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    connection.sendmsg([PROTOCOL], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
    connection.sendall(len(body).to_bytes(4, "big") + body)


def _answer(connection, waiting: list[int]) -> int:
    """Waits for the end, handing on signals meanwhile; ends by the signal that killed the forked process."""
    import select

    while True:
        while waiting:
            connection.sendall(bytes([waiting.pop(0)]))
        try:
            ready = select.select([connection, _ForwardedSignals.wakeup], [], [])[0]
        except InterruptedError:
            continue
        if _ForwardedSignals.wakeup in ready:
            os.read(_ForwardedSignals.wakeup, 1024)
        if connection in ready:
            text = connection.recv(64)
            if not text:
                return 137  # the server is gone, and with it what it has forked
            status = int(text)
            if status < 0:
                signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
                os.kill(os.getpid(), -status)
                time.sleep(60)  # until the signal arrives
            return status


class _ForwardedSignals:
    """Collects signals instead of ending by them."""

    wakeup = -1

    def __enter__(self) -> list[int]:
        waiting: list[int] = []
        _ForwardedSignals.wakeup, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: waiting.append(number))
        return waiting

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)


main()
