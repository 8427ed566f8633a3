"""Prints programs as text and parses them again: ``parse_program(format_program(p)) == p``."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import DType, Func, Shape, Tensor, TensorType, find_numpy_dtype

_BARE = re.compile(r"[A-Za-z0-9_./>\-]+\Z")
_READABLE_ELEMENTS = 16


# -- printing programs


def format_program(program: Program) -> str:
    """Formats a program as text with one line per node, which ``parse_program`` reads."""
    lines: list[str] = []
    _print_graph(program, "program", lines)
    for name, body in program.functions.items():
        _print_graph(body, f"function {_format_word(name)}", lines)
    return "\n".join(lines) + "\n"


def _print_graph(program: Program, head: str, lines: list[str]) -> None:
    lines.append(f"{head} {_format_word(program.name)}")
    lines.extend(f"  input {_format_word(name)}" for name in program.inputs)
    for v in program.variables:
        lines.append(
            f"  variable {_format_word(v.node)} {json.dumps(v.name)} {_format_type(v.type)}"
            + (f" @{json.dumps(v.scope)}" if v.scope else "")
        )
    lines.extend("  " + format_node(node) for node in program.nodes)
    lines.append("  return " + ", ".join(map(_format_ref, program.outputs)))
    lines.append("  effects " + ", ".join(map(_format_word, program.effects)))


def format_node(node: Node) -> str:
    """Formats ``name = Op(operands) ^control {attributes} <marks> : types @scope !``, with ``!`` if stateful."""
    text = f"{_format_word(node.name)} = {_format_word(node.op)}({', '.join(map(_format_ref, node.inputs))})"
    text += "".join(f" ^{_format_word(c)}" for c in node.controls)
    if node.attrs:
        text += " {" + ", ".join(f"{k}={format_value(node.attrs[k])}" for k in sorted(node.attrs)) + "}"
    if given := node.marks.list_given():
        text += " <" + ", ".join(f"{k}={format_value(v)}" for k, v in given.items()) + ">"
    if node.outputs:
        text += " : " + ", ".join(map(_format_type, node.outputs))
    if node.scope:
        text += f" @{json.dumps(node.scope)}"
    return text + (" !" if node.stateful else "")


def _format_word(name: str) -> str:
    return name if _BARE.match(name) else json.dumps(name)


def _format_ref(ref: Ref) -> str:
    return f"{_format_word(ref.node)}:{ref.index}"


def _format_dims(dims: tuple[int | None, ...] | None) -> str:
    return "[*]" if dims is None else "[" + ",".join("?" if d is None else str(d) for d in dims) + "]"


def _format_type(t: TensorType) -> str:
    return t.dtype + _format_dims(t.shape)


def format_value(value: Any) -> str:
    """Formats an attribute value.

    Raises:
      TypeError: the value is of none of the types that ``whale.ir.values`` lists.
    """
    if isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return f"float({value!r})"
    if isinstance(value, DType):
        return f"dtype({value!s})"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bytes):
        return f"bytes({base64.b64encode(value).decode()})"
    if isinstance(value, Shape):
        return f"shape({_format_dims(value.dims)})"
    if isinstance(value, Tensor):
        return f"tensor({value.dtype}{_format_dims(value.shape)} {_format_tensor_data(value)})"
    if isinstance(value, Func):
        attrs = ", ".join(f"{k}={format_value(v)}" for k, v in sorted(value.attrs.items()))
        return f"func({_format_word(value.name)} {{{attrs}}})"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    raise TypeError(
        f"{value!r} ({type(value).__name__}) cannot be the value of a node's attribute; expected one of the types in "
        "whale.ir.values"
    )


def _format_tensor_data(t: Tensor) -> str:
    if t.dtype == "string":
        return json.dumps([base64.b64encode(item).decode() for item in t.data])
    if int(np.prod(t.shape, dtype=np.int64)) <= _READABLE_ELEMENTS and t.dtype.startswith(
        ("int", "float", "uint", "bool")
    ):
        array = t.numpy()
        if np.isfinite(array).all() and not np.any((array == 0) & np.signbit(array.astype(np.float64))):
            return json.dumps([x.item() for x in array.reshape(-1)])
    return "base64 " + base64.b64encode(t.data).decode()


# -- parsing programs


class _Reader:
    """Reads the tokens of one line of program text from left to right."""

    def __init__(self, line: str):
        self.line, self.at = line, 0

    def read_rest(self) -> str:
        return self.line[self.at :].strip()

    def take(self, pattern: str) -> str:
        match = re.compile(r"\s*(" + pattern + ")").match(self.line, self.at)
        if match is None:
            raise ValueError(
                f"a line of a program's text cannot be read: {self.line!r} has {self.read_rest()[:30]!r} at column "
                f"{self.at}, where {pattern!r} is expected"
            )
        self.at = match.end()
        return match.group(1)

    def has(self, text: str) -> bool:
        rest = self.line[self.at :].lstrip()
        if rest.startswith(text):
            self.at += len(self.line[self.at :]) - len(rest) + len(text)
            return True
        return False

    def read_word(self) -> str:
        if self.read_rest().startswith('"'):
            return self.read_string()
        return self.take(r"[A-Za-z0-9_./>\-]+")

    def read_string(self) -> str:
        return json.loads(self.take(r'"(?:[^"\\]|\\.)*"'))

    def read_ref(self) -> Ref:
        node = self.read_word()
        self.take(":")
        return Ref(node, int(self.take(r"\d+")))

    def read_dims(self) -> tuple[int | None, ...] | None:
        text = self.take(r"\[[^\]]*\]")[1:-1]
        if text == "*":
            return None
        return tuple(None if d == "?" else int(d) for d in text.split(",") if d)

    def type(self) -> TensorType:
        return TensorType(self.take(r"[a-z0-9_]+"), self.read_dims())

    def read_list(self, read: Any, end: str) -> list[Any]:
        items: list[Any] = []
        if end and self.has(end):
            return items
        while True:
            items.append(read())
            if not self.has(","):
                break
        if end:
            self.take(re.escape(end))
        return items

    def read_pair(self) -> tuple[str, Any]:
        key = self.take(r"[A-Za-z0-9_.]+")
        self.take("=")
        return key, self.read_value()

    def read_value(self) -> Any:
        if self.has("True"):
            return True
        if self.has("False"):
            return False
        if self.read_rest().startswith('"'):
            return self.read_string()
        if self.has("["):
            return tuple(self.read_list(self.read_value, "]"))
        if re.match(r"-?\d", self.read_rest()):
            return int(self.take(r"-?\d+"))
        kind = self.take("[a-z]+")
        self.take(r"\(")
        value: Any
        if kind == "float":
            value = float(self.take(r"[^)]+"))
        elif kind == "dtype":
            value = DType(self.take(r"[a-z0-9_]+"))
        elif kind == "bytes":
            value = base64.b64decode(self.take(r"[A-Za-z0-9+/=]*"))
        elif kind == "shape":
            value = Shape(self.read_dims())
        elif kind == "tensor":
            value = self.read_tensor()
        elif kind == "func":
            name = self.read_word()
            self.take("{")
            value = Func(name, dict(self.read_list(self.read_pair, "}")))
        else:
            raise ValueError(
                f"a line of a program's text has an attribute of the unknown kind {kind!r}: {self.line!r}; expected "
                "text that format_program writes"
            )
        self.take(r"\)")
        return value

    def read_tensor(self) -> Tensor:
        t = self.type()
        shape = tuple(int(d or 0) for d in t.shape or ())
        if self.has("base64"):
            return Tensor(t.dtype, shape, base64.b64decode(self.take(r"[A-Za-z0-9+/=]*")))
        items = json.loads(self.take(r"\[[^\]]*\]"))
        if t.dtype == "string":
            return Tensor("string", shape, tuple(base64.b64decode(i) for i in items))
        return Tensor(t.dtype, shape, np.array(items, dtype=find_numpy_dtype(t.dtype)).tobytes())


def parse_node(line: str) -> Node:
    """Parses one line written by ``format_node``.

    Raises:
      ValueError: the line cannot be read; the message has the column.
    """
    r = _Reader(line)
    name = r.read_word()
    r.take("=")
    op = r.read_word()
    r.take(r"\(")
    inputs = tuple(r.read_list(r.read_ref, ")"))
    controls = []
    while r.has("^"):
        controls.append(r.read_word())
    attrs = dict(r.read_list(r.read_pair, "}")) if r.has("{") else {}
    marks = Marks(**dict(r.read_list(r.read_pair, ">"))) if r.has("<") else NO_MARKS
    outputs = tuple(r.read_list(r.type, "")) if r.has(":") else ()
    scope = r.read_string() if r.has("@") else ""
    return Node(name, op, inputs, tuple(controls), attrs, outputs, scope, r.has("!"), marks)


def _make_program(parts: Mapping[str, Any]) -> Program:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in parts.items()}
    return Program(**fields)


def parse_program(text: str) -> Program:
    """Parses the text of ``format_program``.

    Raises:
      ValueError: a line cannot be read; the message quotes it.
    """
    graphs: list[tuple[str | None, dict[str, Any]]] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        r = _Reader(line)
        if not line.startswith(" "):
            key = r.read_word() if r.take("program|function") == "function" else None
            graphs.append((key, {"name": r.read_word(), "nodes": [], "inputs": [], "variables": []}))
            continue
        if not graphs:
            raise ValueError(f"a program's text cannot be read: no line starts with `program` before the line {line!r}")
        g = graphs[-1][1]
        word = r.read_word()
        if r.has("="):  # any name may be a node's, those of the other lines too
            g["nodes"].append(parse_node(line.strip()))
        elif word == "input":
            g["inputs"].append(r.read_word())
        elif word == "variable":
            node, name, t = r.read_word(), r.read_string(), r.type()
            g["variables"].append(Variable(node, name, t, r.read_string() if r.has("@") else ""))
        elif word == "return":
            g["outputs"] = tuple(r.read_list(r.read_ref, "")) if r.read_rest() else ()
        elif word == "effects":
            g["effects"] = tuple(r.read_list(r.read_word, "")) if r.read_rest() else ()
        else:
            raise ValueError(
                f"a line of a program's text cannot be read: {line!r}; expected `input`, `variable`, `return`, "
                "`effects`, or `name = Op(...)`"
            )
    programs = {key: _make_program(g) for key, g in graphs}
    if None not in programs:
        raise ValueError(
            "a program's text cannot be read: no line starts with `program`; expected text that format_program writes"
        )
    main = programs.pop(None)
    return main.replace_nodes(main.nodes, functions={k: p for k, p in programs.items() if k is not None})
