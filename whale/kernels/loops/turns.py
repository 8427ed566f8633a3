"""Follows the iterations ("turns") of a loop: values of its counters, and which iteration puts what into TensorLists,
and takes what out.

Only counters and lists are followed from iteration to iteration. A tensor that an iteration computes is known by its
name (``Made``), not by its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_model.kernels.loop_counts import evaluate
from whale.ir.ops import IDENTITIES, LISTS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType, require_static_shape

MOST_TURNS = 2048  # longer loops stay: following copies all lists in each iteration


class NotFollowed(Exception):
    """Raised, with the reason, if a loop or a list cannot be followed; the loop then stays as it is."""


def require_sizes(t: TensorType) -> tuple[int, ...]:
    """Returns the shape of a tensor that takes the place of what a loop computes.

    Raises:
      NotFollowed: only the run knows one of its sizes.
    """
    if not t.is_static:
        raise NotFollowed(f"only the run knows a size of {t}")
    return require_static_shape(t)


class Row(NamedTuple):
    """Represents a list item that is row ``number`` of a tensor of the graph around the loop."""

    ref: Ref
    number: int


class Whole(NamedTuple):
    """Represents a list item that is a tensor of the graph around the loop."""

    ref: Ref


class Made(NamedTuple):
    """Represents a list item that iteration ``turn`` of the loop ``loop`` computes: the tensor ``ref`` of its body."""

    loop: str
    turn: int
    ref: Ref


class Zeros(NamedTuple):
    """Represents a list item that was never set, and reads as zeros."""


Item = Row | Whole | Made | Zeros | int  # int: a known integer scalar
Items = tuple[Item, ...]
ZEROS = Zeros()


@dataclass(slots=True)
class Turns:
    """Holds what is known of the iterations of a loop.

    Attributes:
      count: their number.
      reads: tensor of the body that is taken out of a list -> the item in each iteration.
      numbers: counter of the body -> its value in each iteration.
      lists: number of a loop variable that is a list -> its items at the end.
      last: number of a loop variable that is a counter -> its value at the end.
    """

    count: int
    reads: dict[Ref, list[Item]] = field(default_factory=dict)
    numbers: dict[Ref, list[int]] = field(default_factory=dict)
    lists: dict[int, Items] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


def find_root(graph: Program, ref: Ref) -> Ref:
    """Returns the tensor that ``ref`` is a copy of, looking through identities."""
    node = graph.by_name[ref.node]
    while node.op in IDENTITIES:
        ref = node.inputs[0]
        node = graph.by_name[ref.node]
    return ref


def is_list(graph: Program, ref: Ref) -> bool:
    """Returns True if a tensor is a variant, and so may be a TensorList."""
    return graph.find_type(ref).dtype == "variant"


def is_zero(graph: Program, ref: Ref) -> bool:
    """Returns True if a tensor is known to be all zeros: ZerosLike, or a constant or Fill with zeros."""
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
    """Follows one operation on TensorLists: computes which items its result holds, without running it.

    Args:
      lists: tensors of the graph that are TensorLists -> their items.
      numbers: tensors of the graph that are known integers -> their values.
      item_of: a function that describes a tensor of the graph as an item, for operations that put it into a list.

    Returns:
      (items of the list that the operation returns, item that it takes out or length that it yields), each None if
      there is none.

    Raises:
      NotFollowed: the list is unknown, or its length or the index of the item depends on data.
    """

    def list_of(ref: Ref) -> Items:
        if ref not in lists:
            raise NotFollowed(f"the items of the list that {node.op} reads are unknown")
        return lists[ref]

    def number_of(ref: Ref) -> int:
        if ref not in numbers:
            raise NotFollowed(f"the index or length that {node.op} reads is not a known integer")
        return numbers[ref]

    def place(items: Items) -> int:
        at = number_of(node.inputs[1])
        if not 0 <= at < len(items):
            raise NotFollowed(f"{node.op} uses index {at}, which is outside of its list of {len(items)} items")
        return at

    op = node.op
    if op == "EmptyTensorList":
        return (), None
    if op == "TensorListReserve":
        return (ZEROS,) * number_of(node.inputs[1]), None
    if op == "TensorListFromTensor":
        shape = graph.find_type(node.inputs[0]).shape
        if not shape or shape[0] is None:
            raise NotFollowed(f"the length of the list that {op} creates is unknown")
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
    raise NotFollowed(f"WhaleLoop does not support {op}, an operation on lists of tensors")


def _add_lists(lists: Sequence[Items]) -> Items:
    """Adds TensorLists item by item, as AddN does for gradients; returns the items of the sum.

    Raises:
      NotFollowed: the lists have unequal lengths, or two of them have an item that is not zero at the same index.
    """
    if len({len(one) for one in lists}) != 1:
        raise NotFollowed("AddN adds lists of tensors of unequal lengths")
    found: list[Item] = []
    for items in zip(*lists):
        given = [item for item in items if item != ZEROS]
        if len(given) > 1:
            raise NotFollowed("AddN adds lists of tensors of which two have an item at the same index")
        found.append(given[0] if given else ZEROS)
    return tuple(found)


def makes_list(graph: Program, node: Node) -> bool:
    """Returns True if a node is an operation on TensorLists."""
    if node.op in LISTS:
        return True
    return (node.op in IDENTITIES or node.op in ("AddN", "ZerosLike")) and is_list(graph, node.inputs[0])


def follow_turns(name: str, body: Program, count: int, lists: Mapping[int, Items], numbers: Mapping[int, int]) -> Turns:
    """Follows the iterations of the loop ``name``.

    Args:
      count: number of iterations.
      lists, numbers: number of a loop variable -> its value before the first iteration, of variables that are known
        lists and integers.

    Raises:
      NotFollowed: the item that an iteration takes from a list depends on data, or was put there by another iteration.
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
    """Holds what is known of the tensors of a loop's body in one iteration.

    Attributes:
      name: name of the loop.
      number: number of the iteration.
      lists: tensors that are known TensorLists -> their items.
      numbers: tensors that are known integers -> their values.
      items: tensors that the iteration takes out of lists -> what they are.
    """

    name: str
    body: Program
    number: int
    lists: dict[Ref, Items]
    numbers: dict[Ref, int]
    items: dict[Ref, Item] = field(default_factory=dict)

    def follow(self, node: Node) -> bool:
        """Follows a node; returns True if it computes a known integer or operates on lists, and so is to be followed in
        the next iteration too.
        """
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
            raise NotFollowed("an iteration reads an item that another iteration has put into a list")
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
