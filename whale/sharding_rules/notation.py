"""Parses the one-line notation of sharding rules.

    line     ::=  "replicated" | "owner" | operands "->" outputs
    operands ::=  term ("," term)*  |  nothing
    term     ::=  "." | "?" | "[" role "]" | "{" term "}" | ("~" | "=")? dimensions
    dimensions ::= (label flag? | label "*" flag? | "*" flag? | "(" label flag? inner* ")" | "1")+
    flag     ::=  "+" | "^"

* A *label* names a dimension; where two operands have the same label they are cut together. ``+``: cutting it gives a
  partial result where an output lacks it. ``^``: it cannot be cut.
* ``*`` stands for any number of dimensions, right-aligned over the operands as NumPy broadcasts; a dimension of size 1
  is not cut where the others are larger. ``p*`` is a run of dimensions that does not broadcast: as many wherever it is
  written.
* ``(b s)`` is one dimension made of several, outermost first, labels or sizes: ``(c 4)``. Where the outermost is cut,
  then on multiples of the rest; an inner one is cut in runs.
* ``.`` is whole everywhere (``B``); ``?`` may have any placement, and an output ``?`` has that of the operand with its
  number; ``[out0]`` and other roles are operands that lowering replaces by a local constant; ``{x}`` is any number of
  operands like ``x`` (once per side); ``~x``: the values are not read, so a partial operand serves as it is; ``=x``
  (outputs): does not depend on the dimensions that it lacks.

The notation follows nnscaler's dimops annotations (``m k+, k+ n -> m n``) and einsum.
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
    """One dimension of a term: its labels, outermost first; ``star`` when it is a run of dimensions (``*``, ``p*``)."""

    labels: tuple[str | int, ...]
    star: bool = False


@dataclass(frozen=True, slots=True)
class Term:
    """One operand or output. ``kind`` is ``dims``, ``whole`` (``.``), ``any`` (``?``) or ``role``."""

    kind: str
    items: tuple[Item, ...] = ()
    role: str = ""
    unread: bool = False
    same: bool = False
    variadic: bool = False

    def labels(self) -> list[str]:
        """Returns the term's labels, outermost and inner, star runs with their star."""
        return [str(x) + ("*" if item.star and x != "*" else "") for item in self.items for x in item.labels
                if isinstance(x, str)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed rule line. ``flags`` has the flag (``+``, ``^`` or nothing) of every label."""

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    flags: dict[str, str] = field(hash=False)


def _fail(text: str, message: str, given: str, expected: str) -> RuleError:
    return RuleError(message, rule=text, given=given, expected=expected, action="correct the rule line")


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
                                "(outer inner ...): labels or sizes")  # fmt: skip
                if word.isdigit():
                    members.append(int(word))
                else:
                    _note_flag(text, flags, member[1], member[2], output=output)
                    members.append(member[1])
            if not any(isinstance(member, str) for member in members):
                raise _fail(text, "a compound dimension has no label", f"({match['group']})", "(outer inner ...)")
            items.append(Item(tuple(members)))
    if sum(i.star and i.labels == ("*",) for i in items) > 1:
        raise _fail(text, "a term has two '*'", repr(term), "one '*'; name further runs: 'a* b*'")
    return tuple(items)


def _parse_term(text: str, term: str, flags: dict[str, str], *, output: bool) -> Term:
    term = term.strip()
    variadic = term.startswith("{")
    if variadic:
        if not term.endswith("}"):
            raise _fail(text, "a variadic term is not closed", repr(term), "{term}")
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
            raise _fail(text, "a role cannot be read", repr(term), "[name], on operands only")
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
                raise _fail(text, f"label {label!r} is twice in operand {number}", " ".join(labels), f"{label}^")
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
      RuleError: the line has a mistake; the message names it and what is expected.
    """
    if text.strip() == REPLICATED:
        every = (Term("whole", variadic=True),)
        return Line(REPLICATED, every, every, {})
    sides = text.split("->")
    if len(sides) != 2:
        raise _fail(text, "a rule line needs one '->'", f"{len(sides) - 1} of them", "operands -> outputs")
    flags: dict[str, str] = {}
    inputs = _parse_side(text, sides[0], flags, output=False)
    outputs = _parse_side(text, sides[1], flags, output=True)
    line = Line(text, inputs, outputs, flags)
    _check(line)
    return line


@dataclass(frozen=True, slots=True)
class Passes:
    """The operands that may be partial under ``op``, all at once (the others whole), so that the outputs are, too."""

    op: str
    operands: tuple[int, ...] | None  # None: all of them
    outputs: tuple[int, ...] | None = None  # the outputs that depend on them; None: all but those marked ``=``


@cache
def parse_passes(text: str, ops: tuple[str, ...]) -> tuple[Passes, ...]:
    """Parses which operands partial values pass: ``"0|1"`` is either operand; ``"0&1"`` both at once; ``"all"``;
    ``"max:0&1"`` for that reduction only; ``"0&1>2"`` says that only output 2 depends on them.

    Args:
      ops: the reductions that an alternative without a prefix stands for.

    Raises:
      RuleError: the text is none of these.
    """
    found: list[Passes] = []
    for part in text.split("|"):
        name, _, numbers = part.rpartition(":")
        name, numbers = name.strip(), numbers.strip()
        if name and name not in ops:
            raise _fail(text, "an unknown reduction", name, ", ".join(ops))
        operands: tuple[int, ...] | None = None
        outputs: tuple[int, ...] | None = None
        if numbers != "all":
            if not re.fullmatch(r"\d+(\s*&\s*\d+)*(>\d+(&\d+)*)?", numbers):
                raise _fail(text, "an operand set cannot be read", repr(part),
                            "0, 0&1, 0&1>0, all, or max:0&1; joined by '|'")  # fmt: skip
            before, _, after = numbers.partition(">")
            operands = tuple(int(n) for n in before.split("&"))
            outputs = tuple(int(n) for n in after.split("&")) if after else None
        found += [Passes(op, operands, outputs) for op in ((name,) if name else ops)]
    return tuple(found)
