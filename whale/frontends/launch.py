"""Implements ``wh.launch``, which calls a function on every rank of a new run, from a script or a notebook.

python -m whale.frontends.launch FOLDER        runs one rank: reads the call in FOLDER and writes its result there
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
    """Starts a new run, calls a function on each of its ranks, and returns the results, as ``horovod.run`` does.

    The function must call ``wh.init()`` itself. It is sent by value, so that it may be defined in a notebook cell. What
    ranks print appears as with `whale run`. Ranks on other hosts need a temporary folder that all hosts see
    (``TMPDIR``).

    Args:
      fn: the function.
      args, kwargs: its arguments, the same on every rank.
      np: number of ranks.
      hosts: hosts and numbers of ranks, ``"host1:2,host2:2"``; None: all ranks on this host.
      threads: number of threads per rank; None: the host's cores divided by its ranks.
      max_restarts: how often the function may be called again, on the same number of ranks, after a failure.
      verbose: as `whale run -v`.

    Returns:
      The result of each rank, in order of ranks. Results may consist of numbers, text, bytes, NumPy arrays, and lists,
      tuples, dicts and sets of these.

    Raises:
      InstallError: cloudpickle, which sends the function, is not installed.
      ClusterError: the run cannot be started, or has failed.
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
                "the run that was started to call the function has failed",
                given=f"exit code {code}" if code else "a rank without a result",
                expected="a result from every rank",
                action="see the messages of the ranks above, and correct what they say",
            )
        return [unpack(path.read_bytes()) for path in found]


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Pickles a call by value, together with the source code of functions, which AutoGraph reads on the ranks.

    Raises:
      InstallError: cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise InstallError(
            "wh.launch needs cloudpickle, which sends the function to the ranks",
            given=f"no cloudpickle in {sys.executable}",
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
    """Creates a function's code object and registers its source in ``linecache``, since a notebook cell has no file.

    Args:
      make: pickle's own constructor of the code object.
      args: its arguments.
      name: the file name that the code is said to come from.
      lines: the source of that file.
    """
    linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return make(*args).replace(co_filename=name)


def main() -> None:
    """Runs one rank: reads the call from the folder given on the command line, executes it, and writes its result
    there.
    """
    folder = Path(sys.argv[1])
    fn, args, kwargs = pickle.loads((folder / _CALL).read_bytes())  # written by the user who started this
    result = pack(fn(*args, **kwargs))
    (folder / f"{os.environ[RANK_VARIABLE]}.result").write_bytes(result)


if __name__ == "__main__":
    main()
