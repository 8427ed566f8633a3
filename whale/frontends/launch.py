"""Implements ``wh.launch``: calls a function on every rank of a new run, from a script or a notebook.

python -m whale.frontends.launch FOLDER        one rank: reads the call there, leaves what it returned there
"""

from __future__ import annotations

import collections
import io
import linecache
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from whale.distributed.msgpack_values import pack, unpack
from whale.errors import ClusterError, InstallError
from whale.launcher.mpirun import Options, parse_hosts
from whale.launcher.run import run
from whale.started import RANK_VARIABLE

_CALL = "call.pickle"


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    hosts: str | None = None,
    threads: int | None = None,
    max_restarts: int = 0,
    verbose: bool = False,
) -> list[Any]:
    """Calls a function on every rank of a new run, as ``horovod.run`` does; ranks print as under `whale run`.

    The function calls ``wh.init()`` itself. It may be one of a notebook's cells: it travels by value. Ranks of other
    hosts need a temporary folder that all see (``TMPDIR``).

    Args:
      fn, args, kwargs: the call, the same on every rank.
      np: number of ranks.
      hosts: ``host1:2,host2:2``; this host unless given.
      threads: of a rank; unless given, the host's cores divided by its ranks.
      max_restarts: the function is called again after a fault, at most so often, on as many ranks as before.
      verbose: as `whale run -v`.

    Returns:
      What each rank returned, by rank: numbers, text, bytes, arrays, and lists, tuples, dicts and sets of them.

    Raises:
      InstallError: cloudpickle, which carries the function, is not installed.
      ClusterError: the run cannot be started, or failed.
    """
    return launch_pickled(pickle_call(fn, args, kwargs), np, hosts, threads, verbose, max_restarts)


def launch_pickled(
    call: bytes, np: int, hosts: str | None, threads: int | None, verbose: bool, max_restarts: int = 0
) -> list[Any]:
    """Does the same as `launch` for a call that `pickle_call` has pickled."""
    with tempfile.TemporaryDirectory(prefix="whale_launch_") as folder:
        Path(folder, _CALL).write_bytes(call)
        where = parse_hosts(hosts) if hosts is not None else ()
        options = Options(
            np,
            "whale.frontends.launch",
            (folder,),
            as_module=True,
            hosts=where,
            threads=threads,
            verbose=verbose,
            max_restarts=max_restarts,
            min_ranks=np,
        )
        code = run(options)
        found = [Path(folder, f"{rank}.result") for rank in range(np)]
        if code or not all(path.exists() for path in found):
            raise ClusterError(
                "the run of the function failed",
                given=f"exit code {code}",
                action="correct what the ranks say above",
            )
        return [unpack(path.read_bytes()) for path in found]


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Pickles a call, with functions by value and with their sources, which AutoGraph reads on the ranks.

    Raises:
      InstallError: cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise InstallError(
            "wh.launch needs cloudpickle, which carries the function to the ranks",
            given=f"none in {sys.executable}",
            expected="cloudpickle 2.2 or newer",
            action="pip install cloudpickle",
        ) from None
    usual = cloudpickle.CloudPickler.dispatch_table
    plain = usual[types.CodeType]

    def reduce_with_source(code: types.CodeType) -> tuple[Any, ...]:
        return _make_code, (*plain(code), code.co_filename, linecache.getlines(code.co_filename))

    class CallPickler(cloudpickle.CloudPickler):
        dispatch_table: ClassVar[Any] = collections.ChainMap({types.CodeType: reduce_with_source}, usual)

    file = io.BytesIO()
    CallPickler(file).dump((fn, tuple(args), dict(kwargs or {})))
    return file.getvalue()


def _make_code(make: Callable[..., types.CodeType], args: Sequence[Any], name: str, lines: list[str]) -> types.CodeType:
    """Creates a function's code object with its source attached: notebook cells have no file."""
    linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return make(*args).replace(co_filename=name)


def main() -> None:
    """Runs one rank: reads the call, executes it, and writes its result."""
    folder = Path(sys.argv[1])
    fn, args, kwargs = pickle.loads((folder / _CALL).read_bytes())  # written by the user who started this
    result = pack(fn(*args, **kwargs))
    (folder / f"{os.environ[RANK_VARIABLE]}.result").write_bytes(result)


if __name__ == "__main__":
    main()
