"""The four tables of passes: which run when, and that each is watched, dumped and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs import mlp
from whale.errors import ProgramError
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.text import format_program, parse_program
from whale.kernels.substitute import REWRITE, RewriteContext, prepare_for_run, substitute_kernels
from whale.partition.lower import PARTITION, PartitionContext, RankPrograms, lower_ranks, make_any_plan
from whale.passes.pass_manager import NORMALIZE, PLAN, PlanContext, make_plan, normalise
from whale.passes.plan_builder import build_plan_draft
from whale.passes.run_passes import VERIFY_VARIABLE, Pass, PassLog, PassObserver, Table, run_passes
from whale.passes.settings import FuseSettings, PlanSettings

TABLES: tuple[Table[Any, Any], ...] = (NORMALIZE, PLAN, PARTITION, REWRITE)
ROWS = [(table, one) for table in TABLES for one in table.passes]
TWO = PlanSettings(2)


def with_a_second_node_of_a_name(program: Program) -> Program:
    return program.replace_nodes((*program.nodes, program.nodes[-1]))


def value_of(table: Table[Any, Any], program: Program) -> Any:
    """Makes of a program what the passes of a table change."""
    values: dict[str, Callable[[], Any]] = {
        "NORMALIZE": lambda: program,
        "PLAN": lambda: replace(build_plan_draft(mlp(), TWO), program=program),
        "PARTITION": lambda: RankPrograms(program, (program,)),
        "REWRITE": lambda: (program,),
    }
    return values[table.name]()


def context_of(table: Table[Any, Any], settings: PlanSettings) -> Any:
    """Makes what the passes of a table are told, for a plan of one axis."""
    contexts: dict[str, Callable[[], Any]] = {
        "NORMALIZE": lambda: settings,
        "PLAN": lambda: PlanContext(settings),
        "PARTITION": lambda: PartitionContext(mlp(), make_any_plan(mlp(), settings), settings),
        "REWRITE": lambda: RewriteContext(settings),
    }
    return contexts[table.name]()


def whole_way(settings: PlanSettings) -> list[tuple[str, str]]:
    """Takes a program through all tables; returns the (table, pass) that have to run on the way."""
    program = normalise(mlp(), settings)
    plan = make_any_plan(program, settings)
    lowered = substitute_kernels(lower_ranks(program, plan, settings, (0, 1)), settings)
    prepare_for_run(lowered, settings, (0, 1), "ranks", 7)
    contexts = {
        "NORMALIZE": settings,
        "PLAN": PlanContext(settings),
        "PARTITION": PartitionContext(program, plan, settings),
        "REWRITE": RewriteContext(settings, False, (0, 1), "ranks", 7),
    }
    return [(table.name, one.name) for table, one in ROWS if one.runs(contexts[table.name])]


def test_every_pass_has_a_name_of_its_own_and_says_what_it_does() -> None:
    names = [one.name for _, one in ROWS]
    assert len(names) == len(set(names)) > 40
    for _, one in ROWS:
        assert one.name.isidentifier() and len(one.what) > 20, one
        assert one.when is None or one.when.text, one


@pytest.mark.parametrize(("table", "one"), ROWS, ids=[f"{table.name}-{one.name}" for table, one in ROWS])
def test_each_pass_is_dumped_and_verified(
    table: Table[Any, Any], one: Pass[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERIFY_VARIABLE, "")
    value, context = value_of(table, mlp()), context_of(table, TWO)
    good = replace(one, run=lambda v, c: value, when=None)
    broken = replace(one, run=lambda v, c: value_of(table, with_a_second_node_of_a_name(mlp())), when=None)
    log = PassLog()
    run_passes(table, value, context, PassObserver(str(tmp_path), log), (good,))
    assert [run.name for run in log.runs] == [one.name]
    assert (tmp_path / "mlp" / f"00-{one.name}.txt").read_text() == table.text(value, context)
    run_passes(table, value, context, PassObserver(), (broken,))  # nobody asks
    with pytest.raises(ProgramError) as under_dump:
        run_passes(table, value, context, PassObserver(str(tmp_path)), (broken,))
    monkeypatch.setenv(VERIFY_VARIABLE, "1")
    with pytest.raises(ProgramError) as in_tests:
        run_passes(table, value, context, PassObserver(), (broken,))
    for raised in (under_dump, in_tests):
        assert raised.value.facts["pass"] == f"{one.name} (of {table.name})"
        assert raised.value.facts["given"] == "the graph has an earlier node of this name"
    assert (tmp_path / "mlp" / f"01-{one.name}.txt").exists()  # what is broken can be looked at


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, set()),
        (
            {"size": 1},
            {"-divide_conditions", "-update_on_owners", "-share_hidden_updates", "-use_shared_objects_once"},
        ),
        ({"own_processes": True}, {"run_python_everywhere", "-use_shared_objects_once"}),
        ({"precision__matmul_dtype": "bfloat16"}, {"mixed_precision"}),
        ({"precision__matmul_dtype": "float16"}, {"skip_overflow", "mixed_precision"}),
        ({"memory__recompute": "auto"}, {"recompute"}),
        ({"memory__offload": "parameters"}, {"hoist_reads", "gather_at_use", "offload"}),
        ({"memory__scores_bytes": 1 << 20}, {"attention_as_one"}),
        ({"zero__level": 1}, {"merge_reads"}),
        ({"zero__level": 3}, {"merge_reads", "hoist_reads", "gather_at_use"}),
        ({"exchange__backend": "horovod"}, {"give_to_horovod"}),
        ({"exchange__backend": "nccl", "exchange__wire_dtype": "bfloat16"}, {"narrow"}),
        ({"time__micro_batches": 2}, {"micro_batches"}),
        (
            {"fuse__updates": True, "fuse__padding": True},
            {"collapse_called_updates", "collapse_updates", "updates", "padding"},
        ),
    ],
)
def test_which_passes_a_setting_turns_on(changes: dict[str, Any], more: set[str]) -> None:
    def conditional(settings: PlanSettings) -> set[str]:
        on = (one.name for table, one in ROWS if one.when is not None and one.runs(context_of(table, settings)))
        return set(on)

    usual, found = conditional(TWO), conditional(TWO.but(**changes))
    assert (found - usual) | {f"-{name}" for name in usual - found} == more


def test_a_program_goes_through_all_tables_and_is_dumped_after_each_pass(tmp_path: Path) -> None:
    settings = TWO.but(observer=PassObserver(str(tmp_path)), fuse=FuseSettings.all_on())
    names = [name for _, name in whole_way(settings)]
    planned = [one.name for one in PLAN.passes if one.name in names]
    at = names.index(planned[-1]) + 1
    names = ["captured", *names[:at], "plan", *names[at:]]  # a plan is dumped as it is agreed on, too
    files = sorted(path.name for path in (tmp_path / "mlp").iterdir())
    assert files == [f"{i:02d}-{name}.txt" for i, name in enumerate(names)]

    def text(name: str) -> str:
        return (tmp_path / "mlp" / f"{names.index(name):02d}-{name}.txt").read_text()

    program = normalise(mlp(), TWO)
    plan = make_plan(program, TWO)
    assert parse_program(text("update_on_owners")) == program
    assert text("plan") == format_plan(plan)
    ranks = lower_ranks(program, plan, TWO, (0, 1))
    assert text("bare_receives") == format_program(ranks[0])
    fused = substitute_kernels(ranks, settings.but(observer=PassObserver()))
    assert text("elementwise") == format_program(fused[0]) != text("bare_receives")


def test_a_log_has_the_seconds_of_each_pass_and_what_it_changed() -> None:
    log = PassLog()
    ran = whole_way(TWO.but(observer=PassObserver("", log), fuse=FuseSettings.all_on()))
    assert [(run.table, run.name) for run in log.runs] == ran
    assert all(run.seconds >= 0 for run in log.runs)
    changed = {run.name: run.changed for run in log.runs}
    assert changed["inline"] == "nothing"
    assert changed["build_plan_draft"] == f"{len(mlp().nodes)} layouts of nodes"
    assert changed["unique_keys"] == "1 changed, of 41 nodes"
    lines = log.lines(TABLES)
    assert len(lines) == 1 + len(TABLES) + len(ROWS)
    assert next(line for line in lines if "fuse_all_reduces" in line).endswith("reshards")
    assert next(line for line in lines if " narrow " in line).split(maxsplit=2)[1:] == [
        "-",
        "off; on by communication.wire_dtype",
    ]


def test_programs_are_verified_after_each_pass_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Program) -> Program:
        return program.replace_nodes(tuple(reversed(program.nodes)))

    monkeypatch.setattr("whale.passes.pass_manager.powers", broken)
    with pytest.raises(ProgramError, match="powers \\(of NORMALIZE\\)"):
        normalise(mlp(), TWO)
