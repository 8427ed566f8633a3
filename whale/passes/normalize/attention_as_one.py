"""Replaces attention by one operation whose queries, keys and values are sharded along the sequence, for ring
attention.

``WhaleAttention`` is the part of the program from queries, keys and values to the result; ``WhaleAttentionGrad`` is the
part from the result's gradient to the gradients of these three, which computes the scores again. Each keeps the nodes
it replaces as a function of the program, so that this pass need not know the scale, mask or cap between the products.
At run time keys and values are sent around the ring of ranks, and the softmax is accumulated block by block
(``whale.partition.ring_attention``).

``choose_for_rings`` says for which attentions this is better than an all-to-all; ``in_rings`` rewrites them.
``in_blocks_if_large`` uses the same rewrite on one rank, to save the memory of large scores.

Decision: 0079.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whale.ir.program import Node, Program, Ref, remove_unread, rewire
from whale.ir.values import Func, TensorType, require_static_shape
from whale.passes.analysis.attention import Attention, attentions, letters
from whale.passes.analysis.scopes import context_of
from whale.sharding_rules.nn.attention import ATTENTION, ATTENTION_GRADIENT, has_keys, has_queries


def in_rings(program: Program, chosen: Collection[str], scores_bytes: int = 0) -> Program:
    """Replaces the attentions named ``chosen`` by one operation forward and one backward each.

    Args:
      chosen: names of attentions, as ``choose_for_rings`` returns them; other names are ignored.
      scores_bytes: if the scores on a rank are larger, they are computed in blocks; 0: never.
    """
    named = [program.by_name[name] for name in chosen if name in program.by_name]
    # An attention has the name of a product or multiplication in it. Check that first: finding attentions takes long.
    is_one = any(n.op == "Mul" or letters(program, n) is not None for n in named)
    found = [one for one in attentions(program) if one.name in chosen] if is_one else []
    if not found:
        return program
    results = {(one.query, one.key, one.value): f"{one.mixed}/attention" for one in found if one.mixed}
    nodes = {n.name: n for n in program.nodes}
    moved: dict[Ref, Ref] = {}
    functions = dict(program.functions)
    for one in found:
        ahead = results[one.query, one.key, one.value]
        if one.mixed:
            nodes[ahead], functions[f"{ahead}/body"] = _forward(program, one, ahead, scores_bytes)
            moved[Ref(one.mixed)] = Ref(ahead)
        if one.backward is not None:
            back = one.backward
            name = f"{back.scores}/attention_grad"
            nodes[name], functions[f"{name}/body"] = _backward(program, one, ahead, name, scores_bytes)
            moved |= {Ref(n): Ref(name, i) for i, n in enumerate((back.query, back.key, back.value))}
    for ref in moved:
        del nodes[ref.node]
    inside = {n for one in found for n in (one.product, one.softmax, *one.path, *_inner(one))}
    return remove_unread(rewire(replace(program, functions=functions), nodes, moved), inside)


def in_blocks_if_large(program: Program, scores_bytes: int) -> Program:
    """Replaces attentions whose score matrix exceeds ``scores_bytes`` by one operation that computes it in blocks; with
    0, none.
    """
    if not scores_bytes or not any(n.op == "Softmax" and n.outputs[0].bytes > scores_bytes for n in program.nodes):
        return program
    large = [one.name for one in attentions(program) if program.by_name[one.softmax].outputs[0].bytes > scores_bytes]
    return in_rings(program, large, scores_bytes) if large else program


def choose_for_rings(program: Program, parts: int, limit_bytes: int) -> tuple[str, ...]:
    """Returns the names of attentions under scopes with ``context=`` for which a ring is better than an all-to-all.

    A ring moves (p-1)(K + V) bytes forward and twice that backward. An all-to-all from sequence to heads moves (p-1)/p
    of queries, keys, values and result, forward and backward, but needs a head for each rank, and stores the attention
    weights of all queries and keys of its heads. So the ring is chosen if it moves less, if there are too few heads, or
    if the attention weights would take more than half of a rank's memory.

    Args:
      parts: number of ranks, p.
      limit_bytes: the memory of a rank; 0 if unknown.
    """
    found = [one for one in attentions(program) if context_of(program.by_name[one.softmax].scope) is not None]
    held = sum(program.by_name[one.softmax].outputs[0].bytes for one in found if one.backward) // max(1, parts)
    tight = bool(limit_bytes) and held > limit_bytes // 2
    return tuple(one.name for one in found if _divides(program, one, parts) and (
        tight or not _has_heads(program, one, parts) or _moves_less(program, one, parts)))  # fmt: skip


def _divides(program: Program, one: Attention, parts: int) -> bool:
    return require_static_shape(program.by_name[one.softmax].outputs[0])[-1] >= parts


def _has_heads(program: Program, one: Attention, parts: int) -> bool:
    return any(size >= parts for size in require_static_shape(program.by_name[one.softmax].outputs[0])[1:-2])


def _moves_less(program: Program, one: Attention, parts: int) -> bool:
    query, key, value = (program.find_type(r).bytes for r in (one.query, one.key, one.value))
    return 3 * (key + value) * parts < 2 * (2 * query + key + value)


def _inner(one: Attention) -> tuple[str, ...]:
    return (
        (one.backward.slope, *one.backward.within, one.backward.scores, *one.backward.path)
        if one.backward is not None
        else ()
    )


def _attributes(
    program: Program, one: Attention, name: str, sides: tuple[Ref, ...], scores_bytes: int
) -> dict[str, object]:
    scores = require_static_shape(program.by_name[one.softmax].outputs[0])
    return {
        "body": Func(f"{name}/body"),
        "scores_bytes": scores_bytes,
        "softmax": one.softmax,
        "dims": one.dims,
        "turn": one.turn,
        "queried": tuple(has_queries(program.find_type(r).shape, scores) for r in sides),
        "keyed": tuple(has_keys(program.find_type(r).shape, scores) for r in sides),
    }


def _forward(program: Program, one: Attention, name: str, scores_bytes: int) -> tuple[Node, Program]:
    node = program.by_name[one.mixed]
    scores = program.by_name[one.softmax].outputs[0]
    each = TensorType(scores.dtype, (*require_static_shape(scores)[:-1], 1))
    operands = (one.query, one.key, one.value, *one.sides)
    inner = (one.product, *one.path, one.softmax, one.mixed)
    attrs = _attributes(program, one, name, one.sides, scores_bytes) | {"mixed": one.mixed}
    body = _body(program, f"{name}/body", operands, inner, (one.mixed,))
    return Node(name, ATTENTION, operands, (), attrs, (node.outputs[0], each), node.scope), body


def _backward(program: Program, one: Attention, ahead: str, name: str, scores_bytes: int) -> tuple[Node, Program]:
    back = one.backward
    assert back is not None
    gradients = (back.query, back.key, back.value)
    slope = program.by_name[back.slope]
    operands = (
        one.query, one.key, one.value, slope.inputs[back.of_result], Ref(ahead), Ref(ahead, 1), *back.sides,
    )  # fmt: skip
    inner = (one.product, *one.path, one.softmax, back.slope, *back.within, back.scores, *back.path, *gradients)
    attrs = _attributes(program, one, name, back.sides, scores_bytes)
    attrs |= {"slope": back.slope, "within": back.within, "scores": back.scores, "gradients": gradients}
    body = _body(program, f"{name}/body", (*operands[:4], *back.sides), inner, gradients)
    outputs = tuple(program.by_name[n].outputs[0] for n in gradients)
    scope = program.by_name[back.scores].scope
    marks = program.by_name[back.scores].marks
    return Node(name, ATTENTION_GRADIENT, operands, (), attrs, outputs, scope, False, marks), body


def _body(
    program: Program, name: str, operands: tuple[Ref, ...], inner: tuple[str, ...], results: tuple[str, ...]
) -> Program:
    """Creates a function from the nodes ``inner`` that an operation replaces, with the operation's operands as
    arguments.
    """
    arguments = {ref: f"operand_{i}" for i, ref in reversed(list(enumerate(operands)))}
    nodes = [Node(f"operand_{i}", "Placeholder", (), (), {}, (program.find_type(r),)) for i, r in enumerate(operands)]
    for n in dict.fromkeys(inner):
        node = program.by_name[n]
        inputs = tuple(r if r.node in inner else Ref(arguments.get(r, r.node), 0 if r in arguments else r.index)
                       for r in node.inputs)  # fmt: skip
        nodes.append(replace(node, inputs=inputs, controls=()))
    names = tuple(f"operand_{i}" for i in range(len(operands)))
    return Program(name, tuple(nodes), names, outputs=tuple(Ref(n) for n in results))
