"""Starts additional ranks while an elastic run goes on (`whale run --hosts-from`), and admits them once they are ready.

Joining ranks are started beside the run: each imports its libraries and builds its model while the present ranks keep
training. When the script of a joining rank reaches the point where it would go on together with the others, it reports
that it is ready. Once all ranks of a batch (those started by one mpirun) are ready or have ended, every rank of the run
receives the same message about them, and they become ordinary ranks.

The list of hosts that the run may use is read repeatedly, from a file or from a program that prints it
(``HostSource``).

Decisions: 0104, 0192.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whale.errors import ClusterError
from whale.launcher import mpirun
from whale.launcher.job import ranks
from whale.launcher.job.ending import Ending
from whale.launcher.job.mpirun_process import MpirunProcess
from whale.launcher.job.output import Printer
from whale.launcher.mpirun import Host, Options, parse_hosts
from whale.launcher.protocol import FIRST_VARIABLE, ExitStatus, FrameKind, RaisedReport, ScriptMessage, unpack
from whale.started import JOINS_VARIABLE, SLOTS_VARIABLE

_EVERY_S = 2.0
_ANSWERS_S = 30.0


@dataclass
class _Batch:
    """Holds the joining ranks that one mpirun has started; they are admitted to the run together."""

    mpirun: MpirunProcess
    coming: set[int]  # ranks that have neither reported that they are ready nor ended
    ready: set[int] = field(default_factory=set)


class JoiningRanks:
    """Starts joining ranks for the launcher's event loop, and admits them to the run; implements
    `whale.launcher.job.job.Growth`.

    Args:
        options: the options of `whale run`.
        program: path of mpirun.
        environment: the environment with which the first ranks were started.
        links: connections of the ranks that take part in the run; joining ranks are added when they are admitted.
        ending: is told of ranks that have to leave, because a host may hold fewer ranks than before.
        printer: prints the output of joining ranks.
        selector: selector of the event loop, which calls the data of a key when its file is readable.
    """

    def __init__(
        self,
        options: Options,
        program: str,
        environment: Mapping[str, str],
        links: dict[int, ranks.RankLink],
        ending: Ending,
        printer: Printer,
        selector: selectors.BaseSelector,
    ) -> None:
        self._options, self._program, self._environment = options, program, environment
        self._links, self._ending, self._printer, self._selector = links, ending, printer, selector
        self._at_start = self._next = options.ranks
        self._batches: list[_Batch] = []
        self._coming: dict[int, ranks.RankLink] = {}
        self._apart = options.is_one_mpirun_per_host  # the first ranks then wait for each other's addresses
        self._places = dict(enumerate(_fill_hosts(options.hosts, options.ranks)))
        self._slots = find_free_slots(list(self._places.values()), [])
        self._wanted: tuple[Host, ...] | None = None  # hosts to be filled as soon as the run can admit ranks
        self._history: list[dict[str, Any]] = []  # all messages to the ranks about lost and joined ranks
        assert options.hosts_from is not None
        self._hosts = HostSource(options.hosts_from)
        ending.goes_on_without = self._history.append
        selector.register(self._hosts.news, selectors.EVENT_READ, self._take_hosts)

    @property
    def processes(self) -> list[MpirunProcess]:
        """Returns the mpirun processes of all joining ranks, past and present, so that the launcher can end them."""
        return [batch.mpirun for batch in self._batches]

    @property
    def links(self) -> list[ranks.RankLink]:
        """Returns the connections of joining ranks that have not been admitted yet."""
        return list(self._coming.values())

    def close(self) -> None:
        """Stops reading the list of hosts, at the end of the run."""
        self._hosts.close()

    def ask(self) -> None:
        """Reads the list of hosts now, and starts all ranks that are missing, including replacements for lost ones.

        The launcher calls it on SIGHUP. A periodic read acts only if the list has changed.
        """
        self._hosts.ask()

    def is_expecting(self, rank: int) -> bool:
        """Returns True if a joining rank with this number was started and its worker has not connected yet."""
        return any(rank in batch.coming for batch in self._batches) and rank not in self._coming

    def greet(self, link: ranks.RankLink, rank: int) -> bool:
        """Takes over the connection of a joining rank's worker, and tells its script what has happened in the run so
        far.

        Returns:
            False if the rank is not a joining one; the caller then treats it as one of the first ranks.
        """
        if not self.is_expecting(rank):
            return False
        self._coming[rank] = link
        link.tell_start(self._start or "", self._history)
        return True

    def take(self, link: ranks.RankLink, rank: int, kind: FrameKind, payload: bytes) -> bool:
        """Handles a frame from a joining rank that has not been admitted yet.

        Returns:
            False if the rank takes part in the run already; the caller then handles the frame.

        Raises:
            ValueError: the frame's payload is malformed.
        """
        if rank not in self._coming:
            return False
        if kind in (FrameKind.STDOUT, FrameKind.STDERR):
            self._printer.write(rank, int(kind is FrameKind.STDERR), payload)
        elif kind is FrameKind.FAILURE:
            link.raised = True
            failure = ranks.make_raised_failure(rank, unpack(payload, RaisedReport))
            self._printer.write_lines(rank, 1, failure.traceback)
            self._forget_gone(rank, failure.reason)
        elif kind is FrameKind.EXIT:
            status = unpack(payload, ExitStatus)
            link.exited, link.code = True, status.code
            failure_of = ranks.make_exit_failure(rank, link.host, status)
            self._forget_gone(rank, failure_of.reason if failure_of else "has ended")
        elif kind is FrameKind.SCRIPT:
            message = unpack(payload, ScriptMessage)
            link.take(message)
            if message.ready:
                batch = next(batch for batch in self._batches if rank in batch.coming)
                batch.coming.discard(rank)
                batch.ready.add(rank)
                self.look()
        return True

    def lose(self, rank: int) -> bool:
        """Handles the broken connection of a joining rank. Returns False if the rank takes part in the run already."""
        return self._forget_gone(rank, "was lost: its connection broke") if rank in self._coming else False

    def look(self) -> None:
        """Starts or admits joining ranks if the run is ready for it: not ending, and every rank that runs is elastic.

        The event loop calls it in every round.
        """
        if self._apart:
            self._connect()
        if self._ending.has_begun or not all(link.elastic or link.exited for link in self._links.values()):
            return
        for batch in self._batches:
            if batch.ready and not batch.coming:
                self._come_in(batch)
        if self._wanted is not None and self._start is not None and not self._coming:
            wanted, self._wanted = self._wanted, None
            self._fill(wanted)

    def _connect(self) -> None:
        """Sends the addresses at which ranks listen to all ranks of the run's start, once the last of these has
        reported its own.

        Only needed with an mpirun per host, where MPI does not connect the ranks of different hosts.
        """
        addresses = {rank: link.address for rank, link in self._links.items() if link.address}
        if len(addresses) == self._at_start:
            self._apart = False
            for link in self._links.values():
                link.tell({"rank": None, "all": addresses})

    @property
    def _start(self) -> str | None:
        """Returns the state that joining ranks have to begin with, as a rank of the run's start has reported it; None
        if none has so far.
        """
        return next((link.start for link in self._links.values() if link.start), None)

    def _take_hosts(self) -> None:
        found = self._hosts.take()
        if found is None:
            return
        forced, hosts = found
        if isinstance(hosts, str):
            self._printer.say(f"whale run: the new list of hosts is not used, and the run keeps its hosts: {hosts}")
        elif forced or set(hosts) != set(self._options.hosts):
            self._options = replace(self._options, hosts=hosts)
            self._wanted = hosts
            self.look()

    def _fill(self, hosts: tuple[Host, ...]) -> None:
        """Starts ranks on hosts that have free slots, and makes the highest ranks leave on hosts that have too many."""
        here = [rank for rank, link in self._links.items() if not link.exited and rank not in self._ending.left]
        had = Counter(self._places[rank] for rank in here)
        room = {host.name: host.slots for host in hosts}
        more = tuple(Host(h.name, h.slots - had[h.name]) for h in hosts if h.slots > had[h.name])
        for rank in sorted(here, reverse=True):
            name = self._places[rank]
            if had[name] > room.get(name, 0):
                had[name] -= 1
                reason = f"has to leave: the list of hosts allows fewer ranks on {name}"
                self._ending.fail(ranks.Failure(rank, 1, reason, gone=True, wanted=True))
                self._links[rank].send_signal(signal.SIGKILL)
        count = sum(host.slots for host in more)
        if not count:
            return
        first, self._next = self._next, self._next + count
        placed = _fill_hosts(more, count)
        taken = [(self._places[rank], self._slots[rank]) for rank in here]
        self._places.update(enumerate(placed, first))
        self._slots += find_free_slots(placed, taken)
        numbers = range(first, first + count)
        named = f"rank{'s' * (count > 1)} {', '.join(map(str, numbers))}"
        self._printer.say(f"whale run: {named} start{'s' * (count == 1)}, to join the run")
        options = replace(self._options, ranks=count, hosts=more)
        environment = {
            **self._environment,
            FIRST_VARIABLE: str(first),
            JOINS_VARIABLE: str(self._at_start),
            SLOTS_VARIABLE: ",".join(map(str, self._slots)),
        }
        process = MpirunProcess(mpirun.make_command(options, self._program, environment), environment)
        batch = _Batch(process, set(numbers))
        self._batches.append(batch)
        self._selector.register(process.output, selectors.EVENT_READ, lambda: self._read(batch))

    def _read(self, batch: _Batch) -> None:
        """Reads output of a batch's mpirun; when it has ended, gives up those of its ranks whose workers never
        connected.
        """
        if batch.mpirun.read():
            return
        self._selector.unregister(batch.mpirun.output)
        for rank in [rank for rank in batch.coming if rank not in self._coming]:
            said = batch.mpirun.output_text
            self._forget_gone(rank, "did not start" + (f": {said}" if said else ""))

    def _forget_gone(self, rank: int, what: str) -> bool:
        self._coming.pop(rank, None)
        for batch in self._batches:
            if rank in batch.coming | batch.ready:
                batch.coming.discard(rank)
                batch.ready.discard(rank)
                self._printer.say(f"whale run: rank {rank} {what}; it has not joined the run, which goes on")
        self.look()
        return True

    def _come_in(self, batch: _Batch) -> None:
        joined = sorted(batch.ready)
        batch.ready.clear()
        for rank in joined:
            self._links[rank] = self._coming.pop(rank)
        addresses = {rank: link.address for rank, link in self._links.items() if link.address}
        message = {"rank": None, "joined": joined, "addresses": addresses, "goes_on": True}
        self._history.append(message)
        for link in self._links.values():
            if not link.exited:
                link.tell(message)


def find_free_slots(places: Sequence[str], taken: Iterable[tuple[str, int]]) -> list[int]:
    """Returns the local rank (number on its host) of each new rank: the lowest number that no running rank on that host
    has.

    The number of a lost rank is free again, so that a rank which takes its place gets the same GPU.

    Args:
        places: the hosts of the new ranks.
        taken: (host, local rank) of the ranks that are running.
    """
    used, found = set(taken), []
    for name in places:
        slot = next(number for number in itertools.count() if (name, number) not in used)
        used.add((name, slot))
        found.append(slot)
    return found


def _fill_hosts(hosts: tuple[Host, ...], count: int) -> list[str]:
    """Returns the host of each of `count` ranks; like mpirun, it fills one host after the other. Without hosts: this
    host.
    """
    names = [host.name for host in hosts for _ in range(host.slots)]
    return (names or [socket.gethostname()] * count)[:count]


def read_hosts(path: str) -> tuple[Host, ...]:
    """Reads the list of hosts from a file or, if the file is executable, from the output of that program.

    Each line is ``name slots=2`` (as for Open MPI and Horovod) or ``name:2``; ``#`` begins a comment.

    Raises:
        ClusterError: the program fails, a line cannot be parsed, or no host is listed.
        OSError: the file cannot be read.
    """
    if os.access(path, os.X_OK):
        try:
            done = subprocess.run(
                [os.path.abspath(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWERS_S
            )
            wrong = f"exit code {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        if wrong:
            raise ClusterError(
                "the program that lists the hosts fails",
                given=path,
                reason=wrong,
                expected="a line name:ranks for each host, and exit code 0",
                action=f"run {path} by hand and correct what it prints",
            )
        text = done.stdout
    else:
        with open(path) as file:
            text = file.read()
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = next((f":{word[6:]}" for word in words[1:] if word.startswith("slots=")), "")
        try:
            hosts = parse_hosts(words[0] + slots)
            parse_hosts(",".join(host.name for host in (*found.values(), *hosts)))  # refuses a name that occurs twice
        except ClusterError as error:
            raise ClusterError(
                error.message,
                given=f"line {number} of {path}: {line.strip()}",
                expected="a line for each host: its name, and slots=2 or :2 for its ranks",
                action=f"correct line {number} of {path}; a valid line is: node1 slots=2",
            ) from None
        found |= {host.name: host for host in hosts}
    if not found:
        raise ClusterError(
            "no host is listed",
            given=f"{path}, in which no line names a host",
            expected="a line for each host: its name, and slots=2 or :2 for its ranks",
            action="add a line such as node1:2",
        )
    return tuple(found.values())


class HostSource:
    """Reads the list of hosts in a thread, every `_EVERY_S` seconds and whenever `ask` is called.

    Attributes:
        news: a socket that is readable while there is a result that `take` has not returned, for the event loop.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._asked, self._ended = threading.Event(), False
        self._lock = threading.Lock()
        self._found: tuple[bool, tuple[Host, ...] | str] | None = None
        self.news, self._teller = socket.socketpair()
        self.news.setblocking(False)
        self._teller.setblocking(False)
        self._forced = False
        self._thread = threading.Thread(target=self._run, name="whale-hosts", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Reads the list now; the result is reported even if it equals the one before."""
        with self._lock:
            self._forced = True
        self._asked.set()

    def take(self) -> tuple[bool, tuple[Host, ...] | str] | None:
        """Returns the latest result once, or None if there is no new one.

        Returns:
            (whether `ask` was called for it, the hosts or the text of an error).
        """
        try:
            self.news.recv(1 << 12)
        except BlockingIOError:
            pass
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Stops the reading; a program that is still running is not waited for."""
        self._ended = True
        self._asked.set()
        self.news.close()
        self._teller.close()

    def _run(self) -> None:
        before: tuple[Host, ...] | str | None = None
        while not self._ended:
            self._asked.wait(_EVERY_S)
            self._asked.clear()
            with self._lock:
                forced, self._forced = self._forced, False
            try:
                found: tuple[Host, ...] | str = read_hosts(self._path)
            except (ClusterError, OSError) as error:
                found = str(error)
            if found == before and not forced:
                continue
            with self._lock:
                self._found = forced or (self._found is not None and self._found[0]), found
            before = found
            try:
                self._teller.send(b"\0")
            except OSError:
                return  # closed meanwhile
