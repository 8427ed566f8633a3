"""Plans for what a user typed: a described model (`gpt:layers=96,hidden=12288,...`) or a profile, on a cluster."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import msgspec

from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stacks import is_file, stack
from cost_model.analytic.transformer import MOST_LAYERS, Transformer, padded_vocabulary
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from cost_model.cluster.yaml_files import CALLED
from whale.errors import PlanError, find_similar
from whale.ir.strategy import Degrees
from whale.planner.analytic_search.candidates import FIXED, Constraints
from whale.planner.analytic_search.layer_profiles import LayerProfile, TableModel
from whale.planner.analytic_search.search_sequence import search
from whale.planner.analytic_search.whale22 import plan22
from whale.planner.hugging_face import read_config
from whale.planner.report.planfile import PlanFile, from_search

SHORT = {"seq": "sequence", "vocab": "vocabulary", "ffn": "feed_forward", "batch": "batch"}
# The operations of a described layer; all of them, in all layers, have one tensor-parallel degree.
OPERATIONS = ("embedding", "attention/qkv", "attention/core", "attention/out", "mlp/up", "mlp/down", "head")
WORDS = {"recompute": ("none", "selective", "full"), "offload": ("none", "optimizer", "parameters")}
_STRATEGY = frozenset(f.name for f in msgspec.structs.fields(Degrees)) - {"experts", "batch"}
HEAD_WIDTHS = (128, 64)  # widths of attention heads in published models, which `advise` tries
LAYER_STEPS = (2, 4, 8)  # `advise` tries numbers of layers that are multiples of these, so that stages divide them
DEFAULTS = {"sequence": 2048, "vocabulary": 51200}
# Families of described transformers, and what their models have in common.
_GATED = {"gated": 1, "untied": 1, "rotary": 1}
FAMILIES: dict[str, dict[str, int]] = {"gpt": {}, "moe": {}, "llama": _GATED, "mixtral": _GATED}
WITH_EXPERTS = ("moe", "mixtral")


# Families whose step is captured and planned like a script's, since their layers differ.
CAPTURED = ("bert", "t5", "vit", "resnet", "dlrm", "classifier")
MOST = {"layers": MOST_LAYERS}
MOST_OTHERWISE = 10**12
MOST_DIGITS = 15
LEVELS = (0, 3)  # of ZeRO
ADVICE_BUDGET_S = 1.0  # of each of the searches of `advise`
BUDGET_S, MANY_DEVICES, MANY_BUDGET_S = 2.5, 64, 8.0  # of a search, and of one for more devices than that


def describe(text: str) -> tuple[Transformer, int | None]:
    """Parses the description of a decoder-only transformer, `FAMILY:name=number,...`.

    `gpt:layers=96,hidden=12288,heads=96[,sequence=2048,vocabulary=51200,feed_forward=...,batch=1536]` is the basic
    form; `moe:...,experts=64[,top=2]` has that many experts in each layer's feed-forward network. `state_bytes=4`
    stands for an optimizer without moments. `llama` and `mixtral` are `gpt` and `moe` with gated networks, rotary
    positions and an untied output layer. A Hugging Face configuration gives most of the fields:
    `config.json[,sequence=8192,batch=512]`.

    Returns:
        (the transformer, the global batch in rows; None: the text has no `batch=`).

    Raises:
        PlanError: an unknown family or field, or a value that is no number or too large.
    """
    values: dict[str, int] = dict(DEFAULTS)
    path, _, rest = text.partition(",")
    if path.endswith(".json"):
        values |= read_config(path)
        family = "moe" if "experts" in values else "gpt"
    else:
        family, _, rest = text.partition(":")
    names = [f.name for f in msgspec.structs.fields(Transformer)]
    example = "gpt:layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=51200,batch=1536"
    if family not in FAMILIES:
        others = ["moe:...,experts=64", *(f"{name}:..." for name in ("llama", "mixtral", *CAPTURED)), "config.json"]
        near = find_similar(family, (*FAMILIES, *CAPTURED))
        raise PlanError(
            "the description names an unknown kind of model",
            given=text,
            expected=", ".join([example, *others]),
            action=f"write {near}:{rest}, if that is meant" if near else "describe the model in one of these forms",
        )
    values |= FAMILIES[family]
    for part in filter(None, rest.split(",")):
        name, _, number = part.partition("=")
        name = SHORT.get(name.strip(), name.strip())
        called = [
            field for field, others in CALLED.items() if name in others and field in (*names, *_STRATEGY, "batch")
        ]
        if name in _STRATEGY or (called and called[0] in _STRATEGY):
            raise PlanError(
                "a model's description cannot say how the model is divided",
                given=part,
                action="leave it out; the search chooses (`whale simulate` predicts a strategy that a job file names)",
            )
        if name not in (*names, "batch"):
            near = called[0] if called else find_similar(name, (*names, "batch", *SHORT))
            raise PlanError(
                f"the description of a {family} model has no field {name or 'without a name'}",
                given=part,
                expected=", ".join([*names, "batch"]),
                action=f"write {near}={number.strip()}, if that is meant" if near else "leave the field out",
            )
        if not number.strip().isdigit():
            raise PlanError(
                "a field of the model's description is no number",
                given=part,
                expected=f"{name}=<a whole number>",
                action="write digits only, without commas or units",
            )
        if len(number.strip()) > MOST_DIGITS or not int(number) <= MOST.get(name, MOST_OTHERWISE):
            most = MOST.get(name, MOST_OTHERWISE)
            raise PlanError(
                "a model of that size cannot be planned",
                given=part,
                expected=f"{name} of at most {most:,}",
                action=f"give a smaller {name}",
            )
        values[name] = int(number)
    batch = values.pop("batch", None)
    needed = ("layers", "hidden", "heads") + (("experts",) if family in WITH_EXPERTS else ())
    if missing := [n for n in needed if n not in values]:
        raise PlanError(
            "a model's description is incomplete",
            given=text,
            expected=", ".join(f"{n}=<a whole number>" for n in missing),
            action=f"add {' and '.join(missing)} to the description",
        )
    return Transformer(**values), batch


def plan(
    cluster: Cluster,
    batch: int,
    transformer: Transformer | None = None,
    table: LayerProfile | None = None,
    software: str = "megatron-2022",
    limits: Constraints | None = None,
    planner: str = "whale",
) -> PlanFile:
    """Finds the best plan for a described or a measured model on a cluster.

    Args:
        batch: global batch in rows.
        transformer: the model by its hyper-parameters, or None.
        table: the model by measured layers, if `transformer` is None.
        software: name of a training stack of the package, or a path to a file that describes one.
        limits: the user's constraints and the budget; None: all free.
        planner: "whale", or "whale22" for the published formulas.

    Raises:
        PlanError: no strategy fits (the error proposes changes), or the constraints exclude each other.
    """
    machines = Machines(cluster)
    if is_file(software):
        software = os.path.abspath(software)  # the plan file refers to it and may be read from another folder
    model: Model
    if transformer is not None:
        model = TransformerModel(transformer, stack(software), machines)
    elif table is not None:
        model = TableModel(table, stack(software), machines)
    else:
        raise PlanError(
            "there is nothing to plan",
            expected="a described model or a profile of measured layers",
            action="give --describe gpt:layers=... or --profile FILE",
        )
    if limits is not None and (reason := _infeasible(model, machines, batch, limits)):
        raise PlanError(
            "the fixed choices cannot be combined",
            reason=f"infeasible: {reason}",
            action="fix other values (`--set`), or fewer choices",
        )
    if planner == "whale22":
        found = plan22(model, machines, batch)
    elif planner == "whale":
        found = search(model, machines, batch, limits)
    else:
        raise PlanError(
            "there is no planner of that name",
            given=planner,
            expected="whale or whale22",
            action="leave --planner out for the default, whale",
        )
    return from_search(found, found.cluster, software, batch, transformer, table, planner)


def find_budget_s(cluster: Cluster) -> float:
    """Returns the default budget of a search, in seconds of work: larger for a cluster with many devices."""
    return MANY_BUDGET_S if cluster.device_count > MANY_DEVICES else BUDGET_S


def limits(fixed: list[str], budget_s: float = BUDGET_S) -> Constraints:
    """Parses constraints given as `--set name=value`.

    `PATTERN.split=8`, such as `attention/*.split=8`, fixes the tensor-parallel degree; all layers of a described model
    share one degree, whichever operation the pattern names.

    Args:
        fixed: the texts `name=value`.
        budget_s: seconds of work for the search.

    Raises:
        PlanError: an unknown name, an impossible value, or a name given twice.
    """
    if budget_s <= 0:
        raise PlanError(
            "the search for a plan needs a budget of time above 0",
            given=f"a budget of {budget_s:g} s",
            action="give a budget of more than 0 seconds",
        )
    values: dict[str, int | str] = {}
    first: dict[str, str] = {}
    for one in fixed:
        name, _, value = one.partition("=")
        if name.endswith(".split"):
            pattern, name = name.removesuffix(".split"), "tensor"
            if not any(fnmatchcase(op, pattern) or fnmatchcase(op, f"*/{pattern}") for op in OPERATIONS):
                raise PlanError(
                    "no operation has that name",
                    given=one,
                    expected=f"a name or pattern of {', '.join(OPERATIONS)}",
                    action="write for example 'attention/*.split=2', which is the same as tensor=2",
                )
        if name not in FIXED:
            near = find_similar(name, FIXED)
            raise PlanError(
                "this choice cannot be fixed",
                given=one,
                expected=", ".join([*(f"{n}=..." for n in sorted(FIXED)), "OPERATION.split=..."]),
                action=f"write {near}={value}, if that is meant" if near else "fix one of these choices",
            )
        number = int(value) if value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS else None
        least, most = LEVELS if name == "zero" else (1, MOST_OTHERWISE)
        if value not in WORDS[name] if name in WORDS else number is None or not least <= number <= most:
            levels = f"a level from {least} to {most}" if name == "zero" else f"a whole number of at least {least}"
            can = " or ".join(WORDS.get(name, (levels,)))
            raise PlanError(
                "a choice cannot be fixed to this value",
                given=one,
                expected=f"{name}={can}",
                action=f"correct the value of --set {name}=..., or leave it out: the search chooses",
            )
        if name in values:
            raise PlanError(f"{name} is fixed twice", given=f"{first[name]} and {one}", action="leave one of them out")
        values[name], first[name] = value if number is None else number, one
    return Constraints(**values, budget_s=budget_s)  # type: ignore[arg-type]


def _infeasible(model: Model, machines: Machines, batch: int, limits: Constraints) -> str:
    """Explains why no strategy can satisfy the user's constraints, before any search; empty: none was found to
    conflict.
    """
    tensor = limits.tensor or 1
    t = model.transformer if isinstance(model, TransformerModel) else None
    for name, count in (("heads", t.heads), ("columns of a layer's output", t.hidden)) if t is not None else ():
        if count % tensor:
            return f"{count} {name} are not divisible by {tensor}"
    most = max(pool.per_host for pool in machines.pools)
    if tensor > most:
        return f"tensor-parallel degree {tensor} needs as many devices of a kind on one host, which has at most {most}"
    degrees = sorted({d for pool in machines.pools for d in model.tensor_degrees(pool.number)})
    if limits.tensor is not None and tensor not in degrees:
        return f"tensor-parallel degree {tensor} is not one of the model's: {', '.join(map(str, degrees))}"
    if limits.context not in (None, 1) and (not model.sequence or model.sequence % limits.context):
        tokens = model.sequence or "an unknown number of"
        return f"rows of {tokens} tokens are not divisible by {limits.context} context-parallel ranks"
    if limits.experts is not None and (not model.experts or model.experts % limits.experts):
        return f"{model.experts or 'no'} experts of a layer are not divisible by {limits.experts} expert-parallel ranks"
    stages, replicas = limits.stages or (2 if limits.chunks not in (None, 1) else 1), limits.data or 1
    if limits.stages is not None and stages > model.count:
        return f"{model.count} layers are not enough for {stages} stages"
    if limits.recompute not in (None, *(known := [kind for kind, _ in model.recomputes()])):
        return f"{model.stack.name} has no {limits.recompute} recompute, but {', '.join(known)}"
    for name, parts in (("micro-batches", limits.micro_batches), ("rows of a micro-batch", limits.micro_batch)):
        if parts is not None and batch % parts:
            return f"a batch of {batch} is not divisible by {parts} {name}"
    each = batch // (limits.micro_batches or 1)
    if limits.micro_batch is not None and limits.micro_batches is not None:
        if each % limits.micro_batch:
            return f"{each} rows of a micro-batch are not divisible by {limits.micro_batch} rows of a replica"
        replicas = each // limits.micro_batch
        if limits.data not in (None, replicas):
            rows = f"{limits.micro_batches} micro-batches of {limits.micro_batch} rows"
            return f"a batch of {batch} in {rows} has {replicas} replicas, not {limits.data}"
    if each < replicas:
        return f"{each} rows of a micro-batch are not enough for {replicas} replicas"
    if batch % (replicas * (limits.micro_batch or 1)) and limits.micro_batch is not None:
        return f"a batch of {batch} is not divisible by {replicas} replicas of {limits.micro_batch} rows"
    same = limits.context or 1  # ranks that divide the tokens of a replica's rows; each counts as a replica below
    if limits.experts is not None and limits.data is not None and replicas * same % limits.experts:
        return f"{replicas * same} replicas are not divisible by {limits.experts} expert-parallel ranks"
    replicas *= same
    if limits.data is None:
        replicas = max(replicas, limits.experts or 1)
    if (needed := stages * tensor * replicas) > machines.devices:
        return f"{needed} devices are needed, and {machines.cluster.name} has {machines.devices}"
    groups = sum(pool.tensor_groups(tensor) for pool in machines.pools)
    if (needed := stages * replicas) > groups:
        return f"{needed} groups of {tensor} devices of one host are needed, and {machines.cluster.name} has {groups}"
    return _not_interleaved(model.count, limits)


def _not_interleaved(layers: int, limits: Constraints) -> str:
    """Explains why no number of stages can have the fixed number of chunks; empty: the chunks are possible."""
    chunks, stages = limits.chunks or 1, limits.stages or 2
    if chunks > 1 and limits.stages == 1:
        return f"one stage is not interleaved in {chunks} chunks"
    if chunks > 1 and stages * chunks > layers:
        return f"{layers} layers are not enough for {stages} stages of {chunks} chunks"
    return ""


def advise(
    cluster: Cluster,
    batch: int,
    transformer: Transformer,
    software: str = "megatron-2022",
    budget_s: float = ADVICE_BUDGET_S,
) -> list[str]:
    """Compares similar models (vocabulary, heads, layers, batch) by how fast they train; `whale plan --advise` prints
    it.

    Returns:
        one line per changed model with its gain in parameters x rows per second, largest gain first.
    """
    t = transformer
    changes: list[tuple[str, int]] = []
    padded = padded_vocabulary(t.vocabulary)
    if padded != t.vocabulary:
        changes.append(("vocabulary", padded))
    heads = [n for n in (t.hidden // width for width in HEAD_WIDTHS) if n and t.hidden % n == 0 and n != t.heads]
    changes += [("heads", n) for n in heads]
    near = [-(-t.layers // n) * n for n in LAYER_STEPS] + [t.layers // n * n for n in LAYER_STEPS if n > 2]
    changes += [("layers", n) for n in dict.fromkeys(near) if n and n != t.layers]
    base = _work_per_s(cluster, batch, t, software, budget_s)
    found = []
    for name, value in changes:
        other = msgspec.structs.replace(t, **{name: value})
        gain = _work_per_s(cluster, batch, other, software, budget_s) / base - 1
        found.append((gain, f"{name} {getattr(t, name)} -> {value}: {gain:+.1%} parameters x rows a second"))
    for rows in (batch * 3 // 4, batch * 2):
        gain = _work_per_s(cluster, rows, t, software, budget_s) / base - 1
        found.append((gain, f"batch {batch} -> {rows}: {gain:+.1%} parameters x rows a second"))
    return [text for _, text in sorted(found, key=lambda e: -e[0])]


def _work_per_s(cluster: Cluster, batch: int, transformer: Transformer, software: str, budget_s: float) -> float:
    """Returns parameters x rows per second, to compare models of slightly different size; 0: no strategy fits."""
    try:
        found = plan(cluster, batch, transformer, software=software, limits=Constraints(budget_s=budget_s))
    except PlanError:
        return 0.0
    return transformer.parameters * batch / found.step_s
