"""Collects the nodes under split scopes whose layouts are to be chosen, their variables, and their weights."""

from __future__ import annotations

from collections.abc import Mapping

from whale.ir.layout import Placement, Shard, shard
from whale.ir.ops import HAS_BODIES, LOOKUPS, READS, ROW_LOOKUPS
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.rank_groups import sizes_within
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.analysis.scopes import ranks_of_scope, split_scope
from whale.passes.autoshard.sequence import context_seeds, layers_in_context, with_sequence
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule

_IMAGES = frozenset({"Conv2D", "DepthwiseConv2dNative"})  # ops whose image rows or columns may be sharded


class SplitRegion:
    """Describes all split scopes of a program: what the choice of layouts is about.

    Attributes:
      outside: the layout of the program if no scope is split.
      parts: number of ranks.
      known: placements of variables, by handle node, that programs planned earlier in the run have fixed.
      at_rest: whether variables that are not known yet may be sharded between steps.
      tables: whether embedding tables may be whole on one rank.
      nodes: the nodes whose layouts are chosen, by name.
      handles: the variables whose placements are chosen, by handle node.
      read: name of a matrix product or lookup -> pairs of (an operand that is a weight, or is computed from weights
        alone; the handle of such a weight).
      layers: products and lookups of ``read`` under scopes with ``context=``, which shard every layer along the
        sequence and replicate weights -> the sequence dimension.
      weights: the rest of ``read``, whose weights are sharded.
      context: wanted placements of the activations around ``layers``.
      carriers: the tensors under these scopes that contain the sequence dimension.
      unknown_rows: upper limit for the rows of tensors whose number only the run knows (ids without repeats).
      group: node -> the ranks that divide it.
      groups: all sets of ranks in ``group``, and the set of all ranks.
    """

    def __init__(
        self, program: Program, outside: GraphLayout, parts: int, known: Mapping[str, Placement], at_rest: bool,
        tables: bool = True,
    ):  # fmt: skip
        self.program, self.outside, self.parts, self.known, self.at_rest = program, outside, parts, known, at_rest
        self.tables = tables
        self.nodes = {n.name: n for n in program.nodes if split_scope(n.scope) and self._can_choose(n)}
        lying_split = {name for name, placement in known.items() if isinstance(placement, Shard)}
        self.handles = {v.node: v for v in program.variables if v.node in lying_split or self._belongs(v)}
        ids = [program.find_type(n.inputs[0]) for n in program.nodes if n.op == "Unique"]
        self.unknown_rows = max((t.elements for t in ids if t.is_static), default=1)
        everyone = frozenset(range(parts))
        self.group = {name: ranks_of_scope(n.scope) or everyone for name, n in self.nodes.items()}
        self.read = self._weights()
        self.layers = layers_in_context({name: self.nodes[name] for name in self.read})
        self.context = context_seeds(program, self.layers, self.read, self.group, parts)
        self.carriers = with_sequence(program, self.nodes, self.context, parts)
        self.weights = {name: uses for name, uses in self.read.items() if name not in self.layers}
        self.groups = {everyone, *self.group.values()}

    def cut_of_image(self, name: str) -> Shard | None:
        """Returns the split of a convolution's result whose scope names a spatial dimension (``wh.split(dim=..)`` of
        rows or columns of images); the weight is replicated then. Returns None for other nodes.
        """
        node, scope = self.nodes[name], split_scope(self.nodes[name].scope)
        shape = node.outputs[0].shape
        if scope is None or scope[1] is None or shape is None or node.op not in _IMAGES:
            return None
        spatial = (
            range(2, len(shape)) if str(node.attrs.get("data_format")).startswith("NC") else range(1, len(shape) - 1)
        )
        at = scope[1] + len(shape) if scope[1] < 0 else scope[1]
        size = shape[at] if at in spatial else None
        group = self.group[name]
        return shard(at, sizes_within(size, group, self.parts)) if size is not None and size >= len(group) else None

    def count_touched_bytes(self, node: Node) -> int:
        """Returns the bytes of a node's operands and results, for the cost of memory-bound work."""
        return sum(self.program.find_type(r).bytes for r in node.inputs) + sum(t.bytes for t in node.outputs)

    def flops(self, node: Node) -> int:
        """Returns the FLOPs of a node that is a matrix product or convolution; 0 for others."""
        return count_matmul_flops(node, [self.program.find_type(r) for r in node.inputs])

    def _can_choose(self, node: Node) -> bool:
        """Returns True if the node's layout may be chosen here: its op has a rule, it reads only tensors that can be
        sent and variables, and it does not run on the first rank only.
        """
        program, rule = self.program, find_rule(node.op)
        if rule is None or node.op in HAS_BODIES or node.op == "Placeholder":
            return False
        if node.name in program.variable_of or node.name in program.inputs:
            return False
        handles = [r.node for r in node.inputs if r.node in program.variable_of or self.communicates(r.node)]
        tensors = [program.find_type(r) for r in node.inputs if r.node not in handles]
        if any(t.dtype in UNMOVABLE for t in (*tensors, *node.outputs)):
            return False
        if node.stateful and not handles:
            return False
        return self.outside.strategies[node.name].once is False

    def communicates(self, name: str) -> bool:
        """Returns True if a node is the communicator handle that communication ops over another mesh axis read."""
        return self.program.by_name[name].op == "WhaleCommunicator"

    def _belongs(self, variable: Variable) -> bool:
        """Returns True if split scopes may decide the variable's placement: it was created under one, or only their
        nodes use it.
        """
        readers = {n.name for n, _ in self.program.consumers.get(Ref(variable.node), ())}
        if split_scope(variable.scope):
            return not readers.isdisjoint(self.nodes)
        return not variable.scope and bool(readers) and readers <= self.nodes.keys()

    def _weights(self) -> dict[str, list[tuple[int, str]]]:
        """Maps each product and lookup to its operands that are computed from variables alone, as (operand, handle of a
        variable of rank 2 or more).
        """
        found: dict[str, list[tuple[int, str]]] = {}
        alone = self._find_made_from_weights()
        for node in self.nodes.values():
            lookup = node.op in ROW_LOOKUPS
            if not lookup and not self.flops(node):
                continue
            for i, ref in enumerate(node.inputs[:1] if lookup else node.inputs):
                if ref.node in alone:
                    found.setdefault(node.name, []).extend((i, handle) for handle in self._find_weights_behind(ref))
        return {name: uses for name, uses in found.items() if uses}

    def _find_made_from_weights(self) -> set[str]:
        """Returns the names of variables, constants, and nodes computed from these alone: normalised or scaled weights,
        sums of weights, weights that are gathered along an earlier mesh axis.
        """
        program = self.program
        found: set[str] = set()
        for node in program.nodes:
            given = node.name in self.handles or node.name in program.variable_of or node.op == "Const"
            if given or self.communicates(node.name):
                found.add(node.name)
            elif node.inputs and node.op not in HAS_BODIES and all(r.node in found for r in node.inputs):
                if not node.stateful or node.op in READS or node.op == "WhaleAllGather":
                    found.add(node.name)
        return found

    def _find_weights_behind(self, ref: Ref) -> list[str]:
        """Returns the handles of weights from which an operand is computed element by element.

        Weights are variables of rank 2 or more; if any is as large as the operand, only those are returned. So low-rank
        factors, scales of columns and masks are left out. The search stops at products and lookups, which read weights
        of their own.
        """
        program, seen = self.program, {ref.node}
        stack, found = [ref.node], []
        while stack:
            node = program.by_name[stack.pop()]
            if node.name in self.handles:
                found.append(node.name)
            elif not self.flops(node) and (node.op not in LOOKUPS):
                new = [r.node for r in reversed(node.inputs) if r.node not in seen]
                seen.update(new)
                stack += new
        found = [name for name in found if len(self.handles[name].type.shape or ()) >= 2]
        size = program.find_type(ref).elements
        return [name for name in found if self.handles[name].type.elements == size] or found
