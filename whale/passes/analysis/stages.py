"""Finds which pipeline stage each node of a program belongs to, and which ranks run the stage.

Nodes built under ``wh.stage`` belong to that stage, with their backward nodes. A variable has one stage: nodes that
take its handle are there, and the value that they read is sent to other stages. Cheap nodes that depend on inputs,
constants and counters only are *free*: every stage that reads them computes them itself. All other nodes are assigned
by the bytes that would be sent. Any assignment gives the same results, since a tensor produced in one stage and read in
another is sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from whale.errors import PlanError
from whale.ir.mesh import DATA, STAGE, Axis, format_axes
from whale.ir.ops import ASSIGNS, READS, READS_ROWS
from whale.ir.plan import StageGroup
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.ir.topology import Topology
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.rank_order import order_ranks
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.analysis.scopes import PASSED_ON
from whale.passes.settings import PlanSettings

_STAGE = re.compile(r"stage_\d+(?:\(ranks=(?P<ranks>\d+(?:\+\d+)*)\))?$")
LENDS = "lends its cores"  # name of the group of a rank without stages
# Ops on a variable (such as a counter) that every rank may run on a copy of its own, if their operands are free.
_COUNTING = (READS - READS_ROWS) | ASSIGNS  # without lookups of rows: these tables are weights


@lru_cache(maxsize=4096)
def stage_of(path: str) -> str:
    """Returns the beginning of a scope's path up to its innermost ``stage_..`` part; "" if it is in no stage."""
    parts = path.split("/")
    last = max((i for i, part in enumerate(parts) if _STAGE.match(part)), default=-1)
    return "/".join(parts[: last + 1])


def has_stages(program: Program) -> bool:
    """Returns True if any node or variable of the program was created under ``wh.stage``."""
    return any(map(stage_of, program.scopes)) or any(stage_of(v.scope) for v in program.variables)


def stages_of(program: Program) -> tuple[str, ...]:
    """Lists the stages in the order of the data flow; stages that do not depend on each other are in the order in which
    they were entered.
    """
    stage = {n.name: stage_of(n.scope) for n in program.nodes}
    found = sorted({s for s in stage.values() if s}, key=_count_entered)
    if not found:
        return ()
    before: dict[str, set[str]] = {s: set() for s in found}  # stage -> stages that it reads from, directly or not
    handles, free = program.variable_of, free_nodes(program)
    weights: set[str] = set()  # values read from variables, whose stages say nothing about the order

    for node in program.nodes:
        reads = any(r.node in handles for r in node.inputs)
        # A branch or a lookup reads the batch besides a variable: its result is data, not a weight.
        if reads and all(r.node in handles or r.node in weights or r.node in free for r in node.inputs):
            weights.add(node.name)
        elif node.op in PASSED_ON and node.inputs[0].node in weights:
            weights.add(node.name)
        mine = stage[node.name]
        read = (r.node for r in node.inputs if r.node not in weights and r.node not in free)
        for other in {stage[name] for name in read} - {mine, ""} if mine else ():
            # The first read between two stages decides their order: backward reads come later in the program.
            if mine not in before[other] and other not in before[mine]:
                more = before[other] | {other}
                for s in found:
                    if s == mine or mine in before[s]:
                        before[s] |= more
    return tuple(sorted(found, key=lambda s: len(before[s])))


def _count_entered(stage: str) -> int:
    return int(re.search(r"stage_(\d+)[^/]*$", stage)[1])  # type: ignore[index]


def stage_groups_of(program: Program, settings: PlanSettings) -> tuple[StageGroup, ...]:
    """Returns the stage groups: the ranks of each stage, with stages on the same ranks in one group; () if the program
    has no stages.

    Stages with ``devices`` are on these. Others share the ranks (see ``share_ranks``). If the mesh has an axis
    ``stage``, stage s is on the ranks with coordinate s modulo the axis' size; if it has other axes only, each stage is
    on consecutive ranks. Ranks that lend their cores are groups without stages.

    Raises:
      PlanError: the ranks cannot be shared among the stages.
    """
    stages, size = stages_of(program), settings.size
    if size == 1 or not stages:
        return ()
    given = [_STAGE.match(stage.rsplit("/", 1)[-1])["ranks"] for stage in stages]  # type: ignore[index]
    ranks: list[tuple[int, ...]]
    if all(given):
        ranks = [tuple(map(int, text.split("+"))) for text in given]
        if max(map(max, ranks)) >= size:
            raise PlanError(
                "the devices of a wh.stage are ranks that do not exist",
                given=f"devices={list(max(ranks, key=max))}, {size} ranks",
                expected=f"ranks below {size}",
                action="start more ranks, or change `devices=` of the stage",
            )
    elif any(given):
        raise PlanError(
            "some stages name their devices and others do not",
            given=", ".join(stages),
            expected="devices for all stages, or for none",
            action="give `devices=` to every wh.stage, or to none",
        )
    elif settings.mesh:
        order = settings.rank_order or range(size)
        ranks = [tuple(order[i] for i in at) for at in _along_mesh(stages, size, settings.mesh)]
    else:
        ranks = share_ranks(len(stages), size, settings.hosts)
    together: dict[tuple[int, ...], list[str]] = {}
    for stage, mine in zip(stages, ranks):
        together.setdefault(mine, []).append(stage)
    _refuse_overlap(tuple(together))
    groups = tuple(StageGroup(" + ".join(names), mine, tuple(names)) for mine, names in together.items())
    if not settings.lent_threads:
        return groups
    # Ranks that lend their cores are groups of one rank, like the one that computes, so that all have the same plan.
    return (*groups, *(StageGroup(LENDS, (rank,), ()) for rank in range(size) if (rank,) not in together))


def share_ranks(count: int, size: int, hosts: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Returns the ranks of each of ``count`` stages, among ``size`` ranks.

    Stage s is on the ranks s, s + count, s + 2 count, ..: with R times as many ranks as stages there are R replicas;
    otherwise the first stages have one rank more. With fewer ranks than stages, stage s is on rank s % size. On several
    hosts, replicas of a stage are near each other instead if all stages have the same number, since replicas send more
    than stages do.

    Args:
      hosts: number of the host of each rank; (): all are on one host.
    """
    if len(set(hosts)) > 1 and size % count == 0:
        axes = (Axis(STAGE, count), Axis(DATA, size // count))
        order = order_ranks(Topology(hosts, tuple(map(str, sorted(set(hosts))))), axes) or range(size)
        return [tuple(order[i : i + size // count]) for i in range(0, size, size // count)]
    return [tuple(range(s, size, count)) if count <= size else (s % size,) for s in range(count)]


def _along_mesh(stages: Sequence[str], size: int, mesh: Sequence[Axis]) -> list[tuple[int, ...]]:
    """Returns the ranks of each stage by their coordinates in the mesh.

    Raises:
      PlanError: the mesh does not fit the number of ranks, or its axis ``stage`` the number of stages.
    """
    axes = list(mesh) if any(a.name == STAGE for a in mesh) else [Axis(STAGE, len(stages)), *mesh]
    number = next(i for i, a in enumerate(axes) if a.name == STAGE)
    filled = prod(a.size for a in axes)
    if size % filled or len(stages) % axes[number].size or (filled != size and any(a.name == DATA for a in axes)):
        raise PlanError(
            "the ranks cannot be shared among the stages of the mesh",
            given=f"mesh {format_axes(axes)}, {len(stages)} stages, {size} ranks",
            expected="axis sizes whose product is the number of ranks, and as many wh.stage scopes as the axis stage "
            "is long, or a multiple of that",
            action="change the key `mesh`, the number of ranks, or the number of wh.stage scopes",
        )
    inside = size // prod(a.size for a in axes[: number + 1])  # ranks that are left over come after the axis ``stage``
    inside = prod(a.size for a in axes[number + 1 :]) if filled == size else inside
    groups = axes[number].size
    of_group = [tuple(r for r in range(size) if r // inside % groups == s) for s in range(groups)]
    return [of_group[s % groups] for s in range(len(stages))]


def _refuse_overlap(groups: Sequence[tuple[int, ...]]) -> None:
    seen: set[int] = set()
    for group in groups:
        if seen & set(group) or len(set(group)) < len(group):
            raise PlanError(
                "two stages share some, but not all, of their ranks",
                given=", ".join(f"devices={list(g)}" for g in groups),
                expected="for each two stages the same ranks in the same order, or no rank in common",
                action="change `devices=` of these stages",
            )
        seen |= set(group)


# -- which stage a node belongs to


def free_nodes(program: Program) -> set[str]:
    """Returns the names of the free nodes: cheap ones, such as counters, that every stage group may compute itself."""
    handles = program.variable_of
    shared = set(handles)
    takers: dict[str, list[Node]] = {name: [] for name in handles}
    for node in program.nodes:
        for ref in node.inputs:
            if ref.node in takers:
                takers[ref.node].append(node)
    nodes: Sequence[Node] = program.nodes
    light: dict[str, bool] = {}  # node -> whether it is cheap; filled on demand
    while True:
        free: set[str] = set()
        kept: list[Node] = []
        for node in nodes:
            if node.name in handles:
                found = node.name in shared
            elif not _has_only(free, node):
                continue
            else:
                if node.name not in light:
                    light[node.name] = _is_light(program, node)
                found = light[node.name]
            if found:
                free.add(node.name)
                kept.append(node)
        still = {name for name in shared if all(n.name in free for n in takers[name])}
        if still == shared:
            return free
        shared, nodes = still, kept  # with fewer shared variables no more nodes become free


def _has_only(free: Collection[str], node: Node) -> bool:
    """Returns True if all operands and control inputs of a node are in ``free``."""
    for ref in node.inputs:
        if ref.node not in free:
            return False
    for name in node.controls:
        if name not in free:
            return False
    return True


def _is_light(program: Program, node: Node) -> bool:
    """Returns True if a node is cheap enough to be computed wherever it is read, if its operands are free."""
    if node.name in program.inputs:
        return node.op == "Placeholder"
    if not node.inputs and not node.outputs:
        return False  # a NoOp is in no stage group
    of_variable = any(r.node in program.variable_of for r in node.inputs)
    return (
        (node.op in _COUNTING if of_variable else not node.stateful)
        and not any(t.dtype in UNMOVABLE for t in node.outputs)
        and not count_matmul_flops(node, [program.find_type(r) for r in node.inputs])
        and not (program.functions and any(True for _ in iterate_function_refs(node)))
    )


def assign_stages(program: Program, annotated: Program) -> Program:
    """Puts every node of ``annotated`` into the scope of the pipeline stage that computes it.

    Nodes without a ``wh.stage`` scope of their own get the stage of the nodes that they read from or that read them.
    Nodes that any rank may compute (`free_nodes`: constants and what is computed from them) and NoOps stay outside of
    stages.

    Args:
      program: the program with only the scopes that the user gave.
      annotated: the same nodes, with the scopes that passes have added.
    """
    if not has_stages(program):
        return annotated
    stage = find_stages(program)
    known = set(stage.values())
    nodes = []
    for node in annotated.nodes:
        mine = stage.get(node.name, "")
        if not mine and stage_of(node.scope) not in known:
            node = replace(node, scope="")  # of a stage in which only variables were created
        nodes.append(node if not mine or stage_of(node.scope) == mine else replace(node, scope=mine))
    return annotated.replace_nodes(tuple(nodes))


def find_stages(program: Program) -> dict[str, str]:
    """Returns the stage of each node that is not free, by name."""
    return _Assignment(program).run()


class _Assignment:
    """Infers the stage of every node that is not free."""

    def __init__(self, program: Program):
        self.program = program
        self.free = free_nodes(program)
        self.explicit = {n.name: stage_of(n.scope) for n in program.nodes if stage_of(n.scope)}
        of_variables = [stage_of(v.scope) for v in program.variables]
        order = set(self.explicit.values()) or {s for s in of_variables if s}
        self.order = {stage: i for i, stage in enumerate(sorted(order, key=_count_entered))}
        self.stage: dict[str, str] = {}
        self.together = self._together()

    def run(self) -> dict[str, str]:
        program = self.program
        self._put_what_stays_together()
        for name, stage in self.explicit.items():
            if name not in self.free:
                self._put(name, stage)
        placed = set(self.stage)
        reads: dict[str, str] = {}  # node that yields a variable's value -> its stage; "": several stages read it
        for node in program.nodes:
            if any(r.node in program.variable_of for r in node.inputs):
                several = len(set(self._mark(reader.name for reader in self._readers(node)))) > 1
                reads[node.name] = "" if several else self.stage.get(node.name, "")
            elif node.op in PASSED_ON and node.inputs[0].node in reads:
                reads[node.name] = reads[node.inputs[0].node]
            if node.name in self.free or node.name in self.stage or does_nothing(node):
                continue
            owned = [s for s in (reads.get(r.node, "") for r in node.inputs) if s]
            found = max(owned, key=self._number) if owned and node.op not in PASSED_ON else self._nearest(node, reads)
            if owned:
                placed.add(node.name)
            if found:
                self._put(node.name, found)
        for node in reversed(program.nodes):
            if node.name in self.free or does_nothing(node):
                continue
            readers = [s for s in (self.stage.get(n.name, "") for n in self._readers(node)) if s]
            if node.name not in self.stage:
                self._put(node.name, readers[0] if readers else next(iter(self.order)))
            elif node.name not in placed and len(set(readers)) == 1:
                self._move_if_less(node, readers[0])
        return self.stage

    def _number(self, stage: str) -> int:
        return self.order[stage]

    def _readers(self, node: Node) -> Iterable[Node]:
        return (reader for ref in node.list_refs() for reader, _ in self.program.consumers.get(ref, ()))

    def _together(self) -> dict[str, list[str]]:
        """Groups nodes that must be in one stage, because a tensor between them cannot be sent; maps each of them to
        its group.
        """
        leader: dict[str, str] = {n.name: n.name for n in self.program.nodes}

        def find(name: str) -> str:
            while leader[name] != name:
                leader[name] = leader[leader[name]]
                name = leader[name]
            return name

        by_name = self.program.by_name
        for node in self.program.nodes:
            if node.name in self.free:
                continue
            for ref in node.inputs:
                if ref.node not in self.free and by_name[ref.node].outputs[ref.index].dtype in UNMOVABLE:
                    leader[find(node.name)] = find(ref.node)
        groups: dict[str, list[str]] = {}
        for node in self.program.nodes:
            groups.setdefault(find(node.name), []).append(node.name)
        return {name: members for members in groups.values() if len(members) > 1 for name in members}

    def _put_what_stays_together(self) -> None:
        """Assigns each group of inseparable nodes to a stage: preferably that of a lookup in it, then one that the user
        gave, then that of a reader.
        """
        by_name, handles = self.program.by_name, self.program.variable_of
        fetched = {r.node for r in self.program.outputs if self.program.find_type(r).dtype in UNMOVABLE}
        for members in {id(m): m for m in self.together.values()}.values():
            if fetched & set(members):
                stage = next(iter(self.order))  # the first rank returns the tensor to the script
            else:
                sparse = [n for n in members if by_name[n].op in READS_ROWS]
                created = [stage_of(handles[n].scope) for n in members if n in handles]
                known = [s for s in created if s in self.order] if not self._mark(members) else []
                readers = [r.name for name in members if name not in handles for r in self._readers(by_name[name])]
                reading = sorted(self._mark(readers), key=self._number)
                stage = next(iter(self._mark(sparse) + self._mark(members) + known + reading), "")
            for name in members if stage else ():
                self.stage[name] = stage

    def _mark(self, names: Iterable[str]) -> list[str]:
        return [self.explicit[n] for n in names if n in self.explicit]

    def _put(self, name: str, stage: str) -> None:
        if name not in self.stage:
            for member in self.together.get(name, [name]):
                self.stage[member] = stage

    def _nearest(self, node: Node, reads: Mapping[str, str]) -> str:
        """Returns the stage from which a node reads the most bytes, so that least is sent; "" if no operand has a
        stage. Weights that several stages read do not count.

        Of stages with equal bytes the last one wins; for a sum of gradients (AddN) the first one, where backward passes
        end.

        Args:
          reads: node that yields a variable's value -> its stage; "" if several stages read the value.
        """
        near: Counter[str] = Counter()
        for ref in dict.fromkeys(node.inputs):
            if self.stage.get(ref.node) and reads.get(ref.node) != "":
                near[self.stage[ref.node]] += self._bytes(ref)
        sign = -1 if node.op == "AddN" else 1
        return max(near, key=lambda s: (near[s], sign * self._number(s))) if near else ""

    def _bytes(self, ref: Ref) -> int:
        tensor = self.program.find_type(ref)
        return tensor.bytes if tensor.is_static else 0

    def _move_if_less(self, node: Node, there: str) -> None:
        here = self.stage[node.name]
        if here == there or node.name in self.together:
            return
        operands = [(self.stage.get(r.node, ""), self._bytes(r)) for r in dict.fromkeys(node.inputs)]
        now = sum(b for s, b in operands if s and s != here) + sum(map(self._bytes, node.list_refs()))
        then = sum(b for s, b in operands if s and s != there)
        fetched = any(r.node == node.name for r in self.program.outputs)
        if then < now and not fetched:
            self.stage[node.name] = there


def does_nothing(node: Node) -> bool:
    """Returns True if a node is a NoOp: without operands, results and side effects, it only makes nodes wait."""
    return not node.inputs and not node.outputs and not node.stateful
