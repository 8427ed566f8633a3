"""Variables of a session with stages: where each has its present value, and the run that sends it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whale.ir.program import Node, Program, Ref, const_node
from whale.ir.values import DType, Shape, TensorType, numpy_dtype
from whale.lowering.emit import COMMUNICATOR
from whale.runtime.compile.compile import Compiled
from whale.runtime.spread.stage_groups import uses_of
from whale.runtime.variables.stage_variables import Use


class Present:
    """Which ranks hold the present value of each variable, by the name that the session knows it by.

    Args:
      size: number of ranks; a variable that is not known here is present on all of them.
    """

    def __init__(self, size: int):
        self._all = frozenset(range(size))
        self._ranks: dict[str, frozenset[int]] = {}
        self._handles: dict[str, tuple[Node, TensorType]] = {}

    def uses(self, compiled: Compiled) -> dict[str, Use]:
        """What a run does with its variables, by name."""
        by_node: Mapping[str, Use] = uses_of(compiled.program, compiled.plan)
        found = {}
        for variable in compiled.program.variables:
            node = compiled.program.by_name[variable.node]
            name = str(node.attrs.get("shared_name") or node.name)
            self._handles[name] = node, variable.type
            found[name] = by_node.get(variable.node, Use(self._all, True))
        return found

    def stale(self, uses: Mapping[str, Use]) -> list[str]:
        """The variables whose present value some rank of a run lacks."""
        return [name for name, use in uses.items() if not use.ranks <= self._ranks.get(name, self._all)]

    def after(self, uses: Mapping[str, Use]) -> None:
        """Takes note of a run."""
        for name, use in uses.items():
            if use.writes:
                self._ranks[name] = use.ranks

    def sent(self, names: Sequence[str], ranks: Sequence[int], comm: str, number: int) -> list[Program]:
        """What each of ``ranks`` runs so that all have the present values; they have them then."""
        programs = [self._of_rank(names, rank, comm, number) for rank in ranks]
        for name in names:
            self._ranks[name] = self._all
        return programs

    def _of_rank(self, names: Sequence[str], rank: int, comm: str, number: int) -> Program:
        attrs = {"communicator": comm, "rank": rank}
        resource = (TensorType("resource", ()),)
        nodes = [Node(COMMUNICATOR, "WhaleCommunicator", (), (), attrs, resource, "", True)]
        effects = []
        for i, name in enumerate(names):
            handle, t = self._handles[name]
            root = min(self._ranks[name])
            dtype = DType(t.dtype)
            nodes.append(handle)
            value = f"whale/present_{i}"
            if rank == root:
                nodes.append(Node(value, "ReadVariableOp", (Ref(handle.name),), (), {"dtype": dtype}, (t,), "", True))
            else:
                nodes.append(const_node(value, np.zeros((0,), numpy_dtype(t.dtype)), t.dtype))
            sent = f"{value}/sent"
            attrs = {
                "T": dtype, "key": f"present/{number}/{i}", "root": root, "N": 1, "shapes": (Shape(t.shape),),
                "ranks": (),
            }  # fmt: skip
            nodes.append(Node(sent, "WhaleBroadcast", (Ref(COMMUNICATOR), Ref(value)), (), attrs, (t,), "", True))
            effects.append(sent)
            if rank not in self._ranks[name]:
                assign = {"dtype": dtype, "validate_shape": False}
                operands = (Ref(handle.name), Ref(sent))
                nodes.append(Node(f"{value}/kept", "AssignVariableOp", operands, (), assign, (), "", True))
                effects.append(nodes[-1].name)
        return Program("present values", tuple(nodes), (), (), (), tuple(effects))
