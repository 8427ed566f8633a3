"""Parses the one-line notation of sharding rules, such as ``m k+, k+ n -> m n`` for a matrix product.

    line     ::=  "replicated" | "owner" | operands "->" outputs
    operands ::=  term ("," term)*  |  nothing
    term     ::=  "." | "?" | "[" role "]" | "{" term "}" | ("~" | "=")? dimensions
    dimensions ::= (label flag? | label "*" flag? | "*" flag? | "(" label flag? inner* ")" | "1")+
    flag     ::=  "+" | "^"

* ``replicated``: every rank computes the whole op. ``owner``: only the first rank runs it.
* A *label* names a dimension; dimensions with the same label are sharded together. ``+``: where an output lacks the
  label, sharding along it makes the output partial. ``^``: the dimension cannot be sharded.
* ``*`` stands for any number of dimensions, right-aligned over the operands as NumPy broadcasts; a dimension of size 1
  is not sharded where the others are larger. ``p*`` is a run of dimensions that does not broadcast: as many wherever it
  is written.
* ``(b s)`` is one dimension made of several, outermost first; each is a label or a size: ``(c 4)``. Where the outermost
  one is sharded, shards are multiples of the rest; an inner one is sharded in runs.
* ``.`` is replicated (``B``). ``?`` may have any placement; an output ``?`` has that of the operand with its number.
  ``[out0]`` and other roles are operands that lowering replaces by a local constant. ``{x}`` is any number of operands
  like ``x`` (once per side). ``~x``: the values are not read, so a partial operand may be taken as it is. ``=x``
  (outputs): the output does not depend on the dimensions that it lacks.

The notation follows nnscaler's dimops annotations and einsum.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from whale.errors import RuleError

REPLICATED = "replicated"
FIRST_RANK = "owner"

_ITEM = re.compile(r"\s*(?:\((?P<group>[^()]*)\)|(?P<one>1)(?!\w)|(?P<star>[a-z]\w*\*|\*)(?P<sflag>[+^]?)|"
                   r"(?P<label>[a-z]\w*)(?P<flag>[+^]?))(?=\s|$|\()\s*")  # fmt: skip
_MEMBER = re.compile(r"([a-z]\w*|\d+)([+^]?)$")
_ROLE = re.compile(r"\[([a-z]\w*)\]$")


@dataclass(frozen=True, slots=True)
class Item:
    """Represents one dimension of a term, or a run of dimensions.

    Attributes:
      labels: labels and sizes of the dimension, outermost first; () for a dimension of size 1.
      star: True for a run of dimensions (``*``, ``p*``).
    """

    labels: tuple[str | int, ...]
    star: bool = False


@dataclass(frozen=True, slots=True)
class Term:
    """Represents the term of one operand or output.

    Attributes:
      kind: "dims"; "whole" (``.``); "any" (``?``); or "role".
      items: the dimensions of a term of kind "dims".
      role: name of the role, such as "out0".
      unread: the term begins with ``~``: the operand's values are not read.
      same: the term begins with ``=``: the output does not depend on dimensions that it lacks.
      variadic: the term is in braces: any number of operands or outputs are like it.
    """

    kind: str
    items: tuple[Item, ...] = ()
    role: str = ""
    unread: bool = False
    same: bool = False
    variadic: bool = False

    def labels(self) -> list[str]:
        """Returns all labels of the term, from left to right; runs of dimensions with their star."""
        return [str(x) + ("*" if item.star and x != "*" else "") for item in self.items for x in item.labels
                if isinstance(x, str)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """Represents a parsed rule line.

    Attributes:
      text: the line as written.
      inputs: the term of each operand.
      outputs: the term of each output.
      flags: label -> its flag: "+", "^" or "".
    """

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    flags: dict[str, str] = field(hash=False)


def _fail(text: str, message: str, given: str, expected: str) -> RuleError:
    action = "correct the rule line, which is like `m k+, k+ n -> m n`; whale/sharding_rules/notation.py explains it"
    return RuleError(
        f"a sharding rule is malformed: {message}", rule=text, given=given, expected=expected, action=action
    )


def _fail_passes(text: str, message: str, given: str, expected: str) -> RuleError:
    action = "correct lin=, mono= or copy= of the rule, which is like `0|1&2`: operand 0, or operands 1 and 2 together"
    return RuleError(
        f"a sharding rule is malformed: {message}", passes=text, given=given, expected=expected, action=action
    )


def _note_flag(text: str, flags: dict[str, str], label: str, flag: str, *, output: bool) -> None:
    known = flags.setdefault(label, flag)
    if known == flag or (output and known == "+" and not flag):
        return
    raise _fail(text, f"label {label!r} has two flags", f"{label}{known} and {label}{flag}",
                "the same flag wherever the label is written (an output may leave out '+')")  # fmt: skip


def _parse_dims(text: str, term: str, flags: dict[str, str], *, output: bool) -> tuple[Item, ...]:
    items: list[Item] = []
    at = 0
    while at < len(term):
        match = _ITEM.match(term, at)
        if match is None:
            raise _fail(text, "a term cannot be read", repr(term[at:]),
                        "labels (a, a+, a^), '*', 'a*', '(a b)', '1'")  # fmt: skip
        at = match.end()
        if match["one"]:
            items.append(Item(()))
        elif match["star"]:
            name = match["star"]
            _note_flag(text, flags, name, match["sflag"], output=output)
            items.append(Item((name if name == "*" else name[:-1],), star=True))
        elif match["label"]:
            _note_flag(text, flags, match["label"], match["flag"], output=output)
            items.append(Item((match["label"],)))
        else:
            members: list[str | int] = []
            for word in match["group"].split():
                member = _MEMBER.match(word)
                if member is None:
                    raise _fail(text, "a compound dimension cannot be read", f"({match['group']})",
                                "labels or sizes, outermost first, such as (n 4)")  # fmt: skip
                if word.isdigit():
                    members.append(int(word))
                else:
                    _note_flag(text, flags, member[1], member[2], output=output)
                    members.append(member[1])
            if not any(isinstance(member, str) for member in members):
                raise _fail(text, "a compound dimension has no label", f"({match['group']})",
                            "(outer inner ...) with at least one label, such as (n 4)")  # fmt: skip
            items.append(Item(tuple(members)))
    if sum(i.star and i.labels == ("*",) for i in items) > 1:
        raise _fail(text, "a term has two '*'", repr(term), "one '*'; name further runs: 'a* b*'")
    return tuple(items)


def _parse_term(text: str, term: str, flags: dict[str, str], *, output: bool) -> Term:
    term = term.strip()
    variadic = term.startswith("{")
    if variadic:
        if not term.endswith("}"):
            raise _fail(text, "a variadic term is not closed", repr(term), "one term in braces, such as {*}")
        term = term[1:-1].strip()
    unread, same = term.startswith("~"), term.startswith("=")
    if unread and output:
        raise _fail(text, "'~' stands before an output", repr(term), "'~' before operands only")
    if same and not output:
        raise _fail(text, "'=' stands before an operand", repr(term), "'=' before outputs only")
    if unread or same:
        term = term[1:].strip()
    if not term:
        raise _fail(text, "a term is empty", repr(term), "labels, or '.' for an operand that stays whole (scalars too)")
    if term == ".":
        return Term("whole", unread=unread, same=same, variadic=variadic)
    if term == "?":
        return Term("any", variadic=variadic)
    if term.startswith("["):
        match = _ROLE.match(term)
        if match is None or output:
            raise _fail(text, "a role cannot be read", repr(term), "[name], such as [out0], on operands only")
        return Term("role", role=match[1], variadic=variadic)
    items = _parse_dims(text, term, flags, output=output)
    return Term("dims", items, unread=unread, same=same, variadic=variadic)


def _parse_side(text: str, side: str, flags: dict[str, str], *, output: bool) -> tuple[Term, ...]:
    if not side.strip():
        return ()
    terms = tuple(_parse_term(text, t, flags, output=output) for t in side.split(","))
    if sum(t.variadic for t in terms) > 1:
        raise _fail(text, "two variadic terms on one side", side.strip(), "at most one {term} per side")
    return terms


def _check(line: Line) -> None:
    text = line.text
    inside: set[str] = set()
    for number, term in enumerate(line.inputs):
        labels = term.labels()
        inside.update(labels)
        for label in labels:
            if labels.count(label) > 1 and line.flags[label] != "^":
                raise _fail(text, f"label {label!r} is twice in operand {number}", " ".join(labels),
                            f"{label}^ at both places (it cannot be cut), or two labels")  # fmt: skip
    for number, term in enumerate(line.outputs):
        for label in inside - set(term.labels()):
            if not line.flags[label] and not term.same and term.kind != "any":
                raise _fail(text, f"label {label!r} is in an operand but not in output {number}", label,
                            f"{label}+ (cutting it gives a partial sum), {label}^ (it cannot be cut), "
                            f"or '=' before the output (it does not depend on {label})")  # fmt: skip


@cache
def parse(text: str) -> Line:
    """Parses a rule line.

    Raises:
      RuleError: the line has a mistake; the error says which, and what is expected.
    """
    if text.strip() == REPLICATED:
        every = (Term("whole", variadic=True),)
        return Line(REPLICATED, every, every, {})
    sides = text.split("->")
    if len(sides) != 2:
        raise _fail(
            text, "a rule line needs one '->'", f"{len(sides) - 1} of them", "operands -> outputs, as in m -> m"
        )
    flags: dict[str, str] = {}
    inputs = _parse_side(text, sides[0], flags, output=False)
    outputs = _parse_side(text, sides[1], flags, output=True)
    line = Line(text, inputs, outputs, flags)
    _check(line)
    return line


@dataclass(frozen=True, slots=True)
class Passes:
    """Describes a set of operands through which partial values pass.

    If all operands of the set are partial under ``op`` and the others are replicated, the outputs are partial too.

    Attributes:
      op: the reduction.
      operands: numbers of the operands; None: all of them.
      outputs: numbers of the outputs that depend on them; None: all but those marked ``=``.
    """

    op: str
    operands: tuple[int, ...] | None  # None: all of them
    outputs: tuple[int, ...] | None = None  # the outputs that depend on them; None: all but those marked ``=``


@cache
def parse_passes(text: str, ops: tuple[str, ...]) -> tuple[Passes, ...]:
    """Parses through which operands partial values pass.

    ``"0|1"``: operand 0 or operand 1; ``"0&1"``: both at once; ``"all"``: all at once; ``"max:0&1"``: for that
    reduction only; ``"0&1>2"``: only output 2 depends on them.

    Args:
      ops: the reductions for which an alternative without a prefix holds.

    Raises:
      RuleError: the text is none of these.
    """
    found: list[Passes] = []
    for part in text.split("|"):
        name, _, numbers = part.rpartition(":")
        name, numbers = name.strip(), numbers.strip()
        if name and name not in ops:
            raise _fail_passes(text, "an unknown reduction", name, f"one of {', '.join(ops)}")
        operands: tuple[int, ...] | None = None
        outputs: tuple[int, ...] | None = None
        if numbers != "all":
            if not re.fullmatch(r"\d+(\s*&\s*\d+)*(>\d+(&\d+)*)?", numbers):
                raise _fail_passes(text, "an operand set cannot be read", repr(part),
                                   "0, 0&1, 0&1>0, all, or max:0&1; joined by '|'")  # fmt: skip
            before, _, after = numbers.partition(">")
            operands = tuple(int(n) for n in before.split("&"))
            outputs = tuple(int(n) for n in after.split("&")) if after else None
        found += [Passes(op, operands, outputs) for op in ((name,) if name else ops)]
    return tuple(found)
