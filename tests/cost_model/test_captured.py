"""Captured programs: live memory, executor threads, exchanges, measured tables; without TensorFlow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cost_model.cluster import cluster_file
from cost_model.graph.cpu_sharing import Clock, Host, Thread
from cost_model.graph.executor_graph import graph_of
from cost_model.graph.liveness import Allocator, peak_bytes
from cost_model.graph.machine import Link, Rates, cluster_machine, make_measured_machine, make_rated_machine
from cost_model.graph.machine_profile import (
    Copies,
    Curve,
    Gpu,
    MachineProfile,
    Operation,
    Step,
    check_writable,
    read,
    write,
)
from cost_model.graph.predict import find_simulated, predict_ranks
from cost_model.graph.signature import signature
from cost_model.graph.traffic import Exchange
from cost_model.kernels.op_work import estimate_work
from tests.programs import Builder, mlp, planned
from whale.errors import ClusterError, PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.program import Program
from whale.ir.values import TensorType
from whale.partition.spmd import partition_for_rank

KIND = "all_reduce all_gather reduce_scatter all_to_all broadcast point_to_point"
TABLE = MachineProfile(
    "lab", 2.0, 16.0, 1e-4, 1e-6, 4e-3, 1e-4,
    [Operation("?", "AddV2", 1e6, 12e6, 1e-3), Operation("??", "MatMul", 1e9, 6e6, 0.02)],
    [Curve(kind, 2, [(1e3, 2e-5), (1e6, 1e-3)]) for kind in KIND.split()],
)  # fmt: skip
LAB = cluster_file.parse(
    "name: lab\nnetworks: {f: {type: infiniband-hdr-200}}\n"
    "hosts: [{name: a, count: 2, devices: [{type: a100, count: 2}], networks: {f: {nics: 2}}}]"
)


def ranks_of(program: Program, *sizes: int) -> list[Program]:
    plan = planned(program, *sizes)
    return [partition_for_rank(program, plan, rank, "", None) for rank in range(len(sizes))]


def in_order(program: Program) -> tuple[int, int]:
    """(peak, resident) when one node runs after the other."""
    g = graph_of(program, 0, 1)
    order = [event for i in range(len(g.nodes)) for event in (i, ~i)]
    return peak_bytes(g, [order], [0] * len(g.nodes))[:2]


def chain(*ops: str, branch: bool = False) -> Program:
    """Unary ops one after the other on 1 MiB; with `branch` every result is read again at the end."""
    b = Builder("chain", "float32")
    x = b.input("x", (512, 512))
    made = [x]
    for op in ops:
        made.append(b.op(op, made[-1]))
    last = b.node("AddN", made[1:], [b.types[x]], N=len(ops)) if branch else made[-1]
    return b.build([b.reduce("Sum", last, 0, 1)])


MIB = 1 << 20


def test_pointwise_results_take_their_operands_place_unless_somebody_reads_it() -> None:
    for count in (1, 4):
        peak, resident = in_order(chain(*["Exp"] * count))
        assert MIB <= peak - resident < 1.01 * MIB  # one buffer, however long the chain
    peak, resident = in_order(chain(*["Exp"] * 4, branch=True))
    assert 4 * MIB <= peak - resident < 4.01 * MIB
    peak, resident = in_order(chain("Identity", "Identity"))
    assert peak - resident < 0.01 * MIB


def test_a_variable_that_is_still_read_is_copied_before_it_changes() -> None:
    def program(late: bool) -> Program:
        b = Builder("update", "float32")
        handle = b.variable("w", (512, 512))
        value = b.read(handle, name="read")
        change = b.op("Exp", value, name="change")
        update = b.update("AssignAddVariableOp", handle, change, controls=["read"], name="update")
        total = replace(b.types[value], shape=())
        controls = [update] if late else []
        after = b.node("Sum", [value, b.ints(0, 1)], [total], controls=controls, keep_dims=False)
        return b.build([after], [update])

    (late, resident), (early, same) = in_order(program(True)), in_order(program(False))
    assert resident == same == MIB
    assert late - resident == 2 * MIB  # the change, and the copy
    assert early - resident == 2 * MIB or early - resident == MIB


@pytest.mark.parametrize("op", ["ResourceApplyRMSProp", "ResourceApplyFtrl", "ResourceApplyAdamWithAmsgrad"])
def test_whatever_updates_a_variable_copies_it_where_it_is_still_read(op: str) -> None:
    def program(late: bool) -> Program:
        b = Builder("update", "float32")
        states = [b.variable(name, (512, 512)) for name in ("w", "m", "v")]
        values = [b.read(handle, name=f"read_{handle.node}") for handle in states]
        controls = [f"read_{handle.node}" for handle in states]
        gradient = b.const(np.ones((512, 512), np.float32))
        if late:
            b.update(op, *states, b.const(0.1), gradient, controls=controls, name="update")
        sums = [b.reduce("Sum", value, 0, 1) for value in values]
        if not late:
            b.update(op, *states, b.const(0.1), gradient, controls=[s.node for s in sums], name="update")
        return b.build(sums, ["update"])

    (late, resident), (early, same) = in_order(program(True)), in_order(program(False))
    assert resident == same == 3 * MIB
    assert late - early == pytest.approx(3 * MIB, abs=100), "the variable and its two slots"


def test_a_variable_whose_rows_change_is_copied_by_every_read_and_changed_in_place() -> None:
    b = Builder("rows", "float32")
    handle = b.variable("w", (512, 512))
    first, second = b.read(handle, name="first"), b.read(handle, name="second")
    unused = b.read(handle, name="unused")
    total = replace(b.types[first], shape=())
    sums = [b.node("Sum", [x, b.ints(0, 1)], [total], keep_dims=False) for x in (first, second)]
    controls = ["first", "second", unused.node]
    row = b.const(np.ones((1, 512), np.float32))
    change = b.update("ResourceScatterSub", handle, b.ints(0), row, controls=controls)
    program = b.build(sums, [change])
    g = graph_of(program, 0, 1)
    place = {node.name: i for i, node in enumerate(g.nodes)}
    assert [g.work[place[name]].moved_bytes for name in ("first", "second", "unused")] == [2 * MIB, 2 * MIB, 0]
    peak, resident = in_order(program)
    assert resident == MIB and 2 * MIB <= peak - resident < 2.1 * MIB


def test_memory_grows_with_the_batch() -> None:
    peaks = [in_order(mlp(rows, 256, 512, 128))[0] for rows in (64, 128, 256, 512)]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_the_allocator_gives_whole_what_is_less_than_twice_as_large() -> None:
    allocator = Allocator()
    first = allocator.take(3 * MIB)  # of a region of 4 MiB
    assert allocator.live_bytes == 4 * MIB and allocator.peak_asked_bytes == 3 * MIB
    second = allocator.take(MIB)
    allocator.give(first)
    third = allocator.take(MIB)
    assert allocator.live_bytes == 2 * MIB
    for piece in (second, third):
        allocator.give(piece)
    assert allocator.live_bytes == 0 and allocator.peak_bytes == 5 * MIB
    assert allocator.peak_asked_bytes == 4 * MIB
    allocator.forget_peak()
    assert allocator.peak_asked_bytes == allocator.peak_bytes == 0


def test_ranks_of_a_host_have_pieces_as_large_as_what_they_ask_for() -> None:
    allocator = Allocator(whole_blocks=False)
    first = allocator.take(3 * MIB)
    assert allocator.live_bytes == 3 * MIB
    allocator.give(first)
    allocator.take(2 * MIB)
    assert allocator.live_bytes == 2 * MIB and allocator.peak_bytes == allocator.peak_asked_bytes == 3 * MIB
    assert not make_measured_machine(TABLE, 2).whole_blocks and make_measured_machine(TABLE, 1).whole_blocks


def test_random_pieces_never_overlap_and_all_come_back() -> None:
    generator = np.random.default_rng(3)
    allocator, held = Allocator(), {}
    for _ in range(3000):
        if held and generator.random() < 0.5:
            piece = list(held)[generator.integers(len(held))]
            allocator.give(piece)
            asked = held.pop(piece)
        else:
            asked = int(generator.integers(1, 40)) << 16
            held[allocator.take(asked)] = asked
        assert sum(held.values()) <= allocator.live_bytes < 2 * sum(held.values()) + (128 << 20)
    for piece in held:
        allocator.give(piece)
    assert allocator.live_bytes == 0


def test_one_rank_does_not_communicate_and_two_take_turns_on_one_core() -> None:
    program = mlp(512, 256, 512, 128)
    alone = predict_ranks(ranks_of(program, 512), make_measured_machine(TABLE, 1))
    assert alone.logical_bytes == (0,) and alone.ranks[0].exchange_s == 0
    both = ranks_of(program, 256, 256)
    two_cores = predict_ranks(both, make_measured_machine(TABLE, 2))
    crowded = predict_ranks(both, make_measured_machine(msgspec.structs.replace(TABLE, cores=1.0), 2))
    assert 1.5 * two_cores.step_s < crowded.step_s
    assert sum(two_cores.logical_bytes) == planned(program, 256, 256).logical_bytes > 0


def test_the_slow_share_ends_last() -> None:
    program = mlp(512, 256, 512, 128)
    even = predict_ranks(ranks_of(program, 256, 256), make_measured_machine(TABLE, 2))
    uneven = predict_ranks(ranks_of(program, 448, 64), make_measured_machine(TABLE, 2))
    assert even.step_s < uneven.step_s
    assert uneven.ranks[0].compute_s > 2 * uneven.ranks[1].compute_s
    assert uneven.ranks[0].peak_bytes > uneven.ranks[1].peak_bytes


def test_catalogued_devices_and_faster_links() -> None:
    programs = ranks_of(mlp(512, 256, 512, 128), 128, 128, 128, 128)
    machine = cluster_machine(LAB)
    found = predict_ranks(programs, machine)
    faster = replace(machine, exchange_s=lambda e: machine.exchange_s(e) / 2)
    assert 0 < predict_ranks(programs, faster).step_s <= found.step_s
    with pytest.raises(ClusterError, match="more ranks than the cluster has devices"):
        predict_ranks(ranks_of(mlp(512), *[64] * 8), machine)


def test_one_of_equal_ranks_stands_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ranks that share no cores, and exchange with all, are simulated once."""
    programs, machine = ranks_of(mlp(512, 256, 512, 128), 128, 128, 128, 128), cluster_machine(LAB)
    stands_for = find_simulated(programs, machine)
    assert len(set(stands_for)) < 4
    found = predict_ranks(programs, machine, with_timelines=True)
    monkeypatch.setattr("cost_model.graph.predict.find_simulated", lambda programs, machine: list(range(4)))
    assert found == predict_ranks(programs, machine, with_timelines=True)
    assert find_simulated(programs, make_measured_machine(TABLE, 4)) == list(range(4))  # of one host's cores
    uneven = ranks_of(mlp(512, 256, 512, 128), 200, 56, 200, 56)
    assert find_simulated(uneven, machine)[1] == 1


def test_a_measured_operation_is_found_by_its_signature_and_scaled_otherwise() -> None:
    program = mlp(512, 256, 512, 128)
    node = program.by_name["layer1"]
    types = [program.find_type(r) for r in node.inputs]
    known = make_measured_machine(TABLE.merge([Operation(signature(program, node), "MatMul", 1.0, 1.0, 0.5, 77)]), 1)
    assert known.operations[0](program, node, estimate_work(node, types)) == (0.5, 77)
    near = make_measured_machine(TABLE, 1).operations[0](program, node, estimate_work(node, types))
    assert near[0] == pytest.approx(0.02 * estimate_work(node, types).flops / 1e9)
    mark = compute_fingerprint(program)
    # Measured whole: twice as fast as its operations alone; two copies side by side three times as slow.
    table = TABLE.merge([], [Step(mark, 0.25, 0.5), Step(mark, 1.5, 0.5, 2)])
    for ranks, factor in ((1, 0.5), (2, 3.0), (4, 3.0)):
        whole = make_measured_machine(table, ranks, ["another", mark])
        assert whole.operations[0](program, node, estimate_work(node, types))[0] == pytest.approx(factor * near[0])


@pytest.mark.parametrize("op", ["BatchMatMulV2", "WhaleEinsum"])
def test_products_that_were_not_measured_are_priced_as_those_that_were(op: str) -> None:
    b = Builder("p", "float32")
    x, y = b.input("x", (4, 64, 48)), b.input("y", (4, 48, 32))
    attrs = {"equation": "abc,acd->abd"} if op == "WhaleEinsum" else {"adj_x": False, "adj_y": False}
    made = b.node(op, (x, y), [TensorType("float32", (4, 64, 32))], "product", **attrs)
    program = b.build([made])
    node = program.by_name["product"]
    does = estimate_work(node, [program.find_type(r) for r in node.inputs])
    assert does.flops == 2 * 4 * 64 * 48 * 32
    assert make_measured_machine(TABLE, 1).operations[0](program, node, does)[0] == pytest.approx(
        0.02 * does.flops / 1e9
    )


def test_what_has_to_be_packed_is_an_exchange_of_its_own_kind() -> None:
    packed = msgspec.structs.replace(TABLE, curves=[*TABLE.curves, Curve("all_gather packed", 2, [(1e6, 3e-3)])])
    plain, slow = (Exchange("all_gather", "x", (0, 1), 10**6, 0, scratch) for scratch in ((), (10**6,)))
    machine = make_measured_machine(packed, 2)
    assert machine.exchange_s(plain) == pytest.approx(1e-3) and machine.exchange_s(slow) == pytest.approx(3e-3)
    assert make_measured_machine(TABLE, 2).exchange_s(slow) == pytest.approx(1e-3)  # not measured: taken to be alike


def test_exchanges_through_devices_have_prices_of_their_own_and_the_hosts_are_copied() -> None:
    """From GPU to GPU as it was measured there; through the host with copies there and back, whole or of parts."""
    fast = Curve("all_reduce", 2, [(1e6, 1e-4)], "nccl")
    cpu, gpu = "/device:CPU:0", "/device:GPU:0"
    copied = [Copies(gpu, cpu, [(0.0, 0.0), (1e6, 2e-3)]), Copies(cpu, gpu, [(0.0, 0.0), (1e6, 4e-3)])]
    gpus = msgspec.structs.replace(
        TABLE, curves=[*TABLE.curves, fast], gpus=[Gpu("A", 80), Gpu("B", 24)], copies=copied
    )
    machine = make_measured_machine(gpus, 3)

    def seconds(kind: str, through: str = "") -> float:
        return machine.exchange_s(Exchange(kind, "x", (0, 1), 10**6, 0, through=through))

    assert seconds("all_reduce", "nccl") == pytest.approx(1e-4)
    assert seconds("all_reduce") == pytest.approx(1e-3 + 2e-3 + 4e-3)
    assert seconds("all_gather") == pytest.approx(1e-3 + 1e-3 + 4e-3)
    assert seconds("reduce_scatter") == pytest.approx(1e-3 + 2e-3 + 2e-3)
    with pytest.raises(ClusterError, match=r"all_gather through nccl(.|\n)*WHALE_COMMUNICATION_BACKEND=nccl"):
        seconds("all_gather", "nccl")
    # Ranks take turns with the GPUs, and exchanges run beside them.
    assert list(machine.sharing.hosts) == [0, 1, 0] and not machine.sharing.exchanges_compute
    assert machine.memory_bytes == [40e9, 24e9, 40e9]


def test_rates_of_devices_price_what_devices_exchange() -> None:
    rate = Rates(1e9, 1e9, 0.0, 1.0, 1e6, "for the test", devices=Link(0.5, 1e9))
    machine = make_rated_machine([rate, rate])
    host, device = (Exchange("all_reduce", "x", (0, 1), 10**6, 10**6, through=by) for by in ("", "nccl"))
    assert machine.exchange_s(host) == pytest.approx(2.0) and machine.exchange_s(device) == pytest.approx(0.501)
    assert make_rated_machine([replace(rate, devices=None)] * 2).exchange_s(device) == pytest.approx(2.0)


def test_products_of_few_rows_take_what_their_weights_take_to_be_packed() -> None:
    program = mlp()
    product = next(node for node in program.nodes if node.op == "MatMul")
    work = estimate_work(product, [program.find_type(ref) for ref in product.inputs])
    computing_s, moving_s = work.flops / 1e9, work.moved_bytes / 2e9

    def seconds(packs: bool) -> float:
        rate = Rates(1e9, 2e9, 1e-6, 0.0, 1.0, "for the test", packs=packs)
        return make_rated_machine([rate]).operations[0](program, product, work)[0]

    assert seconds(False) == pytest.approx(1e-6 + max(computing_s, moving_s))
    assert seconds(True) == pytest.approx(1e-6 + computing_s + 2 * moving_s)


def test_the_file_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    write(TABLE, path)
    assert read(path) == TABLE
    with pytest.raises(ClusterError, match=r"cannot be read(.|\n)*whale profile"):
        read(tmp_path / "none.json")
    broken = json.loads(path.read_text())
    broken["cores"] = -1
    path.write_text(json.dumps(broken))
    with pytest.raises(ClusterError, match=r"not one that(.|\n)*\$.cores"):
        read(path)
    path.write_text(json.dumps({**broken, "cores": 2.0, "version": 9}))
    with pytest.raises(ClusterError, match="another version"):
        read(path)
    with pytest.raises(ClusterError, match=r"cannot be written there(.|\n)*below.json"):
        check_writable(path / "below.json")
    check_writable(tmp_path / "other" / "profile.json")
    assert not (tmp_path / "other" / "profile.json").exists()


def test_loops_are_refused() -> None:
    b = Builder("looped", "float32")
    x = b.input("x", (4,))
    state = b.node("StatelessWhile", [x], [b.types[x]])
    with pytest.raises(PlanError, match="cannot predict the time and memory of this loop"):
        graph_of(b.build([state]), 0, 1)


def ends(cores: float, jobs: list[tuple[float, float, bool]]) -> list[float]:
    """When jobs end; each is (when it comes, seconds, urgent), on a thread of its own, in slices of one second."""
    clock = Clock()
    host = Host(clock, cores, 1.0)
    found = [0.0] * len(jobs)

    def thread(number: int, seconds: float, urgent: bool) -> Thread:
        left = [(seconds, lambda: found.__setitem__(number, clock.now_s))]
        return Thread(lambda: left.pop() if left else None, urgent)

    for number, (at, seconds, urgent) in enumerate(jobs):
        made = thread(number, seconds, urgent)
        clock.schedule(at, lambda made=made: host.wake(made))
    clock.play()
    return found


def test_threads_share_cores_in_slices() -> None:
    assert ends(2, [(0, 3, False), (0, 3, False)]) == [3, 3]
    assert ends(1, [(0, 2, False), (0, 2, False)]) == [3, 4]
    # What wakes up waits for the end of the running slice, and runs to its own end; an urgent thread does not wait.
    assert ends(1, [(0, 3, False), (0.25, 0.5, False)]) == [3.5, 1.5]
    assert ends(1, [(0, 3, False), (0.25, 0.5, True)]) == [3.5, 0.75]
    assert ends(0.5, [(0, 3, False)]) == [6]
    generator = np.random.default_rng(0)
    for _ in range(20):
        jobs = [
            (float(generator.random()), float(generator.random() * 4), bool(generator.random() < 0.3)) for _ in range(7)
        ]
        found = ends(2, jobs)
        assert max(found) >= max(sum(one[1] for one in jobs) / 2, max(at + length for at, length, _ in jobs)) - 1e-9
        assert max(found) <= 1 + sum(one[1] for one in jobs)
