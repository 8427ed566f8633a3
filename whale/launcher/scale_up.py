"""Starts ranks while a run goes on, where hosts have room, and tells the others of them once they are ready.

A joining rank's process starts beside the run, imports what it imports and builds what it builds; nobody waits for it.
When its script has come to where it would go on with the others, it says so. As soon as all that were started together
have, or have ended, every rank of the run hears of them in the same message, and they become ranks like the others.

The hosts that a run may have are asked for again and again: from a file, or from a program that prints them
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
    """Ranks that one mpirun has started, and that come in together."""

    mpirun: MpirunProcess
    coming: set[int]  # those that have yet to say that they are ready, or have ended
    ready: set[int] = field(default_factory=set)


class JoiningRanks:
    """The starter of ranks while a run goes on.

    Args:
        options: what `whale run` was asked for.
        line: the program mpirun, and its environment for the ranks of the run's start.
        links: the ranks of the run, to which those are added that come in.
        ending: is told who leaves.
        printer: shows what joining ranks print.
        selector: that of the loop; the data of its keys are called when their file is ready.
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
        self._apart = options.is_one_mpirun_per_host  # and the ranks of the start wait for each other's addresses
        self._places = dict(enumerate(_fill_hosts(options.hosts, options.ranks)))
        self._slots = find_free_slots(list(self._places.values()), [])
        self._wanted: tuple[Host, ...] | None = None  # hosts that are to be filled when the run can take ranks in
        self._history: list[dict[str, Any]] = []  # what all ranks were told of who is gone, and who has come
        assert options.hosts_from is not None
        self._hosts = HostSource(options.hosts_from)
        ending.goes_on_without = self._history.append
        selector.register(self._hosts.news, selectors.EVENT_READ, self._take_hosts)

    @property
    def processes(self) -> list[MpirunProcess]:
        """Returns the mpiruns of all joining ranks."""
        return [batch.mpirun for batch in self._batches]

    @property
    def links(self) -> list[ranks.RankLink]:
        """Returns the connections of joining ranks that have not come in."""
        return list(self._coming.values())

    def close(self) -> None:
        """Stops asking for hosts."""
        self._hosts.close()

    def ask(self) -> None:
        """Reads the list of hosts now, and starts as many ranks as it says, also in place of those that are gone."""
        self._hosts.ask()

    def is_expecting(self, rank: int) -> bool:
        """Tells whether a rank of this number was started, and has not come up yet."""
        return any(rank in batch.coming for batch in self._batches) and rank not in self._coming

    def greet(self, link: ranks.RankLink, rank: int) -> bool:
        """Takes the connection of a rank that has come up; False: it is one of the run's start."""
        if not self.is_expecting(rank):
            return False
        self._coming[rank] = link
        link.tell_start(self._start or "", self._history)
        return True

    def take(self, link: ranks.RankLink, rank: int, kind: FrameKind, payload: bytes) -> bool:
        """Acts on a frame of a rank that has not come in; False: it is one of the run's.

        Raises:
            ValueError: no worker sends this.
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
        """Handles the broken connection of a rank; False: it is one of the run's."""
        return self._forget_gone(rank, "was lost: its connection broke") if rank in self._coming else False

    def look(self) -> None:
        """Starts joining ranks, or lets them come in, when it is time."""
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
        """Tells the ranks of the start where each of them listens, once all do."""
        addresses = {rank: link.address for rank, link in self._links.items() if link.address}
        if len(addresses) == self._at_start:
            self._apart = False
            for link in self._links.values():
                link.tell({"rank": None, "all": addresses})

    @property
    def _start(self) -> str | None:
        """Returns the start that a rank of the run's start has reported, or None while none has."""
        return next((link.start for link in self._links.values() if link.start), None)

    def _take_hosts(self) -> None:
        found = self._hosts.take()
        if found is None:
            return
        forced, hosts = found
        if isinstance(hosts, str):
            self._printer.say(f"whale run: the hosts stay as they are: {hosts}")
        elif forced or set(hosts) != set(self._options.hosts):
            self._options = replace(self._options, hosts=hosts)
            self._wanted = hosts
            self.look()

    def _fill(self, hosts: tuple[Host, ...]) -> None:
        """Starts ranks where hosts have room, and makes the last ones leave where they have too many."""
        here = [rank for rank, link in self._links.items() if not link.exited and rank not in self._ending.left]
        had = Counter(self._places[rank] for rank in here)
        room = {host.name: host.slots for host in hosts}
        more = tuple(Host(h.name, h.slots - had[h.name]) for h in hosts if h.slots > had[h.name])
        for rank in sorted(here, reverse=True):
            name = self._places[rank]
            if had[name] > room.get(name, 0):
                had[name] -= 1
                reason = f"has to leave: {name} is to hold fewer ranks"
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
        self._printer.say(f"whale run: {named} start{'s' * (count == 1)} beside the others")
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
        """Reads an mpirun's output; at its end, the ranks that it has not brought up are given up."""
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
                self._printer.say(f"whale run: rank {rank} {what}; it has not joined the others, who go on")
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
    """Returns the number of each new rank on its host, the lowest that is free: a rank that is gone leaves its own.

    Args:
      places: the hosts of the new ranks.
      taken: (host, number) of the ranks that are there.
    """
    used, found = set(taken), []
    for name in places:
        slot = next(number for number in itertools.count() if (name, number) not in used)
        used.add((name, slot))
        found.append(slot)
    return found


def _fill_hosts(hosts: tuple[Host, ...], count: int) -> list[str]:
    """Returns the host of each of so many ranks, as mpirun places them: one host is filled after the other."""
    names = [host.name for host in hosts for _ in range(host.slots)]
    return (names or [socket.gethostname()] * count)[:count]


def read_hosts(path: str) -> tuple[Host, ...]:
    """Reads the hosts of a file, or of a program's output: ``name slots=2`` (Open MPI, Horovod) or ``name:2`` a line.

    Raises:
        ClusterError: the program fails, or a line cannot be read; or no host is left.
    """
    if os.access(path, os.X_OK):
        try:
            done = subprocess.run(
                [os.path.abspath(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWERS_S
            )
            wrong = f"it ended with code {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        if wrong:
            raise ClusterError(
                "the program that lists the hosts fails",
                given=path,
                reason=wrong,
                expected="a line for each host, name:ranks, and exit code 0",
                action="correct the program",
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
            parse_hosts(",".join(host.name for host in (*found.values(), *hosts)))  # each stands once
        except ClusterError as error:
            raise ClusterError(
                error.message,
                given=f"line {number} of {path}: {line.strip()}",
                expected="a line for each host: its name, and slots=2 or :2 for its ranks",
                action="correct that line",
            ) from None
        found |= {host.name: host for host in hosts}
    if not found:
        raise ClusterError(
            "no host is listed",
            given=f"{path}, in which no line names one",
            expected="a line for each host: its name, and slots=2 or :2 for its ranks",
            action="name one",
        )
    return tuple(found.values())


class HostSource:
    """The source of a run's hosts, asked in a thread of its own every `_EVERY_S` seconds and whenever `ask` is called.

    Attributes:
        news: readable when there is an answer that `take` has not taken.
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
        """Asks now; the answer counts as news even if it is the one before."""
        with self._lock:
            self._forced = True
        self._asked.set()

    def take(self) -> tuple[bool, tuple[Host, ...] | str] | None:
        """Returns the latest answer (whether it was asked for; the hosts, or what is wrong in words), once."""
        try:
            self.news.recv(1 << 12)
        except BlockingIOError:
            pass
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Stops asking; a program that is still at work is left to its end."""
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
