"""Rewrites updates of a table by unique ids so that they can run on the ranks that own the table's rows.

Optimizers deduplicate a gradient's ids, ``once, back = tf.unique(ids)``, sum its rows by id, read the rows of the table
and of its moments, compute, and write. The number of unique ids is known only at run time, so tensors with a row for
each could be sharded by columns only. But if all operations treat every row alike, neither the order of the ids matters
nor whether one rank has all of them. In that case the two nodes (unique, sum) become one ``WhaleSumsById``, and the
nodes that follow are marked (``owned_rows``), so that rules may place them on the owners of the rows
(``whale.sharding_rules.embedding``). Otherwise nothing is changed.

Decisions: 0078, 0105.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whale.ir.ops import IDENTITIES, REDUCTIONS, ROW_SCATTERS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType
from whale.passes.analysis.scopes import split_scope
from whale.sharding_rules import find_rule
from whale.sharding_rules.embedding import SUMS_BY_ID

_COUNTS = frozenset({"Size"})


def update_on_owners(program: Program) -> Program:
    """Rewrites updates by unique ids, of tables under split scopes, so that they can run on the ranks that own the
    rows.
    """
    uniques = (n for n in program.nodes if n.op == "Unique" and split_scope(n.scope))
    updates = [u for n in uniques if (u := _Update(program, n)).is_by_row()]
    return _rewritten(program, updates) if updates else program


@dataclass
class _Update:
    """Collects the nodes that process the unique ids of one ``Unique`` node.

    Attributes:
      sums: the node that sums rows by id (one if the update can be rewritten).
      counts: names of nodes that count the unique ids for this sum.
      ids: the unique ids, and copies of them.
      rows: tensors with a row for each unique id.
      marked: names of nodes that do the same to each row.
    """

    program: Program
    unique: Node
    sums: list[Node] = field(default_factory=list)
    counts: set[str] = field(default_factory=set)
    ids: set[Ref] = field(default_factory=set)
    rows: set[Ref] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)

    def is_by_row(self) -> bool:
        """Returns True if the gradient's unique ids and summed rows are only read by operations that compute each row
        from that row alone, and at least one of them writes rows to a variable.

        Also fills the attributes that describe those operations (``sums``, ``ids``, ``rows``, ``marked``), for the
        rewrite.
        """
        program, once, back = self.program, Ref(self.unique.name), Ref(self.unique.name, 1)
        if not program.find_type(self.unique.inputs[0]).is_static:
            return False
        for reader, i in program.consumers.get(back, ()):
            if reader.op != "UnsortedSegmentSum" or i != 1 or not program.find_type(reader.inputs[0]).is_static:
                return False
            self.sums.append(reader)
        if len(self.sums) != 1 or not self._counts_ids(self.sums[0].inputs[2]):
            return False
        self.ids.add(once)
        self.rows.add(Ref(self.sums[0].name))
        added = False
        for node in program.nodes:
            added |= node is self.sums[0]
            found = [i for i, ref in enumerate(node.inputs) if ref in self.ids or ref in self.rows]
            if not found or node.name in self.counts or node in self.sums:
                continue
            if not added or not self._takes(node, found):
                return False
            self.marked.add(node.name)
        fetched = {ref.node for ref in program.outputs}
        if fetched & {self.unique.name, *self.counts, *self.marked, self.sums[0].name}:
            return False
        return any(program.by_name[n].op in ROW_SCATTERS for n in self.marked)

    def _counts_ids(self, ref: Ref) -> bool:
        """Returns True if ``ref`` is the number of unique ids, and only the sum reads it."""
        program, readers = self.program, [(self.sums[0], 2)]
        while ref != Ref(self.unique.name):
            node = program.by_name[ref.node]
            if node.op not in _COUNTS | IDENTITIES | {"Cast"} or list(program.consumers[ref]) != readers:
                return False
            self.counts.add(node.name)
            readers, ref = [(node, 0)], node.inputs[0]
        return bool(self.counts)

    def _takes(self, node: Node, found: list[int]) -> bool:
        """Returns True if the node treats all rows alike, and records its results as ids or rows.

        Args:
          found: numbers of its operands that are ids or rows.
        """
        refs = node.inputs
        if node.op == "ResourceGather":
            made, fits = self.rows, found == [1] and refs[1] in self.ids and not node.attrs.get("batch_dims", 0)
        elif node.op in ROW_SCATTERS:
            return refs[1] in self.ids and (found == [1, 2] and refs[2] in self.rows)
        elif all(refs[i] in self.ids for i in found):
            made, fits = self.ids, node.op in IDENTITIES | {"Cast"}
        else:
            made, fits = self.rows, all(refs[i] in self.rows for i in found) and self._is_by_row(node, found)
        fits = fits and all(t.shape is not None and t.shape[:1] == (None,) for t in node.outputs)
        if fits:
            made.update(node.list_refs())
        return fits

    def _is_by_row(self, node: Node, found: list[int]) -> bool:
        types = [self.program.find_type(ref) for ref in node.inputs]
        if any(t.shape is None for t in types) or node.stateful:
            return False
        if node.op in REDUCTIONS | {"ExpandDims"}:
            at = self.program.const(node.inputs[1])
            dims = len(types[0].shape or ()) + (node.op == "ExpandDims")
            return at is not None and all(int(n) % dims for n in at.reshape(-1)) and found == [0]
        rule = find_rule(node.op)
        if rule is None or not isinstance(rule.spec, str) or not set(rule.spec) <= set("~*, ->"):
            return False
        depth = len(node.outputs[0].shape or ())
        return all(_is_beside(t, depth) if i not in found else len(t.shape or ()) == depth for i, t in enumerate(types))

    def join(self) -> Node:
        """Creates the node that replaces ``Unique`` and the sum; it has the name of the sum, and yields (unique ids,
        sums).
        """
        total, unique = self.sums[0], self.unique
        types = self.program.find_type(Ref(unique.name)), self.program.find_type(Ref(total.name))
        attrs = {"T": total.attrs["T"], "Tindices": unique.attrs["T"]}
        operands, controls = (unique.inputs[0], total.inputs[0]), (*unique.controls, *total.controls)
        return Node(total.name, SUMS_BY_ID, operands, controls, attrs, types, total.scope)


def _rewritten(program: Program, updates: Sequence[_Update]) -> Program:
    moved: dict[Ref, Ref] = {}
    by_name: dict[str, Node] = {}
    gone: dict[str, str] = {}  # removed node -> the node that others wait for instead
    marked: set[str] = set()
    for update in updates:
        one = by_name[update.sums[0].name] = update.join()
        moved |= {Ref(update.unique.name): Ref(one.name), Ref(one.name): Ref(one.name, 1)}
        gone |= dict.fromkeys((update.unique.name, *update.counts), one.name)
        marked |= update.marked
    nodes = []
    for node in program.nodes:
        if node.name in gone:
            continue
        kept = by_name.get(node.name, node)
        if any(c in gone for c in kept.controls):
            kept = replace(kept, controls=tuple(dict.fromkeys(gone.get(c, c) for c in kept.controls)))
        if node.name in marked:
            inputs = tuple(moved.get(ref, ref) for ref in node.inputs)
            kept = replace(kept, inputs=inputs, marks=node.marks.replace_marks(owned_rows=True))
        nodes.append(kept)
    return program.replace_nodes(tuple(nodes))


def _is_beside(t: TensorType, depth: int) -> bool:
    """Returns True if a tensor has no row dimension, or one of size 1, so that it broadcasts over the rows.

    Args:
      depth: rank of the tensor with rows.
    """
    shape = t.shape or ()
    return None not in shape and (len(shape) < depth or shape[0] == 1)
