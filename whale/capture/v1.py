"""Captures the part of a version 1 graph that a session's fetches need, for the shapes of the fed values.

``GraphCapture`` returns the part as a Program. ``retype`` infers the static shapes of a program again after a pass has
changed the program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from whale.capture.attrs import decode
from whale.capture.bodies import import_settled_graph
from whale.capture.captured import Captured, CapturedVariable
from whale.capture.encode import encode_graph_def
from whale.capture.gradients import find_scope
from whale.capture.graph import read_graph
from whale.errors import CaptureError
from whale.ir.collector import suspend_garbage_collection
from whale.ir.ops import FRAMES, QUEUE_READS, REF_VARIABLES
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.ir.values import Dims, Func, TensorType

_SOURCES = QUEUE_READS | {"IteratorGetNext", "IteratorGetNextSync", "PyFunc", "PyFuncStateless", "EagerPyFunc"}
SAVES = frozenset({"SaveV2", "MergeV2Checkpoints"})
BEGINS = frozenset({"MakeIterator"})


def capture_graph(
    graph: tf.Graph, fetches: Sequence[tf.Tensor | tf.Operation], feeds: Mapping[tf.Tensor, Sequence[int]]
) -> Captured:
    """Captures the part of ``graph`` that ``fetches`` need; to capture a graph several times, keep a ``GraphCapture``.

    Args:
      fetches: tensors and operations.
      feeds: the static shape of each fed tensor.
    """
    return GraphCapture(graph).capture(fetches, feeds)


@dataclass(frozen=True, slots=True)
class _TypedGraph:
    """Holds a part of the user's graph, imported with placeholders of the fed shapes.

    Attributes:
      graph: the graph with the part.
      fed: name of each fed tensor -> (name of its placeholder, its shape).
      names: names of the user's nodes that the part covers.
      better: static types that only the user's graph knows, because the script called ``set_shape``.
    """

    graph: tf.Graph
    fed: Mapping[str, tuple[str, Dims]]
    names: frozenset[str]
    better: Mapping[Ref, TensorType]


@dataclass(frozen=True, slots=True)
class Source:
    """Represents an operation that brings data into a graph, such as IteratorGetNext or a dequeue.

    Attributes:
      operation: the operation.
      fed: names of the fed tensors that it depends on.
    """

    operation: tf.Operation
    fed: frozenset[str]


class GraphCapture:
    """Captures parts of one version 1 graph as programs; a session has one for its graph.

    The GraphDef is read once, and again after the graph has grown. Shapes are inferred once per set of fed shapes.

    Args:
      graph: the graph.
      mark_gradients: whether the program's nodes are marked (``Node.marks``): those that tf.gradients has made as
        "backward", and those of tensors in the graph's collection "checkpoints" as "checkpoint", for recomputation.
    """

    def __init__(self, graph: tf.Graph, mark_gradients: bool = False) -> None:
        self.graph, self._mark_gradients = graph, mark_gradients
        self._version = -1
        self._graph_def: Any = None
        self._defs: dict[str, Any] = {}
        self._typed: list[_TypedGraph] = []

    def find_sources(self, fetches: Sequence[tf.Tensor | tf.Operation], feeds: Collection[tf.Tensor]) -> list[Source]:
        """Returns the operations that bring data in for ``fetches`` and can run before everything else.

        These are iterators, dequeues and Python functions that depend on nothing but feeds and constants. The size of
        what they return is known only when they have run. The session runs them first, and feeds their outputs like a
        batch of the user's.
        """
        self._read()
        fed = {t.name: None for t in feeds}
        tensors = [f.name for f in fetches if isinstance(f, tf.Tensor)]
        needed, _ = _find_needed(self._defs, tensors, [f.name for f in fetches if isinstance(f, tf.Operation)], fed)
        found = [self._make_source(name, fed) for name in sorted(needed) if self._defs[name].op in _SOURCES]
        return [source for source in found if source is not None]

    def find_operations(
        self, fetches: Sequence[tf.Tensor | tf.Operation], feeds: Collection[tf.Tensor], types: Collection[str]
    ) -> list[tf.Operation]:
        """Returns those operations of the given op types that ``fetches`` depend on, with ``feeds`` fed."""
        self._read()
        tensors = [f.name for f in fetches if isinstance(f, tf.Tensor)]
        operations = [f.name for f in fetches if isinstance(f, tf.Operation)]
        needed, _ = _find_needed(self._defs, tensors, operations, {t.name: None for t in feeds})
        return [self.graph.get_operation_by_name(name) for name in needed if self._defs[name].op in types]

    def _make_source(self, name: str, fed: Mapping[str, Any]) -> Source | None:
        """Returns operation ``name`` as a Source; None if it needs other computation first, or its outputs cannot be
        fed.
        """
        operation = self.graph.get_operation_by_name(name)
        outputs = operation.outputs
        if not outputs or any(t.name in fed or t.dtype in (tf.resource, tf.variant) for t in outputs):
            return None
        before, read = _find_needed(self._defs, [], [name], fed)
        computes = all(n == name or _is_stateless_or_lookup(self.graph.get_operation_by_name(n)) for n in before)
        return Source(operation, frozenset(read)) if computes else None

    def capture(
        self,
        fetches: Sequence[tf.Tensor | tf.Operation],
        feeds: Mapping[tf.Tensor, Sequence[int]],
        done: Collection[str] = (),
    ) -> Captured:
        """Captures the part of the graph that ``fetches`` need.

        Args:
          fetches: tensors become the program's outputs, operations its effects.
          feeds: the static shape of each fed tensor. Any tensor may be fed; feeds that no fetch needs are left out.
          done: names of operations that have run already, and whose outputs are all in ``feeds``.

        Returns:
          A Captured; its ``fed`` names the fed tensors in the order of ``inputs``.

        Raises:
          CaptureError: the fetches need a placeholder that is not fed, control flow of version 1 or a reference
            variable; a fed shape does not fit its tensor; or a fetch is neither a tensor nor an operation.
        """
        with suspend_garbage_collection():
            return self._capture(fetches, feeds, done)

    def _capture(
        self,
        fetches: Sequence[tf.Tensor | tf.Operation],
        feeds: Mapping[tf.Tensor, Sequence[int]],
        done: Collection[str],
    ) -> Captured:
        self._read()
        shapes = {t.name: _check_fed_shape(t, shape) for t, shape in feeds.items()}
        wanted = [f for f in fetches if isinstance(f, tf.Tensor)]
        effects = [f for f in fetches if isinstance(f, tf.Operation)]
        if len(wanted) + len(effects) < len(fetches):
            odd = next(f for f in fetches if not isinstance(f, (tf.Tensor, tf.Operation)))
            raise CaptureError(
                "a fetch is neither a tensor nor an operation",
                given=f"{type(odd).__name__} {odd!r}",
                expected="tf.Tensor or tf.Operation",
                action="fetch each tensor of a structure, a variable's value(), and a name's tensor from the graph",
            )
        needed, reached = _find_needed(self._defs, [t.name for t in wanted], [o.name for o in effects], shapes, done)
        self._refuse(needed)
        fed = {name: shapes[name] for name in shapes if name in reached}
        typed = self._find(needed, fed)
        graph = typed.graph

        def tensor(name: str) -> tf.Tensor:
            return graph.get_tensor_by_name(f"{typed.fed[name][0]}:0" if name in fed else name)

        handles = [name for name in needed if self._defs[name].op == "VarHandleOp"]
        order = {name: i for i, name in enumerate(self._defs)}
        variables = self._list_variables(sorted(handles, key=order.__getitem__))
        program = read_graph(
            graph,
            name="session",
            inputs=[tensor(name) for name in fed],
            variables=[
                (graph.get_tensor_by_name(f"{v.node}:0"), v.name, *self._find_variable_type(v.node)) for v in variables
            ],
            outputs=[tensor(t.name) for t in wanted],
            effects=[graph.get_operation_by_name(o.name) for o in effects],
            types=typed.better,
        )
        if any(node.scope for node in program.nodes):
            program = self._scope_gradients(program)
        if self._mark_gradients:
            program = self._mark_loss_gradients(program)
        present = {v.node for v in program.variables}
        return Captured(
            program=program,
            inputs=program.inputs,
            captures=(),
            variables=tuple(v for v in variables if v.node in present),
            fed=tuple(fed),
        )

    def _read(self) -> None:
        if self._version != self.graph.version:
            self._version = self.graph.version
            self._graph_def = self.graph.as_graph_def()
            self._defs = {n.name: n for n in self._graph_def.node}
            self._typed.clear()

    def _scope_gradients(self, program: Program) -> Program:
        """Gives each gradient node the scope of the forward op that it differentiates."""
        nodes = []
        for node in program.nodes:
            op = self._find_operation(node.name)
            forward = None if op is None else op._original_op
            if forward is not None and (path := find_scope(forward)):
                node = replace(node, scope=path)
            nodes.append(node)
        return program.replace_nodes(tuple(nodes))

    def _mark_loss_gradients(self, program: Program) -> Program:
        held = {t.op.name for t in self.graph.get_collection("checkpoints")}
        nodes = []
        for node in program.nodes:
            op = self._find_operation(node.name)
            if op is not None and op._original_op is not None:  # the op that tf.gradients has made it for
                node = node.with_marks(backward=True)
            nodes.append(node.with_marks(checkpoint=True) if node.name in held else node)
        return program.replace_nodes(tuple(nodes))

    def _find_operation(self, name: str) -> tf.Operation | None:
        return self.graph.get_operation_by_name(name) if name in self._defs else None

    def _refuse(self, needed: Sequence[str]) -> None:
        for name in needed:
            op = self._defs[name].op
            if op in FRAMES:
                raise CaptureError(
                    "control flow of version 1 cannot be distributed",
                    op=name,
                    given=op,
                    expected="While or If ops",
                    action="call wh.init(), or tf.compat.v1.enable_control_flow_v2(), before the graph is built; for "
                    "an imported MetaGraph, call it in the program that exports the MetaGraph, and export again",
                )
            if op in REF_VARIABLES:
                raise CaptureError(
                    "a reference variable cannot be distributed",
                    op=name,
                    given=op,
                    expected="VarHandleOp, a resource variable",
                    action="call wh.init(), or tf.compat.v1.enable_resource_variables(), before the graph is built, "
                    "without use_resource=False; for an imported MetaGraph, call it in the program that exports the "
                    "MetaGraph, and export again",
                )

    def _list_variables(self, nodes: Sequence[str]) -> list[CapturedVariable]:
        """Returns the variables that the program reads or writes. A variable's name is its ``shared_name``, or else its
        node's name.

        Args:
          nodes: names of the VarHandleOps of the captured part.
        """
        known = {}
        for key in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.LOCAL_VARIABLES):
            known.update({v.handle.op.name: v for v in self.graph.get_collection(key) if hasattr(v, "handle")})
        return [
            CapturedVariable(
                node=node,
                name=str(decode(self._defs[node].attr["shared_name"]) or node),
                variable=known.get(node),
                handle=self.graph.get_tensor_by_name(f"{node}:0"),
            )
            for node in nodes
        ]

    def _find_variable_type(self, node: str) -> tuple[str, Dims | None]:
        attrs = self._defs[node].attr
        return str(decode(attrs["dtype"])), decode(attrs["shape"]).dims

    def _find(self, needed: Sequence[str], fed: Mapping[str, Dims]) -> _TypedGraph:
        """Returns a graph that covers the nodes ``needed`` for these fed shapes: an earlier one, or a new import."""
        names = frozenset(needed)
        for typed in self._typed:
            # The cached graph must not have a placeholder, among the nodes needed now, that this call does not feed.
            same = all(name in typed.fed and typed.fed[name][1] == shape for name, shape in fed.items())
            extra = [name for name in typed.fed if name not in fed]
            if same and names <= typed.names and not any(name.partition(":")[0] in names for name in extra):
                return typed
        made = self._find_typed_as_built(fed) or self._specialise(needed, fed)
        self._typed.append(made)
        return made

    def _find_typed_as_built(self, fed: Mapping[str, Dims]) -> _TypedGraph | None:
        """Returns the user's graph itself, if its shapes hold for this capture because all feeds are placeholders with
        static shapes.

        Returns None if the graph has to be imported with placeholders of the fed shapes.

        Args:
          fed: name of each fed tensor -> its shape.
        """
        found = {}
        for name, shape in fed.items():
            tensor = self.graph.get_tensor_by_name(name)
            if tensor.op.type != "Placeholder" or not tensor.shape.is_fully_defined():
                return None
            found[name] = (tensor.op.name, shape)
        return _TypedGraph(self.graph, found, frozenset(self._defs), {})

    def _specialise(self, needed: Sequence[str], fed: Mapping[str, Dims]) -> _TypedGraph:
        """Imports the nodes ``needed`` with placeholders of the fed shapes, so that TensorFlow infers static shapes."""
        graph_def = graph_pb2.GraphDef()
        graph_def.versions.CopyFrom(self._graph_def.versions)
        graph_def.library.CopyFrom(self._graph_def.library)
        placeholders: dict[str, tuple[str, Dims]] = {}
        included = set(needed)
        for name, shape in fed.items():
            tensor = self.graph.get_tensor_by_name(name)
            own = tensor.op.name
            # A node whose other outputs are still computed keeps its name; the fed one gets a placeholder beside it.
            # So does the first of several fed outputs, which may be waited for.
            taken = own in included or any(own == other for other, _ in placeholders.values())
            placeholder = _make_unused_name(f"{own}/fed_{tensor.value_index}", self._defs) if taken else own
            placeholders[name] = (placeholder, shape)
            node = graph_def.node.add(name=placeholder, op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        renamed = {(_format_plain_name(name)): placeholder for name, (placeholder, _) in placeholders.items()}
        for name in self._defs:
            if name in included:
                node = graph_def.node.add()
                node.CopyFrom(self._defs[name])
                node.attr.pop("_class", None)
                for i, text in enumerate(node.input):
                    if text in renamed:
                        node.input[i] = renamed[text]
        graph = import_settled_graph(graph_def)
        return _TypedGraph(graph, placeholders, frozenset(needed), self._list_user_shapes(graph, included))

    def _list_user_shapes(self, graph: tf.Graph, names: set[str]) -> dict[Ref, TensorType]:
        """Returns static types that only the user's graph knows, because the script called ``set_shape``.

        Args:
          graph: the import of the nodes ``names``.
        """
        better: dict[Ref, TensorType] = {}
        for name in names:
            op = graph.get_operation_by_name(name)
            if all(t.shape.is_fully_defined() for t in op.outputs):
                continue
            original = self.graph.get_operation_by_name(name)
            for i, (new, old) in enumerate(zip(op.outputs, original.outputs, strict=True)):
                if new.shape.is_compatible_with(old.shape):
                    shape = new.shape.merge_with(old.shape)
                    dims = None if shape.rank is None else tuple(shape.as_list())
                    better[Ref(name, i)] = TensorType(new.dtype.name, dims)
        return better


def _is_stateless_or_lookup(operation: tf.Operation) -> bool:
    """Returns True if the operation is stateless or only looks up a resource (all outputs are resource handles)."""
    outputs = operation.outputs
    return not operation.op_def.is_stateful or (bool(outputs) and all(t.dtype == tf.resource for t in outputs))


def _format_plain_name(tensor: str) -> str:
    """Returns a tensor's name as an input of a NodeDef spells it: ``a:0`` -> ``a``, ``a:1`` -> ``a:1``."""
    return tensor[:-2] if tensor.endswith(":0") else tensor


def _make_unused_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name


def _check_fed_shape(tensor: tf.Tensor, shape: Sequence[int]) -> Dims:
    given = tf.TensorShape(shape)
    if not given.is_fully_defined() or not tensor.shape.is_compatible_with(given):
        raise CaptureError(
            "the shape of a fed value does not fit the tensor that it is fed to",
            op=tensor.name,
            given=given,
            expected=tensor.shape,
            action="feed a value of that shape",
        )
    return tuple(given.as_list())


def _find_needed(
    defs: Mapping[str, Any],
    tensors: Sequence[str],
    operations: Sequence[str],
    fed: Mapping[str, Any],
    done: Collection[str] = (),
) -> tuple[list[str], set[str]]:
    """Returns (nodes that have to run, fed tensors that are read) for some fetches.

    Args:
      defs: NodeDefs of the graph by name.
      tensors: names of fetched tensors.
      operations: names of fetched operations.
      fed: names of fed tensors.
      done: names of operations that have run already, and whose outputs are all fed.
    """
    plain = {_format_plain_name(name): name for name in fed}
    reached: set[str] = set()
    found: dict[str, None] = {}
    stack = [_format_plain_name(t) for t in tensors] + [f"^{name}" for name in operations]
    while stack:
        text = stack.pop()
        if text in plain:
            reached.add(plain[text])
            continue
        name = text[1:] if text[0] == "^" else text.partition(":")[0]
        if name not in found:
            # A fed placeholder, or an operation that has run, is there from the start: nothing has to wait for it.
            if text[0] == "^" and name in plain and (defs[name].op == "Placeholder" or name in done):
                reached.add(plain[name])
                continue
            found[name] = None
            stack.extend(defs[name].input)
    return list(found), reached


def is_loose(program: Program) -> bool:
    """Returns True if the program's shapes have to be inferred again by ``retype``, because a function unpacks an
    optional (``OptionalGetValue``) with an unknown size.

    An OptionalGetValue node records the sizes that its value had when the graph was built, which may be unknown
    although the sizes are known for the inputs of this program.
    """
    return any(
        node.op == "OptionalGetValue" and not all(t.is_static for t in node.outputs)
        for body in program.functions.values()
        for node in body.nodes
    )


def retype(program: Program) -> Program:
    """Returns ``program`` with the static shapes that TensorFlow infers for it now.

    Called after passes have inlined functions. Shapes that were fully known before are kept.
    """
    renamed = _make_names_plain(program)
    graph_def = encode_graph_def(renamed)
    graph = import_settled_graph(graph_def)

    def find_tensor(ref: Ref) -> tf.Tensor:
        return graph.get_tensor_by_name(f"{ref.node}:{ref.index}")

    better: dict[Ref, TensorType] = {
        ref: t
        for node in program.nodes
        for ref, t in zip(node.list_refs(), node.outputs)
        if t.is_static and not find_tensor(ref).shape.is_fully_defined()
    }
    typed = read_graph(
        graph,
        name=program.name,
        inputs=[find_tensor(Ref(name)) for name in program.inputs],
        variables=[(find_tensor(Ref(v.node)), v.name, v.type.dtype, v.type.shape) for v in program.variables],
        outputs=[find_tensor(ref) for ref in program.outputs],
        effects=[graph.get_operation_by_name(name) for name in program.effects],
        types=better,
    )
    scopes = {n.name: n.scope for n in program.nodes}
    return replace(typed, nodes=tuple(replace(n, scope=scopes[n.name]) for n in typed.nodes))


def _make_names_plain(program: Program) -> Program:
    """Renames the functions of ``program`` to ``body_0``, ``body_1``, ..., since TensorFlow does not accept all
    names.
    """
    names = {old: f"body_{i}" for i, old in enumerate(program.functions)}

    def rename_value(value: Any) -> Any:
        if isinstance(value, Func):
            return replace(value, name=names.get(value.name, value.name))
        return tuple(map(rename_value, value)) if isinstance(value, tuple) else value

    def rename_node(node: Node) -> Node:
        changes = {key: rename_value(node.attrs[key]) for key, _ in iterate_function_refs(node)}
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    def rename_graph(graph: Program) -> Program:
        return graph.replace_nodes(tuple(map(rename_node, graph.nodes)))

    functions = {names[old]: replace(rename_graph(body), name=names[old]) for old, body in program.functions.items()}
    return replace(rename_graph(program), functions=functions)
