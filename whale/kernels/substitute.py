"""Rewrites ranks' programs: replaces operations by faster ones, and adds the parts that only a run needs.

REWRITE              the passes over the program of each rank, behind PARTITION
substitute_kernels   runs those that change computation or memory: for runs and for predictions
ready_for_run        runs the others: keys that are unique in the run, XLA compilation, exchanges by devices
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whale.ir.program import Program
from whale.ir.text import format_program
from whale.kernels.elementwise.fuse import fuse_elementwise
from whale.kernels.loops.replace import replace_loops
from whale.kernels.matmuls.batches import replace_batches
from whale.kernels.matmuls.convolutions import replace_convolutions
from whale.kernels.matmuls.einsums import replace_einsums
from whale.kernels.matmuls.padding import pad_products
from whale.kernels.nn import replace_nn_kernels
from whale.kernels.updates.fuse import fuse_updates
from whale.kernels.updates.last import order_updates_last
from whale.kernels.xla import compile_marked
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, on_devices
from whale.passes.resharding.unique_keys import with_number
from whale.passes.run_passes import Pass, Table, When, program_changes, run_passes
from whale.passes.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class RewriteContext:
    """The inputs that all passes of REWRITE share, beside the programs.

    Attributes:
      elastic: ranks may continue without others.
      ranks: of the programs; comm: name of their communicator; "": they have none.
      number: of the program in its run; None: it has none.
      on_gpu: the programs run on GPUs.
    """

    settings: PlanSettings
    elastic: bool = False
    ranks: Sequence[int] = ()
    comm: str = ""
    number: int | None = None
    on_gpu: bool = False


Programs = tuple[Program, ...]
_RewritePass = Pass[Programs, RewriteContext]


def _apply_to_each(change: Callable[[Program], Program]) -> Callable[[Programs, RewriteContext], Programs]:
    """Returns a pass that applies ``change`` to each rank's program."""
    return lambda programs, context: tuple([change(program) for program in programs])


def _make_condition(name: str) -> When[RewriteContext]:
    return When(f"kernels={name}", lambda c: getattr(c.settings.fuse, name))


def _number_programs(programs: Programs, context: RewriteContext) -> Programs:
    number = context.number
    assert number is not None
    return tuple([with_number(program, number) for program in programs])


def _exchange_on_devices(programs: Programs, context: RewriteContext) -> Programs:
    return tuple([on_devices(one, context.comm, rank) for one, rank in zip(programs, context.ranks)])


# What a rank computes, and in which order. All replace operations by others that compute the same.
KERNELS: tuple[_RewritePass, ...] = (
    Pass(
        "loops",
        "computes loops of known length by few operations",
        _apply_to_each(lambda p: replace_loops(p)),
        _make_condition("loops"),
    ),
    Pass(
        "convolutions",
        "computes small convolutions as products of matrices",
        _apply_to_each(lambda p: replace_convolutions(p)),
        _make_condition("convolutions"),
    ),
    Pass(
        "products",
        "computes batches of products with one matrix as one product",
        _apply_to_each(lambda p: replace_batches(p)),
        _make_condition("products"),
    ),
    Pass(
        "einsums",
        "computes batches of small products by a kernel of ours",
        _apply_to_each(lambda p: replace_einsums(p)),
        _make_condition("einsums"),
    ),
    Pass(
        "padding",
        "pads products of matrices where wider ones are faster",
        _apply_to_each(lambda p: pad_products(p)),
        _make_condition("padding"),
    ),
    Pass(
        "own_kernels",
        "computes losses and filters' gradients by kernels of ours",
        _apply_to_each(lambda p: replace_nn_kernels(p)),
        _make_condition("nn"),
    ),
    Pass(
        "updates",
        "computes the updates of many variables by few operations",
        _apply_to_each(lambda p: fuse_updates(p)),
        _make_condition("updates"),
    ),
    Pass(
        "elementwise",
        "goes once over tensors for all arithmetic on their elements",
        _apply_to_each(lambda p: fuse_elementwise(p)),
        _make_condition("elementwise"),
    ),
    Pass(
        "updates_last",
        "lets updates wait for all exchanges of the step",
        _apply_to_each(lambda p: order_updates_last(p)),
        When("a run that goes on without lost ranks", lambda c: c.elastic),
    ),
)

# What the operations of a run are called and carried out by; predictions and memory are of the programs before.
FOR_RUN: tuple[_RewritePass, ...] = (
    Pass(
        "unique_keys",
        "makes the keys of exchanges unique in the run",
        _number_programs,
        When("a program of a run", lambda c: c.number is not None),
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
)

REWRITE: Table[Programs, RewriteContext] = Table(
    "REWRITE",
    (*KERNELS, *FOR_RUN),
    programs=lambda programs: programs,
    text=lambda programs, c: format_program(programs[0]),
    changes=lambda before, after: program_changes(before[0], after[0]),
)


def substitute_kernels(programs: Sequence[Program], settings: PlanSettings, elastic: bool = False) -> list[Program]:
    """Replaces operations by faster ones in ranks' programs, as the settings allow.

    Args:
      elastic: ranks may continue without others, so that no variable is changed before all exchanges have ended.
    """
    context = RewriteContext(settings, elastic)
    ranks: Programs = run_passes(REWRITE, tuple(programs), context, settings.observer, KERNELS)
    return list(ranks)


def prepare_for_run(
    programs: Sequence[Program],
    settings: PlanSettings,
    ranks: Sequence[int] = (),
    comm: str = "",
    number: int | None = None,
    on_gpu: bool = False,
) -> Programs:
    """Prepares ranks' programs for TensorFlow.

    Args:
      ranks: of the programs.
      comm: name of their communicator; "": they have none.
      number: of the program in its run, equal on all ranks; None: it has no exchanges.
      on_gpu: the programs run on GPUs.
    """
    context = RewriteContext(settings, False, ranks, comm, number, on_gpu)
    return run_passes(REWRITE, tuple(programs), context, settings.observer, FOR_RUN)
