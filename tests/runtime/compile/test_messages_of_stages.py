"""Stages send each other what the others wait for, whatever the ranks of each: the ranks' programs are read."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from tests.partition.talk import communication
from tests.programs import mlp
from whale.ir.mesh import Axis
from whale.partition.lower import lower_ranks, make_any_plan
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("groups", "mesh"),
    [
        (([0], [1]), {}),
        (([0, 1], [4, 2, 3]), {}),
        (([0, 1, 2], [3]), {}),
        (([], []), {"stage": 2, "data": 3}),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_message_has_a_sender_and_a_receiver(
    groups: tuple[list[int], ...], mesh: dict[str, int], micro_batches: int
) -> None:
    ranks = [f"(ranks={'+'.join(map(str, group))})" if group else "" for group in groups]
    program = mlp(12, 4, 6, 3)
    second = {n.name for n in program.nodes if n.name.startswith(("w2", "b2", "layer2", "bias2"))}
    nodes = (replace(n, scope=f"stage_{int(n.name in second)}{ranks[n.name in second]}") for n in program.nodes)
    size = prod(mesh.values()) if mesh else sum(map(len, groups))
    settings = PlanSettings(size, mesh=tuple(Axis(*axis) for axis in mesh.items()))
    settings = settings.but(time__micro_batches=micro_batches)
    program = normalise(program.replace_nodes(tuple(nodes)), settings)
    lowered = lower_ranks(program, make_any_plan(program, settings), settings, range(size))
    messages: dict[str, list[tuple[object, ...]]] = {"WhaleSend": [], "WhaleRecv": []}
    for rank, one in enumerate(lowered):
        for _, node in communication(one):
            if node.op in messages:
                peer = node.attrs["peer"]
                ends = (rank, peer) if node.op == "WhaleSend" else (peer, rank)
                messages[node.op].append((node.attrs["key"], *ends, node.attrs["T"]))
    sent, awaited = (sorted(map(str, found)) for found in messages.values())
    assert sent == awaited and len(set(sent)) == len(sent) >= 2
