"""Looks up rows in a variable where a program looks them up in the variable's value.

`tf.gather` of a variable reads rows where it lies (`ResourceGather`). Keras 3's `Embedding` takes the variable's value
first, and so does `tf.gather(tf.convert_to_tensor(variable), ids)`: `ReadVariableOp`, which is all of the table, and
then `GatherV2`. The value is the variable's own memory, so nothing is lost, but where the table is copied: when it
is read, once rows of it have been changed by their numbers (TensorFlow's copy_on_read_mode), and to a device, where the
table is kept in the host's memory. Where the value is cast first (mixed precision), the rows are cast.

A variable that anything else needs whole is left as it is. A lookup has to see what the reading saw, so it runs before
all that changes the variable after that; where it needs such a change itself, the variable is left as it is, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.ir.ops import APPLIES_ROWS, IDENTITIES, READS, READS_ROWS, SCATTERS, UPDATES
from whale.ir.program import Node, Program, Ref, find_waited_for, prune, sort_nodes
from whale.ir.values import DType, TensorType
from whale.sharding_rules.graph import iterate_variable_uses

_LOOKS_UP_OR_CHANGES = READS_ROWS | UPDATES
_IDS = ("int32", "int64")  # in which `ResourceGather` takes them


def gather_from_variables(program: Program, every: bool = True) -> Program:
    """Rewrites ``program`` so that no variable is read only for lookups of rows (along dimension 0).

    Args:
      every: also variables whose rows the program does not change by their numbers.
    """
    found = program
    changed_by_rows = None if every else _changed_by_rows(program)
    for handle in _only_looked_up(program):
        if changed_by_rows is not None and handle not in changed_by_rows:
            continue
        changed: Program | None = found
        for name in [n.name for n in found.nodes if n.op == "ReadVariableOp" and n.inputs[0].node == handle]:
            changed = changed and _drop_read(changed, handle, name)
        found = changed or found
    return program if found is program else prune(found)


def _only_looked_up(program: Program) -> list[str]:
    """Returns the handle nodes of variables, read outside of functions, whose other uses only change them or look rows
    up.

    `_lookups` checks how the values that are read are used.
    """
    read: set[str] = set()
    other: set[str] = set()
    for use in iterate_variable_uses(program):
        if use.node.op == "ReadVariableOp" and use.graph is program:
            read.update(use.handles)
        elif use.node.op not in _LOOKS_UP_OR_CHANGES:
            other.update(use.handles)
    read -= other
    return [v.node for v in program.variables if v.node in read]


def _changed_by_rows(program: Program) -> set[str]:
    """Returns the handle nodes of variables of which every read is a copy."""
    uses = iterate_variable_uses(program)
    return {handle for use in uses if use.node.op in SCATTERS | APPLIES_ROWS for handle in use.handles}


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A node that looks up rows in a variable's value.

    Attributes:
      casts: the casts between the variable's value and its operand.
    """

    node: Node
    casts: tuple[Node, ...]


def _lookups(program: Program, read: str) -> tuple[list[_Lookup], dict[str, tuple[str, ...]]] | None:
    """Returns (the lookups in a value that is read, the nodes used only for these with the control inputs of each).

    Returns None if any other node needs the value.
    """
    found: list[_Lookup] = []
    gone = {read: program.by_name[read].controls}
    fetched = {ref.node for ref in program.outputs}
    waiting: list[tuple[str, tuple[Node, ...]]] = [(read, ())]
    while waiting:
        name, casts = waiting.pop()
        if name in fetched:
            return None
        for reader, operand in program.consumers.get(Ref(name), ()):
            if reader.op in IDENTITIES | {"Cast"}:
                gone[reader.name] = (*gone[name], *reader.controls)
                waiting.append((reader.name, (*casts, reader) if reader.op == "Cast" else casts))
            elif operand == 0 and _takes_rows(program, reader):
                found.append(_Lookup(reader, casts))
            else:
                return None
    return found, {name: tuple(c for c in controls if c not in gone) for name, controls in gone.items()}


def _takes_rows(program: Program, node: Node) -> bool:
    if node.op not in ("Gather", "GatherV2") or program.find_type(node.inputs[1]).dtype not in _IDS:
        return False
    if node.op == "Gather":
        return True
    axis = program.const(node.inputs[2])
    return axis is not None and int(axis) == 0 and not node.attrs.get("batch_dims", 0)


def _drop_read(program: Program, handle: str, read: str) -> Program | None:
    """Removes one read of a variable from ``program``; None where it has to stay."""
    known = _lookups(program, read)
    if known is None:
        return None
    lookups, gone = known
    later = _find_later_changes(program, handle, read) if lookups else []
    if later is None or not find_waited_for(program, [one.node.name for one in lookups]).isdisjoint(later):
        return None
    rows = {one.node.name: _rows(program, handle, one) for one in lookups}
    seen = [made[0].name for made in rows.values()]
    nodes: dict[str, Node] = {}
    for node in program.nodes:
        if node.name in gone:
            continue
        # A node that waited for the removed read waits for what the read waited for.
        controls = [c for name in node.controls for c in gone.get(name, (name,))]
        first, *others = rows.get(node.name, [node])
        if node.name in rows:
            controls += gone[node.inputs[0].node]
        if node.name in later:
            controls += seen
        for made in (replace(first, controls=tuple(dict.fromkeys(controls))), *others):
            nodes[made.name] = made
    effects = tuple(name for name in program.effects if name not in gone)
    return program.replace_nodes(sort_nodes(nodes), effects=effects)


def _find_later_changes(program: Program, handle: str, read: str) -> list[str] | None:
    """Returns the nodes that may change the variable after the read; None where one might come before it or
    after it.
    """
    before, found = find_waited_for(program, [read]), []
    for node, _ in program.consumers[Ref(handle)]:
        if node.op in READS or node.name in before:
            continue
        if read not in find_waited_for(program, [node.name]):
            return None
        found.append(node.name)
    return found


def _rows(program: Program, handle: str, lookup: _Lookup) -> list[Node]:
    """Creates the nodes that look rows up in the variable, and cast them; the last one has the name of the lookup."""
    node, variable = lookup.node, program.variable_of[handle]
    (t,) = node.outputs
    internal = {key: value for key, value in node.attrs.items() if key.startswith("_")}
    attrs = {
        "Tindices": DType(program.find_type(node.inputs[1]).dtype),
        "batch_dims": 0,
        "dtype": DType(variable.type.dtype),
        "validate_indices": True,
    }
    names = [*_free(program, node.name, len(lookup.casts)), node.name]
    found = replace(
        node, name=names[0], op="ResourceGather", inputs=(Ref(handle), node.inputs[1]), attrs={**attrs, **internal},
        outputs=(TensorType(variable.type.dtype, t.shape),), stateful=True,
    )  # fmt: skip
    made = [found]
    for name, cast in zip(names[1:], lookup.casts):
        kind = TensorType(cast.outputs[0].dtype, t.shape)
        made.append(
            replace(cast, name=name, inputs=(Ref(made[-1].name),), controls=(), outputs=(kind,), scope=node.scope)
        )
    return made


def _free(program: Program, stem: str, count: int) -> list[str]:
    """Returns ``count`` names, derived from ``stem``, that no node has."""
    names = (f"{stem}/rows_{n}" for n in range(count + len(program.nodes)))
    return [name for name in names if name not in program.by_name][:count]
