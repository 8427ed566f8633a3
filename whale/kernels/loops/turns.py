"""Follows the turns of a loop: its counters, and which turn puts what into lists of tensors, and takes what out.

Nothing but counters and lists is followed turn by turn; what turns compute has a name, and no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_model.kernels.loop_counts import evaluate
from whale.ir.ops import IDENTITIES, LISTS
from whale.ir.program import Node, Program, Ref

MOST_TURNS = 2048  # lists are copied at each turn


class NotFollowed(Exception):
    """Raised, with the reason, if a loop or a list cannot be followed."""


class Row(NamedTuple):
    """Row ``number`` of a tensor of the graph around the loop."""

    ref: Ref
    number: int


class Whole(NamedTuple):
    """A tensor of the graph around the loop."""

    ref: Ref


class Made(NamedTuple):
    """The value of the tensor ``ref`` of a loop's body in turn ``turn`` of the loop ``loop``."""

    loop: str
    turn: int
    ref: Ref


class Zeros(NamedTuple):
    """Zeros: what an item that was never set reads as."""


Item = Row | Whole | Made | Zeros | int  # an integer scalar that is known is itself
Items = tuple[Item, ...]
ZEROS = Zeros()


@dataclass(slots=True)
class Turns:
    """The turns of a loop.

    Attributes:
        count: how many there are.
        reads: of each tensor that is taken out of a list, what it is in each turn.
        numbers: of each counter of the body that is known, its value in each turn.
        lists: what the lists among the loop's variables hold at the end, by the variables' numbers.
        last: the values of counters among the loop's variables at the end.
    """

    count: int
    reads: dict[Ref, list[Item]] = field(default_factory=dict)
    numbers: dict[Ref, list[int]] = field(default_factory=dict)
    lists: dict[int, Items] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


def find_root(graph: Program, ref: Ref) -> Ref:
    """Returns the tensor that ``ref`` is, through identities."""
    node = graph.by_name[ref.node]
    while node.op in IDENTITIES:
        ref = node.inputs[0]
        node = graph.by_name[ref.node]
    return ref


def is_list(graph: Program, ref: Ref) -> bool:
    """Tells whether a tensor may be a list of tensors."""
    return graph.find_type(ref).dtype == "variant"


def is_zero(graph: Program, ref: Ref) -> bool:
    """Tells whether all elements of a tensor are zeros, whatever the program is given."""
    node = graph.by_name[find_root(graph, ref).node]
    if node.op == "ZerosLike":
        return True
    value = (
        graph.const(node.inputs[1] if node.op == "Fill" else Ref(node.name)) if node.op in ("Fill", "Const") else None
    )
    return value is not None and value.dtype.kind in "fiub" and not value.any()


def change_list(
    graph: Program,
    node: Node,
    lists: Mapping[Ref, Items],
    numbers: Mapping[Ref, int],
    item_of: Callable[[Ref], Item],
) -> tuple[Items | None, Item | None]:
    """Follows one operation on lists.

    Args:
        lists, numbers: what is known of the graph's tensors.
        item_of: returns what a tensor of the graph is as an item.

    Returns:
        (the list that it makes, the item that it takes out), each None if there is none.

    Raises:
        NotFollowed: the list is not known, or data decide.
    """

    def list_of(ref: Ref) -> Items:
        if ref not in lists:
            raise NotFollowed(f"{node.op}: a list from elsewhere")
        return lists[ref]

    def number_of(ref: Ref) -> int:
        if ref not in numbers:
            raise NotFollowed(f"{node.op}: data decide the place or length")
        return numbers[ref]

    def place(items: Items) -> int:
        at = number_of(node.inputs[1])
        if not 0 <= at < len(items):
            raise NotFollowed(f"{node.op}: place {at} of a list of {len(items)}")
        return at

    op = node.op
    if op == "EmptyTensorList":
        return (), None
    if op == "TensorListReserve":
        return (ZEROS,) * number_of(node.inputs[1]), None
    if op == "TensorListFromTensor":
        shape = graph.find_type(node.inputs[0]).shape
        if not shape or shape[0] is None:
            raise NotFollowed(f"{op}: of unknown length")
        return tuple([Row(find_root(graph, node.inputs[0]), i) for i in range(shape[0])]), None
    if op in IDENTITIES:
        return list_of(node.inputs[0]), None
    if op == "ZerosLike":
        return (ZEROS,) * len(list_of(node.inputs[0])), None
    if op == "AddN":
        return _add_lists([list_of(ref) for ref in node.inputs]), None
    items = list_of(node.inputs[0])
    if op == "TensorListPushBack":
        return (*items, item_of(node.inputs[1])), None
    if op == "TensorListPopBack" and items:
        return items[:-1], items[-1]
    if op == "TensorListSetItem":
        at = place(items)
        return (*items[:at], item_of(node.inputs[2]), *items[at + 1 :]), None
    if op == "TensorListGetItem":
        return None, items[place(items)]
    if op == "TensorListResize":
        length = number_of(node.inputs[1])
        return (items + (ZEROS,) * length)[:length], None
    if op == "TensorListLength":
        return None, len(items)
    raise NotFollowed(f"{op} is not followed")


def _add_lists(lists: Sequence[Items]) -> Items:
    """Adds lists item by item, where of each place at most one list has something."""
    if len({len(one) for one in lists}) != 1:
        raise NotFollowed("lists of unequal length are added")
    found: list[Item] = []
    for items in zip(*lists):
        given = [item for item in items if item != ZEROS]
        if len(given) > 1:
            raise NotFollowed("items of lists are added")
        found.append(given[0] if given else ZEROS)
    return tuple(found)


def makes_list(graph: Program, node: Node) -> bool:
    """Tells whether a node is an operation on lists."""
    if node.op in LISTS:
        return True
    return (node.op in IDENTITIES or node.op in ("AddN", "ZerosLike")) and is_list(graph, node.inputs[0])


def follow_turns(name: str, body: Program, count: int, lists: Mapping[int, Items], numbers: Mapping[int, int]) -> Turns:
    """Follows the turns of the loop ``name``.

    Args:
        count: of the turns.
        lists, numbers: the loop's variables that are known before the first turn, by number.

    Raises:
        NotFollowed: data decide which item of a list a turn takes, or turns take what others put.
    """
    found = Turns(count)
    arguments = [Ref(one) for one in body.inputs]
    state_lists, state_numbers = dict(lists), dict(numbers)
    followed: Sequence[Node] = body.nodes
    for turn in range(count):
        one = _Turn(
            name,
            body,
            turn,
            {arguments[i]: items for i, items in state_lists.items()},
            {arguments[i]: value for i, value in state_numbers.items()},
        )
        followed = [node for node in followed if one.follow(node)]
        for ref, item in one.items.items():
            found.reads.setdefault(ref, []).append(item)
        for ref, value in one.numbers.items():
            found.numbers.setdefault(ref, []).append(value)
        results = [find_root(body, ref) for ref in body.outputs]
        state_lists = {i: one.lists[ref] for i, ref in enumerate(results) if ref in one.lists}
        state_numbers = {i: one.numbers[ref] for i, ref in enumerate(results) if ref in one.numbers}
    found.lists, found.last = state_lists, state_numbers
    return found


@dataclass(slots=True)
class _Turn:
    """A turn of a loop: what is known of the tensors of its body; ``items`` are those that it takes out of lists."""

    name: str
    body: Program
    number: int
    lists: dict[Ref, Items]
    numbers: dict[Ref, int]
    items: dict[Ref, Item] = field(default_factory=dict)

    def follow(self, node: Node) -> bool:
        """Follows a node; tells whether it counts, or is an operation on lists."""
        if not makes_list(self.body, node):
            return evaluate(node, self.numbers)
        if node.op == "TensorListElementShape":
            return False
        made, taken = change_list(self.body, node, self.lists, self.numbers, self._find_item)
        if made is not None:
            self.lists[Ref(node.name)] = made
        if taken is None:
            return True
        ref = Ref(node.name, 1 if node.op == "TensorListPopBack" else 0)
        if isinstance(taken, int):
            self.numbers[ref] = taken
        elif isinstance(taken, Made) and taken.loop == self.name:
            raise NotFollowed("a turn reads what another one has put into a list")
        else:
            self.items[ref] = taken
        return True

    def _find_item(self, ref: Ref) -> Item:
        ref = find_root(self.body, ref)
        if ref in self.items:
            return self.items[ref]
        if ref in self.numbers:
            return self.numbers[ref]
        return ZEROS if is_zero(self.body, ref) else Made(self.name, self.number, ref)
