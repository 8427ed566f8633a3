"""Puts layers and variables into scopes by their names, without changes to the model's code: ``wh.annotate``, and
``read_annotations`` for the same in a JSON file.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from whale.capture.captured import Captured, CapturedVariable
from whale.errors import ConfigError, PlanError
from whale.ir.program import Program
from whale.passes.analysis.scopes import Named, Pattern, in_named_scopes, nearest
from whale.planner.graph_search.strategies import trains
from whale.runtime.context import Context, require_current
from whale.runtime.scopes import NamedScope, format_scope_part

_EVERYTHING = "split_0"  # path of the scope around all nodes of a program, as if the script had one ``with wh.split()``
_EXAMPLE = '{"decoder/layers_[0-5]": {"stage": 0}, "*/mlp/*kernel": {"split": {"dim": -1}}}'


def annotate(patterns: Mapping[str, Sequence[NamedScope]]) -> None:
    """Adds annotations to the run: each puts the nodes and variables whose names match a pattern into scopes.

    Args:
      patterns: glob over paths of names, such as ``"decoder/layers_[0-5]"`` -> the scopes (split, stage, replica) for
        what it matches.

    Raises:
      ClusterError: called before ``wh.init``.
      PlanError: ``devices`` names no ranks of the run, or each rank trains a program of its own (``solo``, Horovod).
    """
    context = require_current("wh.annotate()")
    if patterns and (context.solo or context.planning.own_programs is not None):
        raise PlanError(
            "annotations divide one program over the ranks, but each rank of this run trains a program of its own",
            given=", ".join(map(repr, patterns)),
            expected="no annotations with wh.init(solo=True) and with scripts for Horovod",
            action="leave out solo=True, or the annotations (wh.annotate, mesh.annotations, whale run --annotate)",
        )
    for text, scopes in patterns.items():
        for scope in scopes:
            context.scoping.annotations.append(
                Pattern(text, scope.kind, format_scope_part(scope, len(context.scoping.annotations), context))
            )
            context.scoping.dividing_scope_seen |= scope.kind in ("split", "stage")
            context.scoping.stages_seen |= scope.kind == "stage"


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    devices: tuple[int, ...] | None = None
    dim: int | None = None
    sequence: int | None = None
    context: int | None = None
    axis: str | tuple[str, ...] | None = None


class _Scopes(msgspec.Struct, forbid_unknown_fields=True):
    """Holds the scopes that a JSON file assigns to one pattern: ``{"stage": 0}`` or ``{"split": {"dim": -1}}``."""

    replica: _Arguments | None = None
    split: _Arguments | None = None
    stage: int | _Arguments | None = None

    def list_scopes(self) -> list[NamedScope]:
        found = []
        for kind in ("replica", "split", "stage"):
            given = getattr(self, kind)
            if isinstance(given, int):
                found.append(NamedScope(kind, number=given))
            elif given is not None:
                axis = (given.axis,) if isinstance(given.axis, str) else given.axis
                found.append(NamedScope(kind, given.devices, given.dim, given.sequence, axis, context=given.context))
        return found


def read_annotations(path: str) -> dict[str, list[NamedScope]]:
    """Reads annotations from a JSON file, in the form that ``annotate`` takes: pattern -> scopes.

    The file maps each pattern to kinds of scopes, and each kind to its arguments, or a stage to its number:
    ``{"decoder/layers_[0-5]": {"stage": 0}}``.

    Raises:
      ConfigError: the file cannot be read, or has another form.
    """
    try:
        found = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=dict[str, _Scopes])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "the file of annotations cannot be read",
            given=f"{path}: {error}",
            expected=f"a JSON file like {_EXAMPLE}",
            action="correct the file, or the path in the key mesh.annotations (whale run --annotate)",
        ) from error
    return {text: scopes.list_scopes() for text, scopes in found.items()}


def put_in_default_scope(program: Program, context: Context) -> Program:
    """Returns ``program`` with every node that has no scope put into one ``wh.split``; unchanged unless the run splits
    everything (``ScopeState.split_everything``).
    """
    if not context.scoping.split_everything:
        return program
    return program.replace_nodes(tuple(n if n.scope else replace(n, scope=_EVERYTHING) for n in program.nodes))


def put_in_named_scopes(captured: Captured, context: Context) -> Captured:
    """Returns the captured program with this run's annotations (``wh.annotate``) applied to its nodes.

    Raises:
      PlanError: the program trains, and a pattern matches no name in this program or in earlier ones.
    """
    if not context.scoping.annotations:
        return captured
    named = in_named_scopes(captured.program, context.scoping.annotations, find_variable_names(captured.variables))
    context.scoping.annotated.update(named.matched)
    if trains(captured.program):
        _refuse_unmatched(named, context)
    return replace(captured, program=named.program)


def _refuse_unmatched(named: Named, context: Context) -> None:
    missing = [p.text for p in context.scoping.annotations if p.text not in context.scoping.annotated]
    if missing:
        near = nearest(missing[0], named.names)
        raise PlanError(
            "an annotation matches no layer and no variable",
            op=named.program.name,
            given=", ".join(map(repr, missing)),
            expected="a name of a layer or variable of this step" + (f", such as {', '.join(near)}" if near else ""),
            action="correct the pattern: a glob over whole parts of a path, such as decoder/layers_*",
        )


def describe_unmatched(context: Context) -> str:
    """Returns a sentence that names the annotations which matched nothing in the whole run, for a warning at its end;
    "" if all matched.
    """
    missing = list(
        dict.fromkeys(repr(p.text) for p in context.scoping.annotations if p.text not in context.scoping.annotated)
    )
    if not missing:
        return ""
    return f"the annotations {', '.join(missing)} matched no layer and no variable in any step; correct these patterns"


def find_variable_names(captured: Sequence[CapturedVariable]) -> dict[str, str]:
    """Maps the name of each captured variable's handle node to the variable's full path, such as ``"dense/kernel"``.

    Keras 3 keeps the layers' names in its own variable object, which refers to the tf.Variable: it is found among the
    objects that refer to it.
    """
    variables = [c.variable for c in captured if c.variable is not None]
    paths: dict[int, str] = {}
    for referrer in gc.get_referrers(*variables) if variables else ():
        found = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", {})
        path = found.get("_path")
        if isinstance(path, str) and found.get("_value") is not None:
            paths[id(found["_value"])] = path
    return {c.node: paths.get(id(c.variable), c.name) for c in captured}
