"""Computes fingerprints of programs: equal on ranks with equal programs, and able to name the first differing node."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from whale.ir.marks import NO_MARKS
from whale.ir.program import Node, Program
from whale.ir.values import DType, Func, Shape, SharedAttrs, Tensor

# Attributes that are a process's own: TensorFlow draws the names of tables, queues, iterators and Python functions anew
# in each.
_OWN = {"VarHandleOp": "", "PyFunc": "token", "PyFuncStateless": "token", "EagerPyFunc": "token"}

_KNOWN = "_fingerprint"  # beside what ``cached_property`` keeps there


def _feed_value(value: Any) -> bytes:
    """Encodes an attribute value as bytes, different for different values."""
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
    """Digests a node's name, op, operands, control edges, attributes and types to eight bytes.

    Args:
      known: texts of types that were met before, by the number of the object, which has to outlive it.
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
    """Digests attributes that nodes share, once: a program of thousands of nodes has some dozens of combinations."""
    return _digest_attrs(attrs, own)


def _digest_attrs(attrs: Mapping[str, Any], own: str = "") -> bytes:
    return b";".join(k.encode() + b"=" + _feed_value(attrs[k]) for k in sorted(attrs) if not own or k != own)


def compute_fingerprint(program: Program) -> str:
    """Returns a hex digest of the whole program: nodes in order, inputs, variables, fetches, effects, functions.

    It is computed once for each program, and asked for by ranks that compare, plans and tables.
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
    """Returns (what, digest) for each node in canonical order, then for inputs and outputs, then for functions; exactly
    equal programs have equal lists.
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
    """Returns the constants of a program and its functions, by what ``list_node_digests`` calls their nodes."""
    found = {f"{n.name} ({n.op})": n.attrs["value"] for n in program.nodes if n.op == "Const"}
    for name, body in program.functions.items():
        found |= {f"{name}/{what}": value for what, value in list_constants(body).items()}
    return {what: value for what, value in found.items() if isinstance(value, Tensor)}


def _new_digest(*values: Any) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
