"""Checks which runs can continue after a loss of ranks, and fits their configuration to the remaining ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from whale.capture.captured import CapturedVariable
from whale.config import Config, Mesh
from whale.distributed.ranks import Ranks
from whale.errors import ClusterError, ConfigError, PlanError
from whale.partition.variable_use import VariableUse
from whale.runtime.variables.in_files import find_folder
from whale.runtime.variables.variable_store import find_given_tiles


def refuse(ranks: Ranks, joins: bool = False) -> None:
    """Raises ConfigError for a run that cannot continue after a loss of ranks. ``joins``: this process joins it."""
    config = ranks.config
    wrong = ""
    if ranks.place.launcher != "whale run" or not (ranks.has_other_processes or joins):
        wrong = f"{ranks.size} ranks started by {ranks.place.launcher}"
    elif config["batch.mode"] == "local":
        wrong = 'batch.mode "local": the rows that a rank brings are gone with it'
    elif config["memory.offload"]:
        wrong = f"memory.offload {config['memory.offload']!r}"
    elif config["communication.backend"] != "whale":
        wrong = f"communication.backend {config['communication.backend']!r}, whose ranks do not go on"
    if wrong:
        raise ConfigError(
            "this run cannot continue after a loss of ranks",
            given=f"elastic, and {wrong}",
            expected="several processes of `whale run`, Whale's own exchanges, and batches of all ranks",
            action="change that, or leave elastic out and use `whale run --max-restarts`",
        )


def has_divided_variables(uses: Mapping[str, VariableUse], size: int) -> bool:
    """Tells whether a program has variables of which some rank holds only a part, or nothing."""
    return any(use.tiles is not None or len(use.ranks) < size for use in uses.values())


def refuse_variables(variables: Sequence[CapturedVariable]) -> None:
    """Raises PlanError for a variable whose parts could not be divided among the remaining ranks."""
    for c in variables:
        if find_given_tiles(c) is not None:
            _refuse(c.name, "a LayoutMap that says how it lies", "a layout that Whale can choose again")
        if find_folder(c.variable):
            _refuse(c.name, "a table in files, which go with their rank", "a table in memory")


def _refuse(variable: str, given: str, expected: str) -> None:
    raise PlanError(
        "this run cannot continue after a loss of ranks",
        variable=variable,
        given=f"elastic, and {given}",
        expected=expected,
        action="leave elastic out, and use `whale run --max-restarts` with checkpoints",
    )


def refuse_plan(uses: Mapping[str, VariableUse], names: Mapping[str, str], size: int, copies: bool) -> None:
    """Raises PlanError for a plan in which one rank alone has a part of a variable, and no other rank keeps a copy."""
    if copies:
        return
    for node, use in uses.items():
        holders = len(use.place or range(size)) // use.tiles.count if use.tiles is not None else len(use.ranks)
        if holders == 1 and (use.tiles is not None or use.writes):
            raise PlanError(
                "a part of a variable would be lost with the only rank that holds it",
                variable=names.get(node, node),
                given='fault.elastic "replicas", and a plan that gives a part to one rank',
                expected='fault.elastic "memory", which keeps a copy on another rank, or replicas of each part',
                action='set fault.elastic to "memory"',
            )


def make_nothing_to_join_error() -> ClusterError:
    """Creates the error of a joining process that has no address of the run."""
    return ClusterError(
        "a process that joins a run has no address of the other ranks",
        given="a step, or another call that exchanges something, before wh.State or Keras 3's fit",
        expected="state = wh.State(...) before the training loop, or fit as the first such call",
        action="keep in the state what the loop has to know: its epoch, what it has counted",
    )


def make_done_before_error() -> ClusterError:
    """Creates the error of a joining process that would do together with the others what these have done before."""
    return ClusterError(
        "a process that joins a run would exchange something that the other ranks have exchanged before",
        given="a step, a checkpoint, or another call that exchanges something, between wh.State and the loop",
        expected="state.rest(batches), or state.commit(), first, where the others go on",
        action="make that call before wh.State",
    )


def make_other_place_error(there: str, here: str) -> ClusterError:
    """Creates the error of a joining process that has reached another commit of its script than the other ranks."""
    return ClusterError(
        "a process that joins a run has reached another place in the script than the other ranks",
        given=f"the others are in {there}, and this process in {here}",
        expected="the same on all",
        action="let a script that others join train in one way: by fit, or in a loop with wh.State",
    )


def find_fitting_changes(config: Config, size: int) -> dict[str, Any]:
    """Returns the changes that a configuration needs for ``size`` remaining ranks: a mesh, ranks of a split scope,
    stages.

    The data axis (the first one, if none has that name) gets the remaining ranks if the other axes divide them.
    Else axes get no sizes: those that the program names share the ranks.
    """
    changes: dict[str, Any] = {}
    if config["mesh.auto_parallel"] and config["pipeline.stages"] and size % config["pipeline.stages"]:
        changes["pipeline.stages"] = 0
    if config["mesh"]:
        sizes = dict(config["mesh"])
        grows = "data" if "data" in sizes else next(iter(sizes))
        others = math.prod(count for name, count in sizes.items() if name != grows)
        fits = size % others == 0
        sizes[grows] = size // others
        changes["mesh"] = Mesh(**{name: count for name, count in sizes.items() if count > 1}) if fits else Mesh()
    return changes


def count_hosts_left(emulated: Sequence[int], members: Sequence[int]) -> tuple[int, ...]:
    """Returns how many of the members are on each emulated host. ``emulated``: the number of ranks of each host."""
    of = list_emulated_hosts(emulated)
    left = [of[rank] for rank in members] if of else []
    return tuple(left.count(host) for host in dict.fromkeys(left))


def find_host_name(emulated: Sequence[int], rank: int) -> str:
    """Returns the name of the host of this rank by its number at the start."""
    of = list_emulated_hosts(emulated)
    return str(of[rank]) if rank < len(of) else socket.gethostname()


def list_emulated_hosts(emulated: Sequence[int]) -> list[int]:
    """Returns the number of each rank's emulated host; empty if there are none."""
    return [host for host, count in enumerate(emulated) for _ in range(count)]
