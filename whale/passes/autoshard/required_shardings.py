"""Imposes shardings that must not depend on cost: weights are sharded, their readers take them sharded, and products
are divided where possible.
"""

from __future__ import annotations

from functools import partial

from whale.errors import PlanError
from whale.ir.layout import B, Shard
from whale.ir.ops import HAS_BODIES, LOOKUPS, ROW_LOOKUPS
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.analysis.scopes import context_of, ranks_of_scope, split_scope
from whale.passes.autoshard.candidates import Candidates
from whale.passes.autoshard.region import SplitRegion
from whale.passes.autoshard.sequence import is_along, nothing_along
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view
from whale.sharding_rules.nn.attention import RINGS


def require_shardings(region: SplitRegion, candidates: Candidates) -> None:
    """Removes candidates that replicate weights or products; if a scope names a dimension (``dim=``), also those that
    split a result along another one.

    Raises:
      PlanError: nothing under a scope can be divided, or not along the dimension that the scope names.
    """
    divided: dict[str, bool] = {}
    first: set[str] = set()
    whole = {handle for name, uses in region.weights.items() if region.cut_of_image(name) for _, handle in uses}
    # Weights that meet in one product of weights, such as A and B in W + A B: one of the operands has to be sharded,
    # the smaller one may be replicated.
    factors = {h for uses in region.weights.values() if len({i for i, _ in uses}) > 1 for _, h in uses}
    for handle in whole:
        candidates.keep(handle, lambda o: o.outputs[0] == B)
    for name, uses in region.weights.items():
        node = region.nodes[name]
        scope = split_scope(node.scope)
        assert scope is not None
        divided.setdefault(scope[0], False)
        if region.cut_of_image(name) is not None:
            _along(region, candidates, node, uses[0][1], scope[1] or 0)
            divided[scope[0]] = True
            continue
        for i, handle in uses:
            if handle in whole:
                continue
            if handle in factors:
                split_somehow = candidates.keep(name, lambda o: any(isinstance(p, Shard) for p in o.inputs))
                divided[scope[0]] |= split_somehow
                continue
            taken = candidates.keep(name, lambda o, i=i: isinstance(o.inputs[i], Shard))  # type: ignore[misc]
            if handle not in first and scope[1] is not None and node.op not in ROW_LOOKUPS:
                _along(region, candidates, node, handle, scope[1])
                read = {o.inputs[i] for o in candidates.options[name].values()}
                if region.program.find_type(node.inputs[i]).shape == region.handles[handle].type.shape:
                    candidates.keep(handle, lambda o, read=read: o.outputs[0] in read)  # type: ignore[misc]
            if scope[1] == 0 and node.op == "ResourceGather":
                # dim=0 shards a table by rows: ranks exchange the rows of their ids.
                rule, op = find_rule(node.op), make_op_view(region.program, node, region.parts)
                assert rule is not None, node
                candidates.keep(name, partial(rule.is_exchanging_rows, op))
            first.add(handle)
            if not taken:
                continue
            divided[scope[0]] = True
            candidates.keep(handle, lambda o: isinstance(o.outputs[0], Shard))
    _along_context(region, candidates)
    for name, node in region.nodes.items():
        if region.flops(node) or node.op in RINGS:
            candidates.keep(name, lambda o: any(isinstance(p, Shard) for p in o.inputs + o.outputs))
    for path, something in divided.items():
        if not something and not _reads_variables(region, path):
            raise _make_nothing_error(region, path)
    # A scope around a loss alone has no weights, nor has a program that only initialises variables; but a program
    # with a sharded batch must have some under a split scope. Products that read variables are accepted all the same:
    # something else, such as a branch that updates the variables, keeps these replicated.
    batch = any(isinstance(p, Shard) for p in region.outside.produced.values())
    if not divided and not region.layers and batch and not _reads_variables(region):
        raise _make_nothing_error(region, next(iter(region.nodes.values())).scope if region.nodes else "wh.split")


def _reads_variables(region: SplitRegion, scope: str = "") -> bool:
    """Returns True if a product reads a variable, of those that the scopes do not decide about if ``scope`` is given:
    then a product of this scope.
    """
    by_name = region.program.by_name
    products = (n for n in region.nodes.values() if region.flops(n) and scope in ("", n.scope))
    reads = (by_name[ref.node] for node in products for ref in node.inputs)
    others = (read for read in reads if read.op == "ReadVariableOp")
    return any(not scope or read.inputs[0].node not in region.handles for read in others)


def _along_context(region: SplitRegion, candidates: Candidates) -> None:
    """Keeps, under scopes with ``context=``, only candidates that shard the results of products along the sequence and
    replicate the weights.
    """
    split_elsewhere = {handle for uses in region.weights.values() for _, handle in uses}
    lengths = list(dict.fromkeys(region.context.values()))
    found = False
    for name, at in region.layers.items():
        shape = region.nodes[name].outputs[0].shape or ()
        found |= candidates.keep(
            name,
            lambda o, s=shape, at=at: is_along(o.outputs[0], s, at, lengths),  # type: ignore[misc]
        )
    for handle in region.handles if region.layers else ():
        readers = [n for n, _ in region.program.consumers.get(Ref(handle), ())]
        whole = any(context_of(n.scope) is not None for n in readers) and handle not in split_elsewhere
        if whole and handle not in region.known:
            candidates.keep(handle, lambda o: o.outputs[0] == B)
    if region.layers and not found:
        raise nothing_along(region.program, region.layers)


def _along(region: SplitRegion, candidates: Candidates, node: Node, handle: str, dim: int) -> None:
    shape = node.outputs[0].shape or ()
    at = dim + len(shape) if dim < 0 else dim
    if candidates.keep(node.name, lambda o: isinstance(o.outputs[0], Shard) and o.outputs[0].dim == at):
        return
    size = shape[at] if 0 <= at < len(shape) else None
    parts = len(region.group[node.name])
    works = sorted(
        {o.outputs[0].dim for o in candidates.options[node.name].values() if isinstance(o.outputs[0], Shard)}
    )
    raise PlanError(
        "a result cannot be split along the dimension that wh.split names",
        op=f"{node.name} ({node.op}), which reads {region.handles[handle].name}",
        given=f"dim={dim} of {list(shape)}" + (f", of size {size} over {parts} ranks" if size else ""),
        expected=f"a dimension of size {parts} or more" if size and size < parts else f"one of dimensions {works}",
        action="name another dimension in wh.split(dim=..), leave `dim` out, or use fewer ranks",
    )


def _list_bodies_with_products(region: SplitRegion, scope: str) -> list[str]:
    """Returns the branches and loops under a scope in whose bodies matrix products or lookups stand, as text."""
    functions = region.program.functions

    def has_product(body: Program) -> bool:
        return any(
            n.op in LOOKUPS
            or count_matmul_flops(n, [body.find_type(r) for r in n.inputs])
            or any(has_product(functions[f.name]) for _, f in iterate_function_refs(n) if f.name in functions)
            for n in body.nodes
        )

    return [
        f"{n.name} ({n.op})"
        for n in region.program.nodes
        if n.op in HAS_BODIES
        and split_scope(n.scope)
        and (n.scope == scope or not region.nodes)
        and any(has_product(functions[f.name]) for _, f in iterate_function_refs(n) if f.name in functions)
    ]


def _make_nothing_error(region: SplitRegion, scope: str) -> PlanError:
    parts = len(ranks_of_scope(scope) or range(region.parts))
    ranks = f"over {parts} ranks"
    rows: dict[str, str] = {}
    held_whole = True
    for name, uses in region.weights.items():
        for weight in (region.handles[handle] for _, handle in uses):
            if region.nodes[name].scope == scope:
                said = f"{name} reads {weight.name} {list(weight.type.shape or ())} {ranks}"
                rows.setdefault(weight.name, said)
                held_whole &= region.known.get(weight.node) == B
    inside = [] if rows else _list_bodies_with_products(region, scope)
    if inside:
        return PlanError(
            "nothing under a split scope can be divided",
            op=scope,
            given=f"{', '.join(inside[:4])}: products are in the bodies of branches and loops, where weights are whole",
            expected="a dense, convolution, attention or embedding layer outside of tf.cond and tf.while_loop",
            action="call the layer in front of the branch or loop, under `with wh.split():`, or remove the scope",
        )
    if not rows:
        return PlanError(
            "nothing under a split scope can be divided",
            op=scope,
            given="no product or lookup that reads a variable",
            expected="a dense, convolution, attention or embedding layer called under `with wh.split():`",
            action="enter the scope where such a layer is called (not only where it is created), or remove the scope",
        )
    if held_whole:
        return PlanError(
            "nothing under a split scope can be divided, since an earlier step of the run uses the weights whole",
            given="; ".join(list(rows.values())[:4]),
            expected="the same wh.split scope in every step that uses the weights",
            action="enter the scope in the earlier step too, or call this step before it",
        )
    return PlanError(
        "nothing under a split scope can be divided",
        given="; ".join(list(rows.values())[:4]),
        expected=f"weights with a dimension of size {parts} or more",
        action="use fewer ranks or larger layers, or remove the wh.split scope",
    )
