"""Counts the iterations of loops whose trip count follows from constants of the program, without running it.

The condition's operands are evaluated iteration by iteration: scalar integers and booleans, by a few arithmetic ops.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from whale.ir.ops import IDENTITIES, LOOPS
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.ir.values import Func

MOST_TURNS = 100_000  # loops of more iterations count as unknown
_COUNTING = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_OPS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(IDENTITIES | {"Cast"}, operator.pos),
    **dict.fromkeys(("Add", "AddV2"), operator.add),
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Maximum": max,
    "Minimum": min,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
    "LogicalAnd": operator.and_,
    "LogicalOr": operator.or_,
    "LogicalNot": operator.not_,
}
Values = dict[Ref, int]  # scalars that are known; truth values are 0 and 1


@dataclass(frozen=True, slots=True)
class LoopTurns:
    """Holds what is known about a loop.

    Attributes:
        count: its trip count.
        arguments: number of a body's argument -> its value, for arguments that are the same known constant in every
            iteration.
    """

    count: int
    arguments: Mapping[int, int]


def find_turns(graph: Program, functions: Mapping[str, Program], arguments: Mapping[int, int]) -> dict[str, LoopTurns]:
    """Returns the trip count of each loop node of a graph for which it is known.

    Args:
        functions: the program's functions, by name.
        arguments: number of a graph's input -> its value, if known.
    """
    known: Values = {Ref(graph.inputs[i]): value for i, value in arguments.items()}
    found: dict[str, LoopTurns] = {}
    for node in graph.nodes:
        if node.op not in LOOPS:
            evaluate(node, known)
            continue
        bodies = [find_function(node, key, functions) for key in ("cond", "body")]
        start = {i: known[ref] for i, ref in enumerate(node.inputs) if ref in known}
        condition, body = bodies
        if condition is None or body is None:
            continue
        constant = {i: v for i, v in start.items() if _is_passed_on(body, i)}
        known |= {Ref(node.name, i): v for i, v in constant.items()}
        ended = _count_turns(condition, body, start)
        if ended is not None:
            count, last = ended
            found[node.name] = LoopTurns(count, constant)
            known |= {Ref(node.name, i): v for i, v in last.items()}
    return found


def count_executions(program: Program) -> Counter[str]:
    """Counts how often a step runs each function of a program; a loop with an unknown trip count counts as one
    iteration.
    """
    if not program.functions:
        return Counter()
    known: dict[tuple[str, tuple[tuple[int, int], ...]], Counter[str]] = {}

    def count_inside(name: str, arguments: Mapping[int, int]) -> Counter[str]:
        """Counts how often one call of a function runs each function, given the known values of its arguments."""
        key = name, tuple(sorted(arguments.items()))
        if key not in known:  # micro-batches call the same functions
            known[key] = count_within(program.functions[name], arguments)
        return known[key]

    def count_within(graph: Program, arguments: Mapping[int, int]) -> Counter[str]:
        found: Counter[str] = Counter()
        counted = find_turns(graph, program.functions, arguments)
        for node in graph.nodes:
            loop = counted.get(node.name, LoopTurns(1, {}))
            for key, function in iterate_function_refs(node):
                if function.name in program.functions:
                    # A loop's condition runs once more than its body.
                    times = loop.count + (node.op in LOOPS and key == "cond")
                    found[function.name] += times
                    for name, often in count_inside(function.name, loop.arguments).items():
                        found[name] += times * often
        return found

    return count_within(program, {})


def find_function(node: Node, key: str, functions: Mapping[str, Program]) -> Program | None:
    """Returns the function that attribute `key` of a node names; None if the program does not contain it."""
    value = node.attrs.get(key)
    return functions.get(value.name) if isinstance(value, Func) else None


def _is_counting(node: Node) -> bool:
    """Returns True if a node is a constant, or computes one scalar integer or boolean by an op of `_OPS`."""
    if len(node.outputs) != 1 or node.outputs[0].dtype not in _COUNTING or node.outputs[0].shape != ():
        return False
    return node.op == "Const" or node.op in _OPS


def evaluate(node: Node, known: Values) -> bool:
    """Evaluates a scalar integer node if its operands are in `known`, and adds its result there; returns whether it
    did.
    """
    if not _is_counting(node) or any(ref not in known for ref in node.inputs):
        return False
    if node.op == "Const":
        known[Ref(node.name)] = int(node.attrs["value"].numpy())
    else:
        known[Ref(node.name)] = int(_OPS[node.op](*(known[ref] for ref in node.inputs)))
    return True


def _is_passed_on(body: Program, argument: int) -> bool:
    """Returns True if a loop's body returns its argument number `argument` unchanged."""
    ref = body.outputs[argument]
    while body.by_name[ref.node].op in IDENTITIES:
        ref = body.by_name[ref.node].inputs[0]
    return ref == Ref(body.inputs[argument])


def _count_turns(condition: Program, body: Program, start: Mapping[int, int]) -> tuple[int, dict[int, int]] | None:
    """Counts a loop's iterations; returns (count, last values of the loop variables that are known), or None if
    unknown.

    Args:
        start: number of a loop variable -> its first value, if known.
    """
    test, asked = _find_needed(condition, condition.outputs)
    # All variables that can be evaluated are followed, not only those of the condition: another counter of this loop
    # may say how often the gradient's loop runs.
    followed = {i for i in start if _can_follow(body, {i}, start)}
    if not asked <= followed:
        return None
    order = sorted(followed)
    results = [body.outputs[i] for i in order]
    turn, _ = _find_needed(body, results)
    state = {i: start[i] for i in order}
    for count in range(MOST_TURNS + 1):
        found = _compute(condition, test, condition.outputs, state)
        if found is None:
            return None
        if not found[0]:
            return count, state
        after = _compute(body, turn, results, state)
        assert after is not None  # all of it counts
        state = dict(zip(order, after))
    return None


def _can_follow(body: Program, variables: set[int], start: Mapping[int, int]) -> bool:
    """Returns True if loop variables depend only on scalar integers with known first values, so that they can be
    evaluated.

    Adds the variables that they depend on to `variables`.
    """
    while True:
        nodes, read = _find_needed(body, [body.outputs[i] for i in variables])
        if not read <= start.keys() or not all(map(_is_counting, nodes)):
            return False
        if read <= variables:
            return True
        variables |= read


def _find_needed(graph: Program, refs: Iterable[Ref]) -> tuple[list[Node], set[int]]:
    """Returns (nodes that the results `refs` depend on, in order; numbers of the graph's inputs that they depend
    on).
    """
    number = {name: i for i, name in enumerate(graph.inputs)}
    names: set[str] = set()
    waiting = [ref.node for ref in refs]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += [ref.node for ref in graph.by_name[name].inputs]
    return [n for n in graph.nodes if n.name in names and n.name not in number], {
        number[name] for name in names if name in number
    }


def _compute(
    graph: Program, nodes: Iterable[Node], refs: Iterable[Ref], arguments: Mapping[int, int]
) -> list[int] | None:
    known: Values = {Ref(graph.inputs[i]): value for i, value in arguments.items()}
    for node in nodes:
        if not evaluate(node, known):
            return None
    return [known[ref] for ref in refs]
