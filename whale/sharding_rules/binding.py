"""Applies a rule line to one op: assigns the line's labels to the op's dimensions, and derives strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.errors import RuleError
from whale.ir.layout import B, Partial, Placement, RankZero, Shard, shard
from whale.ir.values import Dims, TensorType
from whale.sharding_rules.base import Strategy
from whale.sharding_rules.notation import Line, Passes, Term

# Dtypes of handles: the placement of a list is that of its elements, that of a variable's handle is that of its value.
HANDLES = ("variant", "resource")

_CORRECT = (
    "correct the rule line, or pass a function instead that writes the line for each op: "
    'rule("MatMul", matmul) where matmul(op) returns "m k+, k+ n -> m n"'
)

# The place of a label in a tensor: (dimension, product of the sizes inside the label in that dimension, product of the
# sizes outside it); None: the tensor lacks the label.
Place = tuple[int, int, int] | None
# A label along which a dimension can be cut, with the same two products.
Part = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Describes what sharding an op along one label does to its operands and outputs.

    Attributes:
      size: number of indices of the label; None: unknown.
      inputs: for each operand, the label's place (dimension, product of the sizes inside it, product of those outside
        it); None where the operand lacks the label.
      outputs: likewise for each output.
      grown: numbers of the outputs that become partial.
      unknown: numbers of the operands whose dimension has no static size. Such an operand must be sharded along this
        dimension already, as shards cannot be computed for an unknown size.
    """

    size: int | None
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    grown: frozenset[int]
    unknown: frozenset[int]


@dataclass(frozen=True, slots=True)
class Binding:
    """Represents a rule line bound to the types of one op: ``bind`` makes it, the functions ``list_..._strategies`` use
    it.

    Attributes:
      inputs: the line's term for each operand.
      outputs: the line's term for each output.
      cuts: label -> what sharding along it does; labels along which the op cannot be sharded are missing.
      input_dims: for each operand and dimension, the labels that can be sharded there, outermost first.
      output_dims: likewise for each output.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    cuts: dict[str, Cut]
    input_dims: tuple[tuple[tuple[Part, ...], ...], ...]
    output_dims: tuple[tuple[tuple[Part, ...], ...], ...]


def _repeat_variadic(line: Line, terms: tuple[Term, ...], count: int, what: str) -> tuple[Term, ...]:
    """Returns one term for each of ``count`` operands or outputs, with the variadic term, if any, repeated as often as
    needed.

    Args:
      terms: the terms of one side of the line.
      what: "operands" or "outputs", for the error.

    Raises:
      RuleError: there is no variadic term and the number differs, or there are too few operands or outputs.
    """
    at = next((i for i, t in enumerate(terms) if t.variadic), None)
    if at is None:
        if len(terms) != count:
            raise RuleError(f"a sharding rule does not fit its op: number of {what}", rule=line.text,
                            given=f"{count} {what}", expected=f"{len(terms)}, one for each term",
                            action=_CORRECT)  # fmt: skip
        return terms
    extra = count - (len(terms) - 1)
    if extra < 0:
        raise RuleError(f"a sharding rule does not fit its op: number of {what}", rule=line.text,
                        given=f"{count} {what}",
                        expected=f"at least {len(terms) - 1}, one for each term but that in braces",
                        action=_CORRECT)  # fmt: skip
    return terms[:at] + (terms[at],) * extra + terms[at + 1 :]


def _count_fixed(term: Term) -> int:
    return sum(not i.star for i in term.items)


def _run_lengths(line: Line, terms: Sequence[tuple[Term, int | None]]) -> tuple[dict[str, int], list[int | None]]:
    """Finds how many dimensions each run (``p*`` or ``*``) stands for, from the ranks of the tensors.

    Args:
      terms: (term, rank) of each operand and output; rank None: unknown.

    Returns:
      (name of a run -> its number of dimensions; for each term, the number of dimensions of its ``*``, None if unknown
        or if it has none).
    """
    runs: dict[str, int] = {}
    free: list[int | None] = [None] * len(terms)
    changed = True
    while changed:
        changed = False
        for k, (term, rank) in enumerate(terms):
            if term.kind != "dims" or rank is None:
                continue
            stars = [str(i.labels[0]) for i in term.items if i.star]
            open_stars = [s for s in stars if (s == "*" and free[k] is None) or (s != "*" and s not in runs)]
            used = _count_fixed(term) + sum((free[k] or 0) if s == "*" else runs.get(s, 0) for s in stars)
            if len(open_stars) == 1:
                length = rank - used
                if length < 0:
                    raise _make_misfit_error(line, k, rank, f"at least {used} dimensions")
                if open_stars[0] == "*":
                    free[k] = length
                else:
                    runs[open_stars[0]] = length
                changed = True
            elif not open_stars and used != rank:
                raise _make_misfit_error(line, k, rank, f"{used} dimensions")
    return runs, free


def _make_misfit_error(line: Line, k: int, rank: int, expected: str) -> RuleError:
    n = len(line.inputs)
    return RuleError("a sharding rule does not fit its op: number of dimensions of a tensor", rule=line.text,
                     tensor=f"term {k}, from 0 on ({n} terms of operands, then those of outputs)",
                     given=f"{rank} dimensions", expected=f"{expected}, as the term has", action=_CORRECT)  # fmt: skip


def _label_dims(term: Term, runs: dict[str, int], free: int | None) -> list[tuple[str | int, ...]] | None:
    """Returns the labels of each dimension of a term, outermost first; None if the length of a run is unknown."""
    dims: list[tuple[str | int, ...]] = []
    for item in term.items:
        if not item.star:
            dims.append(item.labels)
        elif item.labels == ("*",):
            if free is None:
                return None
            dims.extend((f"*{n - free}",) for n in range(free))
        else:
            name = str(item.labels[0])
            if name not in runs:
                return None
            dims.extend((f"{name}*{n}",) for n in range(runs[name]))
    return dims


def _find_flag(line: Line, label: str) -> str:
    name = label.split("*")[0]
    return line.flags[f"{name}*" if "*" in label else name]


def bind(line: Line, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], hint: int | None) -> Binding:
    """Binds ``line`` to an op with these operand and output types.

    Args:
      hint: rank of the elements of lists (dtype variant), for lists whose term has a run of unknown length; None:
        unknown.

    Raises:
      RuleError: the line does not fit the number or rank of the tensors, or the size of a dimension.
    """
    interms = _repeat_variadic(line, line.inputs, len(inputs), "operands")
    outterms = _repeat_variadic(line, line.outputs, len(outputs), "outputs")
    terms, types = interms + outterms, inputs + outputs
    ranked = [(t, None if y.dtype in HANDLES or y.shape is None else len(y.shape)) for t, y in zip(terms, types)]
    runs, free = _run_lengths(line, ranked)
    if hint is not None:
        variants = [
            (t, hint) if y.dtype == "variant" and _list_named(t) else r for t, y, r in zip(terms, types, ranked)
        ]
        if variants != ranked and any(x not in runs for t in terms for x in _list_named(t)):
            runs, free = _run_lengths(line, variants)
    named = [_label_dims(t, runs, f) if t.kind == "dims" else [] for t, f in zip(terms, free)]
    if any(n is None for n in named):
        blocked = True  # some tensor has an unknown rank: nothing can be cut safely
        named = [n or [] for n in named]
    else:
        blocked = False
    shapes = [None if y.dtype in HANDLES else y.shape for y in types]
    sizes = _find_sizes(line, named, shapes)
    dims = [_find_parts(labels or [], shape, sizes) for labels, shape in zip(named, shapes)]
    n = len(inputs)
    lists = frozenset(i for i, y in enumerate(inputs) if y.dtype in HANDLES)
    cuts = {} if blocked else _find_cuts(line, named, dims, shapes, sizes, outterms, n, lists)
    keep = [tuple(tuple(part for part in parts if part[0] in cuts) for parts in row) for row in dims]
    return Binding(interms, outterms, cuts, tuple(keep[:n]), tuple(keep[n:]))


def _list_named(term: Term) -> list[str]:
    return [str(i.labels[0]) for i in term.items if i.star and i.labels != ("*",)]


def _find_sizes(line: Line, named: list, shapes: list[Dims | None]) -> dict[str, int]:
    """Returns the size of each label, where some dimension tells it.

    A compound dimension tells the size of a label if it is the only unknown one in it.
    """
    sizes: dict[str, int] = {}
    compounds = []
    for labels, shape in zip(named, shapes):
        if shape is None:
            continue
        for at, names in enumerate(labels):
            size = shape[at]
            if not names or size is None:
                continue
            if len(names) > 1:
                compounds.append((names, size))
                continue
            label = names[0]
            known = sizes.get(label)
            if known is None or (known == 1 and label[0] == "*"):
                sizes[label] = size
            elif known != size and not (size == 1 and label[0] == "*"):
                raise RuleError("a sharding rule does not fit its op: sizes of dimensions", rule=line.text,
                                given=f"the label {label} has the sizes {known} and {size}",
                                expected="one size for all dimensions with the same label",
                                action=_CORRECT)  # fmt: skip
    for names, size in compounds:
        unknown = [x for x in names if isinstance(x, str) and x not in sizes]
        if len(unknown) == 1:
            rest = 1
            for x in names:
                rest *= x if isinstance(x, int) else sizes.get(x, 1)
            if rest and size % rest == 0:
                sizes[unknown[0]] = size // rest
    return sizes


def _find_parts(labels: list, shape: Dims | None, sizes: dict[str, int]) -> list[tuple[Part, ...]]:
    """Returns, for each dimension of a tensor, the labels by which it can be sharded, with their places in the
    dimension.

    Args:
      labels: the labels and sizes of each dimension, outermost first.
      shape: shape of the tensor; None: unknown.
      sizes: label -> its size, as far as known.

    Returns:
      (label, product of the sizes inside it, product of the sizes outside it) for each label of each dimension; for the
        dimension ``(2 n 4)`` it is ("n", 4, 2).
    """
    found: list[tuple[Part, ...]] = []
    for at, names in enumerate(labels):
        size = shape[at] if shape is not None else None
        counts = [x if isinstance(x, int) else sizes.get(x) for x in names]
        if len(names) == 1:
            label = str(names[0])
            broadcast = size == 1 and sizes.get(label, 1) != 1
            found.append(() if isinstance(names[0], int) or broadcast else ((label, 1, 1),))
            continue
        parts: list[Part] = []
        for k, label in enumerate(names):
            inner, outer = _multiply(counts[k + 1 :]), _multiply(counts[:k])
            if k == 0 and inner is None and size is not None and sizes.get(str(label)):
                inner = size // sizes[str(label)]
            if isinstance(label, str) and inner and outer:
                parts.append((label, inner, outer))
        found.append(tuple(parts))
    return found


def _multiply(counts: Sequence[int | None]) -> int | None:
    """Returns the product of ``counts``; None if one of them is unknown."""
    result = 1
    for count in counts:
        if count is None:
            return None
        result *= count
    return result


def _find_cuts(line: Line, named: list, dims: list, shapes: list, sizes: dict[str, int], outterms: tuple[Term, ...],
          n: int, lists: frozenset[int]) -> dict[str, Cut]:  # fmt: skip
    order = dict.fromkeys(part[0] for row in dims for parts in row for part in parts)
    cuts: dict[str, Cut] = {}
    for label in order:
        flag = _find_flag(line, label)
        if flag == "^":
            continue
        places: list[Place] = [
            next(((at, *part[1:]) for at, parts in enumerate(row) for part in parts if part[0] == label), None)
            for row in dims
        ]
        lost = [j for j, row in enumerate(named) if any(label in names for names in row) and not places[j]
                and not (label[0] == "*" and j < n)]  # fmt: skip
        if lost:
            continue  # the label is in a compound dimension whose inner size is unknown
        grown = frozenset(j for j, term in enumerate(outterms) if places[n + j] is None and not term.same)
        if grown and flag != "+":
            continue  # an output lacks this dimension of a run, and the label has no flag ``+``
        unknown = frozenset(
            i
            for i, (place, shape) in enumerate(zip(places[:n], shapes))
            if place is not None and i not in lists and (shape is None or shape[place[0]] is None)
        )
        cuts[label] = Cut(sizes.get(label), tuple(places[:n]), tuple(places[n:]), grown, unknown)
    return cuts


def _find_units(
    pl: Shard, row: tuple[tuple[Part, ...], ...], cuts: dict[str, Cut]
) -> tuple[str, tuple[int, ...], int] | None:
    """Returns by which label of the rule the placement ``pl`` shards a tensor.

    Args:
      pl: a placement of the tensor.
      row: for each dimension of the tensor, the labels that can be sharded there.
      cuts: label -> what sharding along it does.

    Returns:
      (label, number of the label's indices on each coordinate, number of runs); None if the shards do not consist of
        whole indices of one label.
    """
    for label, inner, outer in row[pl.dim] if pl.dim < len(row) else ():
        if pl.blocks % outer or (inner != 1 and any(s % inner for s in pl.sizes)):
            continue
        units = pl.sizes if inner == 1 else tuple(s // inner for s in pl.sizes)
        blocks = pl.blocks // outer
        size = cuts[label].size
        if (size is None and blocks == 1) or size == pl.run // inner * blocks:
            return label, units, blocks
    return None


def list_cut_strategies(binding: Binding, current: Sequence[Placement], wanted: Sequence[Placement | None], reduce: str,
                   why: str) -> list[Strategy]:  # fmt: skip
    """Returns the strategies that shard the op along one label each.

    There is one for each distinct way in which an operand is sharded now, or an output is wanted sharded.

    Args:
      current: present placements of the operands.
      wanted: preferred placements of the outputs.
      reduce: the reduction of outputs that become partial.
      why: the reason for the strategy, to which the label is added.
    """
    seeds: dict[tuple[str, tuple[int, ...], int], None] = {}
    for rows, placements in ((binding.input_dims, current), (binding.output_dims, wanted)):
        for row, pl in zip(rows, placements):
            if isinstance(pl, Shard):
                seed = _find_units(pl, row, binding.cuts)
                if seed is not None:
                    seeds[seed] = None
    found: list[Strategy] = []
    for label, units, blocks in seeds:
        cut = binding.cuts[label]
        if 0 in units and any(t.same and t.kind == "dims" for t in binding.outputs):
            continue  # a coordinate with an empty shard would have to run the kernel for a replicated output
        placed = [_place_label(p, units, blocks) for p in cut.inputs]
        if any(not isinstance(current[i], Shard) or current[i].dim != placed[i].dim for i in cut.unknown):  # type: ignore[union-attr]
            continue
        for i, term in enumerate(binding.inputs):
            if placed[i] is B:
                placed[i] = _place_rest(term, current[i])
        outs = tuple(
            Partial(reduce) if j in cut.grown else _place_label(p, units, blocks) for j, p in enumerate(cut.outputs)
        )
        found.append(Strategy(tuple(placed), outs, f"{why}: {label} split"))
    return found


def _place_label(place: Place, units: tuple[int, ...], blocks: int) -> Placement:
    if place is None:
        return B
    dim, inner, outer = place
    return shard(dim, units if inner == 1 else tuple(u * inner for u in units), blocks * outer)


def list_partial_strategies(binding: Binding, passes: Sequence[Passes], current: Sequence[Placement],
                       wanted: Sequence[Placement | None], why: str) -> list[Strategy]:  # fmt: skip
    """Returns the strategies in which partial operands pass through the op to partial outputs.

    A strategy is listed if one of the operands that ``passes`` names is partial now, or an output is wanted partial.

    Args:
      passes: the sets of operands that may be partial together.
    """
    found: list[Strategy] = []
    n = len(binding.inputs)
    for one in passes:
        operands = range(n) if one.operands is None else one.operands
        partial = Partial(one.op)
        if not any(i < n and current[i] == partial for i in operands) and not any(w == partial for w in wanted):
            continue
        if any(i >= n for i in operands):
            continue
        inputs = tuple(partial if i in operands else _place_rest(t, current[i]) for i, t in enumerate(binding.inputs))
        some = one.outputs
        outputs = tuple(
            partial if (j in some if some is not None else not t.same) else B for j, t in enumerate(binding.outputs)
        )
        found.append(Strategy(inputs, outputs, f"{why}: P({one.op}) passes"))
    return found


def _place_rest(term: Term, current: Placement) -> Placement:
    if isinstance(current, RankZero):
        return B
    return current if term.kind == "any" or (term.unread and isinstance(current, Partial)) else B


def find_whole_strategy(binding: Binding, current: Sequence[Placement], why: str) -> Strategy | None:
    """Returns the strategy that shards nothing, and takes operands as they lie where the rule does not care how they
    lie.

    Those are operands with the term ``?``, and partial operands with the term ``~``. All others are replicated. The
    result is None if it would be the plain replicated strategy.
    """
    inputs = tuple(_place_rest(t, pl) for t, pl in zip(binding.inputs, current))
    if all(pl is B for pl in inputs):
        return None
    follow = [inputs[j] if t.kind == "any" else B for j, t in enumerate(binding.outputs)]
    return Strategy(inputs, tuple(follow), f"{why}: lies in any way")
