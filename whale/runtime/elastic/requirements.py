"""Checks whether a run can continue after a loss of ranks, and fits its configuration to the remaining ranks."""

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
    """Raises ConfigError if the run is configured elastic but cannot continue after a loss of ranks.

    Args:
      joins: whether this process joins the run.
    """
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
            given=f"fault.elastic (wh.init(elastic=True)), and {wrong}",
            expected="several processes started by `whale run`, communication.backend whale, batch.mode global, and no "
            "memory.offload",
            action="change what `given` names, or leave elastic=True (fault.elastic) out and use `whale run "
            "--max-restarts` with checkpoints",
        )


def has_divided_variables(uses: Mapping[str, VariableUse], size: int) -> bool:
    """Returns True if a program has a variable of which some rank holds only a part, or nothing."""
    return any(use.tiles is not None or len(use.ranks) < size for use in uses.values())


def refuse_variables(variables: Sequence[CapturedVariable]) -> None:
    """Raises PlanError for a variable that could not be divided anew among the remaining ranks: its layout is given, or
    it is stored in files.
    """
    for c in variables:
        if find_given_tiles(c) is not None:
            _refuse(c.name, "a LayoutMap that fixes its layout", "a layout that Whale can choose anew")
        if find_folder(c.variable):
            _refuse(c.name, "a table in files, which are lost with their rank", "a table in memory")


def _refuse(variable: str, given: str, expected: str) -> None:
    raise PlanError(
        "this run cannot continue after a loss of ranks",
        variable=variable,
        given=f"fault.elastic (wh.init(elastic=True)), and {given}",
        expected=expected,
        action="leave elastic=True (fault.elastic) out, and use `whale run --max-restarts` with checkpoints",
    )


def refuse_plan(uses: Mapping[str, VariableUse], names: Mapping[str, str], size: int, copies: bool) -> None:
    """Raises PlanError if one rank alone has a part of a variable, and no copies are kept.

    Args:
      uses: name of a variable's handle node -> how the program uses a variable.
      names: name of a variable's handle node -> name of the variable, for the message.
      size: number of ranks.
      copies: whether other ranks keep copies (``fault.elastic="memory"``).
    """
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
                action='set fault.elastic="memory", as wh.init(elastic=True) does',
            )


def make_nothing_to_join_error() -> ClusterError:
    """Creates the error for a joining process that makes a call together with other ranks before ``wh.State`` or
    ``fit`` has connected it to them.
    """
    return ClusterError(
        "a process that joins a run has no address of the other ranks",
        given="a step, or another call that all ranks make together, before wh.State or Keras 3's fit",
        expected="state = wh.State(...) before the training loop, or fit as the first such call",
        action="create a wh.State with what the loop has to know, such as its epoch, before that call",
    )


def make_done_before_error() -> ClusterError:
    """Creates the error for a joining process that makes, between ``wh.State`` and its first commit, a call that all
    ranks make together: the other ranks have made this call before it came.
    """
    return ClusterError(
        "a process that joins a run makes a call that the other ranks have made together before",
        given="a step, a checkpoint, or another call that all ranks make together, between wh.State and the loop",
        expected="state.rest(batches) or state.commit() as the first call after wh.State",
        action="make that call before wh.State, or in the loop",
    )


def make_other_place_error(there: str, here: str) -> ClusterError:
    """Creates the error for a joining process that has reached another commit of its script than the other ranks.

    Args:
      there: where the other ranks' script is, in words.
      here: where this process's script is.
    """
    return ClusterError(
        "a process that joins a run has reached another place in the script than the other ranks",
        given=f"the other ranks are in {there}, and this process is in {here}",
        expected="the same place on all ranks",
        action="in a script that processes join, train only by fit, or only in a loop with wh.State",
    )


def find_fitting_changes(config: Config, size: int) -> dict[str, Any]:
    """Returns the changes that a configuration needs for ``size`` remaining ranks: key -> value, for the mesh and the
    number of stages.

    The data axis (the first one, if none has that name) gets the remaining ranks if the other axes divide their number.
    Otherwise the mesh gets no sizes, and the axes that the program names share the ranks.
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
    """Returns how many of the members are on each emulated host that still has some.

    Args:
      emulated: number of ranks on each emulated host at the start; empty: hosts are not emulated.
    """
    of = list_emulated_hosts(emulated)
    left = [of[rank] for rank in members] if of else []
    return tuple(left.count(host) for host in dict.fromkeys(left))


def find_host_name(emulated: Sequence[int], rank: int) -> str:
    """Returns the name of a rank's host: the number of its emulated host, or else this machine's name.

    Args:
      rank: its number at the start.
    """
    of = list_emulated_hosts(emulated)
    return str(of[rank]) if rank < len(of) else socket.gethostname()


def list_emulated_hosts(emulated: Sequence[int]) -> list[int]:
    """Returns, for each rank, the number of its emulated host; [] if hosts are not emulated."""
    return [host for host, count in enumerate(emulated) for _ in range(count)]
