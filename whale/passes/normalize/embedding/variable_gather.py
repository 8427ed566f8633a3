"""Looks up rows in a variable itself, in programs that look them up in the variable's value.

`tf.gather` of a variable reads only the rows (`ResourceGather`). Keras 3's `Embedding` reads the variable first, and so
does `tf.gather(tf.convert_to_tensor(variable), ids)`: `ReadVariableOp`, which yields all of the table, and then
`GatherV2`. This is costly if the table is copied for it: on every read, once rows of it have been updated by index
(TensorFlow's copy_on_read_mode), and to a device, if the table is kept in host memory. If the value is cast first
(mixed precision), the rows are cast instead.

A variable whose whole value anything else needs is left alone. A lookup must see the value that was read, so it runs
before all later updates of the variable; if it depends on such an update itself, the variable is left alone too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.ir.ops import APPLIES_ROWS, IDENTITIES, READS, READS_ROWS, SCATTERS, UPDATES
from whale.ir.program import Node, Program, Ref, find_waited_for, prune, sort_nodes
from whale.ir.values import DType, TensorType
from whale.sharding_rules.graph import iterate_variable_uses

_LOOKS_UP_OR_CHANGES = READS_ROWS | UPDATES
_IDS = ("int32", "int64")  # dtypes of ids that `ResourceGather` takes


def gather_from_variables(program: Program, every: bool = True) -> Program:
    """Rewrites ``program`` so that lookups of rows (along dimension 0) read a variable directly, if its value is read
    for nothing else.

    Args:
      every: for all such variables; False: only for those whose rows the program updates by index, which are copied on
        every read.
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
    """Returns the handle nodes of variables whose value the main graph reads, and whose other uses only update them or
    look rows up.

    How the value is used is checked by `_lookups`.
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
    """Returns the handle nodes of variables that are updated row by row; TensorFlow copies them on every read."""
    uses = iterate_variable_uses(program)
    return {handle for use in uses if use.node.op in SCATTERS | APPLIES_ROWS for handle in use.handles}


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Represents a node that looks up rows in a variable's value.

    Attributes:
      node: the Gather or GatherV2 node.
      casts: the casts between the variable's value and the node, in order.
    """

    node: Node
    casts: tuple[Node, ...]


def _lookups(program: Program, read: str) -> tuple[list[_Lookup], dict[str, tuple[str, ...]]] | None:
    """Finds the lookups in the value that the node ``read`` reads.

    Returns:
      The lookups, and the nodes used only for them (the read, casts), each with the control inputs to hand on; None if
        any other node needs the value.
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
    """Returns ``program`` with one read of a variable replaced by lookups in the variable; None if the read has to
    stay.
    """
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
    """Returns the nodes that update the variable after the read; None if the order of an update and the read is not
    fixed.
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
    """Creates the nodes that look rows up in the variable and cast them; the last one has the old lookup's name."""
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
    """Returns ``count`` unused node names that begin with ``stem``."""
    names = (f"{stem}/rows_{n}" for n in range(count + len(program.nodes)))
    return [name for name in names if name not in program.by_name][:count]
