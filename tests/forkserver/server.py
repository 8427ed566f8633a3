"""Forks processes that have TensorFlow and Whale imported: ``python -m tests.forkserver.server FOLDER NAME``.

NAME begins with a kind: `whale` or `plain` (TensorFlow alone). The server imports, and does nothing else: no tensor is
made, no device is opened, so no thread of TensorFlow's runtime exists when it forks. A forked process gets the streams,
folder, environment, arguments and cores of the client that asked for it, and its namespaces where these are others
(hosts of `tests.hosts`), leads a session of its own, and runs the script as Python would. The server ends with the test
session that made its folder.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from pathlib import Path

PROTOCOL = b"forkserver 1\n"
OWNER = "owner"  # file in the folder with the process of the test session
SESSIONS = "sessions"  # folder in it: a file for each forked process, named by it, with the mark of who asked for it
MARKER = "WHALE_TEST_MARKER"
_PR_SET_PDEATHSIG = 1
_NAMESPACES = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000, "net": 0x40000000}
_HANDED_ON = tuple(getattr(signal, f"SIG{name}") for name in "TERM INT HUP QUIT USR1 USR2 CONT".split())
# What a step imports until it runs. Modules of the product hold no state, so that importing them early changes nothing.
_MODULES = ("whale_ops", "cost_model", "whale.cli", "whale.launcher.worker", "whale.launcher.run")
_PACKAGES = (
    "cost_model",
    "whale.ir",
    "whale.sharding_rules",
    "whale.passes",
    "whale.capture",
    "whale.kernels",
    "whale.partition",
    "whale.runtime",
    "whale.planner",
    "whale.frontends",
)


class _Forked(Exception):
    """Raised in the forked process, so that it leaves the server's frames before it runs the script."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.arguments = arguments


def main() -> None:
    """Serves until the test session is over; in a forked process, runs what was asked for."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    _import_modules(name.partition("-")[0])
    try:
        _serve(folder, name)
        return
    except _Forked as forked:
        arguments = forked.arguments
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            code = 130
        sys.excepthook(type(error), error, error.__traceback__)
    # What Python does at the end, but for taking 6,000 modules apart one by one.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _import_modules(kind: str) -> None:
    """Imports TensorFlow, its Keras, and, unless the kind is "plain", what Whale's steps and runs import."""
    import tensorflow as tf

    assert tf.keras.layers  # loads Keras, that of TF_USE_LEGACY_KERAS
    for name in _MODULES if kind != "plain" else ():
        importlib.import_module(name)
    for package in _PACKAGES if kind != "plain" else ():
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                # Of something that is not installed, or that this TensorFlow lacks.
                with contextlib.suppress(ImportError):
                    importlib.import_module(found.name)
    gc.collect()
    gc.freeze()


def _serve(folder: Path, name: str) -> None:
    owner = int((folder / OWNER).read_text())
    (folder / SESSIONS).mkdir(exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waker, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = folder / f".{name}.new"
    listener.bind(str(temporary))
    listener.listen(128)
    temporary.rename(folder / name)  # whoever finds the name finds a server that listens
    clients: dict[socket.socket, int] = {}  # connection -> its process
    tests: dict[int, str] = {}  # process -> the test that asked for it
    while _is_alive(owner) and folder.exists():
        ready = select.select([listener.fileno(), waker, *(one.fileno() for one in clients)], [], [], 1.0)[0]
        if waker in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(waker, 1024)
        for connection in [one for one in clients if one.fileno() in ready]:
            _hand_on(connection, clients)
        if listener.fileno() in ready:
            connection = listener.accept()[0]
            with contextlib.suppress(OSError, ValueError, EOFError):
                process = _fork(connection, listener, clients, (waker, wakeup), folder, tests)
                clients[connection] = process
        _report_ended(clients, tests, folder)
    for process in clients.values():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _report_ended(clients: dict[socket.socket, int], tests: dict[int, str], folder: Path) -> None:
    """Tells clients how their processes ended, the exit code or minus the signal, and writes down what these took."""
    by_process = {process: connection for connection, process in clients.items()}
    while True:
        try:
            process, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return
        took = {"test": tests.pop(process, ""), "processor_s": usage.ru_utime + usage.ru_stime}
        with contextlib.suppress(OSError), open(folder / "usage.jsonl", "a") as file:
            file.write(json.dumps(took) + "\n")
        connection = by_process.get(process)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()
            del clients[connection]


def _hand_on(connection: socket.socket, clients: dict[socket.socket, int]) -> None:
    """Hands signals on to a client's process, which is killed when the client is gone."""
    try:
        numbers = connection.recv(16)
    except OSError:
        numbers = b""
    process = clients[connection]
    for number in numbers or bytes([signal.SIGKILL]):
        with contextlib.suppress(OSError):
            os.kill(process, number)
    if not numbers:
        connection.close()
        del clients[connection]


def _fork(
    connection: socket.socket,
    listener: socket.socket,
    clients: dict[socket.socket, int],
    pipe: tuple[int, int],
    folder: Path,
    tests: dict[int, str],
) -> int:
    """Forks a process for what a client asks; raises `_Forked` in it."""
    arguments, directory, environment, streams = _read(connection)
    client = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    process = os.fork()
    if process:
        for stream in streams:
            os.close(stream)
        mark = environment.get(MARKER, "")
        (folder / SESSIONS / str(process)).write_text(mark)
        tests[process] = environment.get("PYTEST_CURRENT_TEST", "")
        return process
    try:
        for held in (listener, connection, *clients):
            held.close()
        for end in pipe:
            os.close(end)
        os.sched_setaffinity(0, os.sched_getaffinity(client))
        _enter_namespaces(client, streams)
        _become(directory, environment, streams)
    except BaseException:
        traceback.print_exc()
        os._exit(71)  # else it would go on as a second server
    raise _Forked(arguments)


def _enter_namespaces(client: int, streams: list[int]) -> None:
    """Goes where a client is: returns in a child that is in its namespaces, with whose end this process ends."""
    own, there = Path("/proc/self/ns"), Path(f"/proc/{client}/ns")
    others = [name for name in _NAMESPACES if not (own / name).samefile(there / name)]
    if not others:
        return
    library, descriptor = ctypes.CDLL(None, use_errno=True), os.pidfd_open(client)
    if library.setns(descriptor, sum(_NAMESPACES[name] for name in others)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        return
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _HANDED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _become(directory: str, environment: dict[str, str], streams: list[int]) -> None:
    """Makes the forked process the client's: its streams, folder and environment, and a session of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # A launcher hands the seed on to its ranks, which are then forked as well.
    seed = {"PYTHONHASHSEED": os.environ["PYTHONHASHSEED"]}
    os.environ.clear()
    os.environ.update(seed | environment)
    os.chdir(directory)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", closefd=False),
        open(2, "w", closefd=False, errors="backslashreplace", buffering=1),
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.modules["numpy"].random.seed()  # Python's own generator does so by itself


def _read(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    connection.settimeout(10.0)
    found = array.array("i")
    first, ancillary, _, _ = connection.recvmsg(len(PROTOCOL), socket.CMSG_SPACE(3 * found.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if first != PROTOCOL or len(found) != 3:
        raise ValueError(f"a client said {first!r} with {len(found)} streams")
    size = int.from_bytes(_exactly(connection, 4), "big")
    count, *texts = _exactly(connection, size).decode("utf-8", "surrogateescape").split("\0")
    arguments, rest = texts[: int(count)], texts[int(count) :]
    environment = dict(text.split("=", 1) for text in rest[1:])
    connection.settimeout(None)
    return arguments, rest[0], environment, list(found)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _run(arguments: list[str]) -> None:
    """Runs a script, a module or a text as ``python`` would with these arguments."""
    own_folder_first = True
    while arguments[0] in ("-P", "-u"):
        own_folder_first &= arguments.pop(0) != "-P"
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # `python -m` of the server put its own folder first.
    sys.path[:] = [*given, *(path for path in sys.path[1:] if path not in given)]
    sys.executable = os.environ.get("FORKSERVER_PYTHON", sys.executable)
    kind = arguments[0]
    if kind == "-m":
        sys.argv = [arguments[1], *arguments[2:]]
        if own_folder_first:
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(arguments[1], None)  # it is run anew
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        if own_folder_first:
            sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), main_module.__dict__)
    else:
        sys.argv = list(arguments)
        if own_folder_first:
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        code = compile(Path(kind).read_bytes(), kind, "exec")
        main_module.__dict__["__file__"] = kind
        exec(code, main_module.__dict__)


if __name__ == "__main__":
    main()
