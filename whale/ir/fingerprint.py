"""Computes fingerprints of programs, with which ranks check that all of them captured the same program.

Equal programs have equal fingerprints in every process. If fingerprints differ, the per-node digests of
``list_node_digests`` name the first node that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from whale.ir.marks import NO_MARKS
from whale.ir.program import Node, Program
from whale.ir.values import DType, Func, Shape, SharedAttrs, Tensor

# Op type -> the attribute that digests leave out because it differs between processes; "" leaves out none. For other
# stateful ops it is `shared_name`: TensorFlow generates the names of tables, queues and iterators anew in each process.
_OWN = {"VarHandleOp": "", "PyFunc": "token", "PyFuncStateless": "token", "EagerPyFunc": "token"}

_KNOWN = "_fingerprint"  # key in a program's ``__dict__``, which also holds the values of ``cached_property``


def _feed_value(value: Any) -> bytes:
    """Encodes an attribute value as bytes that differ for values of different type or content."""
    if isinstance(value, Tensor):
        data = value.data if isinstance(value.data, bytes) else repr(value.data).encode()
        return b"T" + value.dtype.encode() + repr(value.shape).encode() + data
    if isinstance(value, Func):
        return b"F" + repr(value.name).encode() + b"{" + _digest_attrs(value.attrs) + b"}"
    if isinstance(value, tuple):
        return b"(" + b",".join(map(_feed_value, value)) + b")"
    if isinstance(value, Shape):
        return b"S" + repr(value.dims).encode()
    if isinstance(value, DType):
        return b"D" + str(value).encode()
    return type(value).__name__.encode() + repr(value).encode()


def digest_node(node: Node, known: dict[int, str]) -> bytes:
    """Returns an 8-byte digest of a node's name, op, operands, control edges, attributes, output types, scope and
    marks.

    Attributes that differ from process to process, such as the shared name of a variable, are left out.

    Args:
      known: cache of the texts of tensor types, keyed by ``id`` of the type and filled here. The caller keeps the types
        alive as long as the cache.
    """
    own = _OWN.get(node.op, "shared_name" if node.stateful else "")
    shared = getattr(node.attrs, "shared", None)
    attrs = _digest_attrs(node.attrs, own) if shared is None else _digest_shared(shared, own)
    inputs = _format_tuple([f"Ref(node={name!r}, index={index!r})" for name, index in node.inputs])
    outputs = _format_tuple([known.get(id(t)) or known.setdefault(id(t), repr(t)) for t in node.outputs])
    controls = sorted(node.controls) if node.controls else "[]"
    text = f"{node.name}\0{node.op}\0{inputs}\0{controls}\0{outputs}\0{node.scope}"
    if node.marks is not NO_MARKS and (marks := node.marks.list_given()):
        text += f"\0{marks}"
    return hashlib.blake2b(text.encode() + attrs, digest_size=8).digest()


def _format_tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


@lru_cache(maxsize=4096)
def _digest_shared(attrs: SharedAttrs, own: str) -> bytes:
    """Encodes attributes that several nodes share, cached: thousands of nodes have only dozens of attribute sets."""
    return _digest_attrs(attrs, own)


def _digest_attrs(attrs: Mapping[str, Any], own: str = "") -> bytes:
    return b";".join(k.encode() + b"=" + _feed_value(attrs[k]) for k in sorted(attrs) if not own or k != own)


def compute_fingerprint(program: Program) -> str:
    """Returns a hex digest of a whole program: its nodes in order, inputs, variables, outputs, effects and functions.

    The digest is computed once and kept on the program. Ranks compare it before a run, and plans and caches use it as
    key.
    """
    found: str | None = program.__dict__.get(_KNOWN)
    if found is None:
        h = hashlib.blake2b(digest_size=16)
        _update(h, program)
        found = program.__dict__[_KNOWN] = h.hexdigest()
    return found


def _update(h: Any, program: Program) -> None:
    known: dict[int, str] = {}
    for node in program.nodes:
        h.update(digest_node(node, known))
    variables = [(v.node, str(v.type)) for v in program.variables]
    h.update(repr((program.inputs, variables, program.outputs, program.effects)).encode())
    for name in sorted(program.functions):
        h.update(name.encode())
        _update(h, program.functions[name])


def list_node_digests(program: Program) -> list[tuple[str, bytes]]:
    """Lists (description, digest) of each node in order, then of the variables, the outputs, and the functions' nodes.

    Two programs are equal exactly if their lists are; the first unequal entry names what differs.
    """
    known: dict[int, str] = {}
    rows = [(f"{n.name} ({n.op})", digest_node(n, known)) for n in program.nodes]
    rows += [(f"variable {v.name}", _new_digest(v.node, str(v.type))) for v in program.variables]
    fetches = _new_digest(program.inputs, program.outputs, program.effects)
    rows.append(("the fetches " + ", ".join(map(str, program.outputs)), fetches))
    for name in sorted(program.functions):
        rows += [(f"{name}/{what}", digest) for what, digest in list_node_digests(program.functions[name])]
    return rows


def list_constants(program: Program) -> dict[str, Tensor]:
    """Returns the values of the Const nodes of a program and its functions, keyed as ``list_node_digests`` describes
    nodes.

    Error messages use these to show which value differs between ranks.
    """
    found = {f"{n.name} ({n.op})": n.attrs["value"] for n in program.nodes if n.op == "Const"}
    for name, body in program.functions.items():
        found |= {f"{name}/{what}": value for what, value in list_constants(body).items()}
    return {what: value for what, value in found.items() if isinstance(value, Tensor)}


def _new_digest(*values: Any) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
