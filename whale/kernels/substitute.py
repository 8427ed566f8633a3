"""Rewrites ranks' programs: replaces operations by faster ones, and adds what only a run needs.

REWRITE             the passes over the ranks' programs, after PARTITION
substitute_kernels  runs the passes that change computation or memory, for runs and for predictions
list_substitutions  lists what they would replace, so that it can be measured
prepare_for_run     runs the others: unique keys of communication ops, XLA compilation, communication by devices
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from whale.ir.ops import CONVOLUTIONS, EXCHANGES, HOROVOD_ALL_REDUCE, MATMULS, ON_DEVICE
from whale.ir.program import Node, Program, Ref
from whale.ir.text import format_program
from whale.kernels.choices import ALL, Change, Choices, Substitution, list_changed, list_fused
from whale.kernels.clusters import form_clusters
from whale.kernels.einsums import replace_einsums
from whale.kernels.elementwise import fuse_elementwise, list_operations
from whale.kernels.generators import give_own_memory
from whale.kernels.loops.replace import replace_loops
from whale.kernels.matmuls import pad_products, replace_batches, replace_convolutions
from whale.kernels.nn import REPLACED, replace_nn_kernels
from whale.kernels.updates import fuse_scatters, fuse_updates, list_scatters, list_updates, order_updates_last
from whale.kernels.xla import XlaKernels, compile_marked, count_compiled
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, on_devices
from whale.passes.run_passes import Pass, Table, When, program_changes, run_passes
from whale.passes.settings import PlanSettings

Programs = tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class RewriteContext:
    """Holds the inputs that all passes of REWRITE share, beside the programs.

    Attributes:
      settings: the settings of planning, with the kernels that are on.
      elastic: ranks may continue if others are lost.
      ranks: the rank of each program.
      comm: name of the programs' communicator; "": they have none.
      number: number of the program in its run, equal on all ranks; None: it has none.
      on_gpu: the programs run on GPUs.
      xla: the kernels that XLA has; None: nothing is compiled.
    """

    settings: PlanSettings
    elastic: bool = False
    ranks: Sequence[int] = ()
    comm: str = ""
    number: int | None = None
    on_gpu: bool = False
    xla: XlaKernels | None = None


_RewritePass = Pass[Programs, RewriteContext]


def _apply_to_each(change: Change) -> Callable[[Programs, RewriteContext], Programs]:
    """Returns a pass that applies ``change`` to each rank's program, with the kernels that the settings decline."""

    def run(programs: Programs, context: RewriteContext) -> Programs:
        choices = Choices(frozenset(context.settings.fuse.declined))
        return tuple([change(program, choices) for program in programs])

    return run


def _make_condition(name: str) -> When[RewriteContext]:
    return When(f"kernels={name}", lambda c: getattr(c.settings.fuse, name))


def _number_programs(programs: Programs, context: RewriteContext) -> Programs:
    number = context.number
    assert number is not None
    return tuple([_with_number(program, number) for program in programs])


def _form_clusters(programs: Programs, context: RewriteContext) -> Programs:
    xla = context.xla
    assert xla is not None
    return tuple([form_clusters(program, xla) for program in programs])


# Passes that change a rank's computation or its order: they replace operations by others that compute the same.
KERNELS: tuple[_RewritePass, ...] = (
    Pass(
        "loops",
        "computes loops of known length by few operations",
        _apply_to_each(lambda p, c: replace_loops(p)),
        _make_condition("loops"),
    ),
    Pass(
        "convolutions",
        "computes small convolutions as products of matrices",
        _apply_to_each(lambda p, c: replace_convolutions(p, c)),
        _make_condition("convolutions"),
    ),
    Pass(
        "products",
        "computes batches of products with one matrix as one product",
        _apply_to_each(lambda p, c: replace_batches(p, c)),
        _make_condition("products"),
    ),
    Pass(
        "einsums",
        "computes batches of small products by Whale's kernel",
        _apply_to_each(lambda p, c: replace_einsums(p, c)),
        _make_condition("einsums"),
    ),
    Pass(
        "padding",
        "pads products of matrices where wider ones are faster",
        _apply_to_each(lambda p, c: pad_products(p, c)),
        _make_condition("padding"),
    ),
    Pass(
        "own_kernels",
        "computes losses and filters' gradients by Whale's kernels",
        _apply_to_each(lambda p, c: replace_nn_kernels(p, c)),
        _make_condition("nn"),
    ),
    Pass(
        "updates",
        "computes the updates of many variables by few operations",
        _apply_to_each(lambda p, c: fuse_updates(fuse_scatters(p, c), c)),
        _make_condition("updates"),
    ),
    Pass(
        "clusters",
        "lets XLA compile what asks for it, in clusters between exchanges",
        _form_clusters,
        When("jit_compile=True and kernels=xla", lambda c: c.xla is not None),
    ),
    Pass(
        "elementwise",
        "fuses elementwise arithmetic, so that it passes over memory once",
        _apply_to_each(lambda p, c: fuse_elementwise(p, c)),
        _make_condition("elementwise"),
    ),
    Pass(
        "updates_last",
        "lets updates wait for all exchanges of the step",
        _apply_to_each(lambda p, c: order_updates_last(p)),
        When("a run that goes on without lost ranks", lambda c: c.elastic),
    ),
)


def _describe_changes(before: Programs, after: Programs) -> str:
    compiled = count_compiled(after[0])
    said = program_changes(before[0], after[0])
    if compiled == count_compiled(before[0]):
        return said
    return f"{compiled} cluster{'s' * (compiled != 1)} for XLA; {said}"


def _exchange_on_devices(programs: Programs, context: RewriteContext) -> Programs:
    return tuple([on_devices(one, context.comm, rank) for one, rank in zip(programs, context.ranks)])


def substitute_kernels(
    programs: Sequence[Program], settings: PlanSettings, elastic: bool = False, xla: XlaKernels | None = None
) -> list[Program]:
    """Replaces operations by faster ones in ranks' programs, as the settings allow.

    Args:
      elastic: ranks may continue if others are lost, so that no variable may be updated before all communication of the
        step has ended.
      xla: the kernels that XLA has on the device; None: nothing asks for XLA, or this is a prediction, which assumes
        Whale's kernels for what XLA would compile, since XLA's fusions are known only after compilation.
    """
    context = RewriteContext(settings, elastic, xla=xla)
    ranks: Programs = run_passes(REWRITE, tuple(programs), context, settings.observer, KERNELS)
    return list(ranks)


def list_substitutions(program: Program, settings: PlanSettings) -> Iterator[Substitution]:
    """Yields the substitutions that the settings allow in the main graph of a rank's program, except those of loops;
    each once.

    Args:
      program: a rank's program before ``substitute_kernels``.
    """
    seen: set[str] = set()
    fuse = settings.fuse
    for kind, change, list_kind in _MEASURED:
        if not getattr(fuse, kind):
            continue
        for one in list_kind(program):
            if one.name not in seen:
                seen.add(one.name)
                yield one
        program = change(program, ALL)


def _list_fused_updates(program: Program) -> Iterator[Substitution]:
    yield from list_fused("updates", program, list_scatters(program), fuse_scatters)
    yield from list_fused("updates", program, list_updates(program), fuse_updates)


def _list_fused_elementwise(program: Program) -> Iterator[Substitution]:
    simplified, operations = list_operations(program)
    return list_fused("elementwise", simplified, operations, fuse_elementwise)


def _one_by_one(kind: str, ops: Collection[str], change: Change) -> Callable[[Program], Iterator[Substitution]]:
    return lambda program: list_changed(kind, ops, program, change)


# The substitutions that are measured, in the order of KERNELS. Loops are not: only whole loops could be compared, which
# take tens of milliseconds an iteration, and the rewrite always leaves fewer operations.
_MEASURED: tuple[tuple[str, Change, Callable[[Program], Iterator[Substitution]]], ...] = (
    ("convolutions", replace_convolutions, _one_by_one("convolutions", CONVOLUTIONS, replace_convolutions)),
    ("products", replace_batches, _one_by_one("products", MATMULS, replace_batches)),
    ("einsums", replace_einsums, _one_by_one("einsums", MATMULS | {"Einsum"}, replace_einsums)),
    ("padding", pad_products, _one_by_one("padding", MATMULS, pad_products)),
    ("nn", replace_nn_kernels, _one_by_one("nn", REPLACED, replace_nn_kernels)),
    ("updates", fuse_updates, _list_fused_updates),
    ("elementwise", fuse_elementwise, _list_fused_elementwise),
)


def prepare_for_run(
    programs: Sequence[Program],
    settings: PlanSettings,
    ranks: Sequence[int] = (),
    comm: str = "",
    number: int | None = None,
    on_gpu: bool = False,
) -> Programs:
    """Prepares ranks' programs to be run by TensorFlow: makes keys unique, gives generators memory of their own, marks
    what XLA compiles, moves communication to devices.

    Args:
      ranks: the rank of each program.
      comm: name of the programs' communicator; "": they have none.
      number: number of the program in its run, equal on all ranks; None: it has no communication.
      on_gpu: the programs run on GPUs.
    """
    context = RewriteContext(settings, False, ranks, comm, number, on_gpu)
    return run_passes(REWRITE, tuple(programs), context, settings.observer, FOR_RUN)


def _with_number(program: Program, number: int) -> Program:
    """Adds the program's number to the keys of its communication ops, which are unique in a plan only. Horovod uses the
    node's name as key, so these nodes are renamed.
    """

    def rewrite_graph(graph: Program) -> Program:
        renamed = {n.name: f"{n.name}_of_{number}" for n in graph.nodes if n.op == HOROVOD_ALL_REDUCE}

        def rewrite_ref(ref: Ref) -> Ref:
            return Ref(renamed[ref.node], ref.index) if ref.node in renamed else ref

        def rewrite_node(n: Node) -> Node:
            if n.op in EXCHANGES and "key" in n.attrs:
                n = replace(n, attrs={**n.attrs, "key": f"{number}:{n.attrs['key']}"})
            if n.name in renamed or not renamed.keys().isdisjoint(r.node for r in n.inputs):
                n = replace(n, name=renamed.get(n.name, n.name), inputs=tuple(map(rewrite_ref, n.inputs)))
            return n

        nodes = tuple(map(rewrite_node, graph.nodes))
        if not renamed:
            return graph.replace_nodes(nodes)
        effects = tuple(renamed.get(name, name) for name in graph.effects)
        return replace(graph, nodes=nodes, outputs=tuple(map(rewrite_ref, graph.outputs)), effects=effects)

    main = rewrite_graph(program)
    return replace(main, functions={name: rewrite_graph(body) for name, body in program.functions.items()})


def _keep_exchanges(program: Program) -> Program:
    """Makes every exchange an effect of its graph.

    TensorFlow's optimizer looks through a slice of packed values, and removes an exchange whose result one rank then
    does not need; the other ranks would wait for that rank for ever.
    """

    ops = EXCHANGES.union(ON_DEVICE.values())

    def keep(graph: Program) -> Program:
        exchanges = [n.name for n in graph.nodes if n.op in ops and n.name not in graph.effects]
        return replace(graph, effects=(*graph.effects, *exchanges)) if exchanges else graph

    return replace(keep(program), functions={name: keep(body) for name, body in program.functions.items()})


# Passes that only a run needs: they change names and devices. Predictions of time and memory use the programs before.
FOR_RUN: tuple[_RewritePass, ...] = (
    Pass(
        "unique_keys",
        "makes the keys of exchanges unique in the run",
        _number_programs,
        When("a program of a run", lambda c: c.number is not None),
    ),
    Pass(
        "own_memory",
        "gives generators memory of their own before a kernel writes into it",
        lambda programs, c: tuple(map(give_own_memory, programs)),
    ),
    Pass(
        "compile_marked",
        "leaves to XLA what only it can run",
        lambda programs, c: tuple([compile_marked(one, c.on_gpu) for one in programs]),
    ),
    Pass(
        "on_devices",
        "lets devices carry out exchanges in their own memory",
        _exchange_on_devices,
        When(
            "communication.backend",
            lambda c: bool(c.comm) and c.settings.exchange.backend in DEVICE_BACKENDS,
        ),
    ),
    Pass(
        "keep_exchanges",
        "keeps exchanges whose results one rank does not need, but others wait for",
        lambda programs, c: tuple(map(_keep_exchanges, programs)),
    ),
)
REWRITE: Table[Programs, RewriteContext] = Table(
    "REWRITE",
    (*KERNELS, *FOR_RUN),
    programs=lambda programs: programs,
    text=lambda programs, c: format_program(programs[0]),
    changes=_describe_changes,
)
