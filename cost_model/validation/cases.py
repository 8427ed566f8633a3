"""Converts rows of published tables to cases: a training job, the machines it ran on, and the measured seconds."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from cost_model.analytic.layer_profile import MeasuredLayer, Profile
from cost_model.analytic.predict import JobPrediction, predict
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer, padded_vocabulary
from cost_model.cluster import cluster_file as cluster
from cost_model.cluster import yaml_files
from cost_model.cluster.cluster_file import Attachment, Cluster, DeviceEntry, HostEntry, NetworkEntry
from cost_model.hardware import catalogue
from cost_model.validation.division import Division, complete
from whale.errors import ClusterError, PlanError, ProgramError, WhaleError
from whale.ir.strategy import Degrees, Recompute

GPT2_VOCABULARY = 50257  # words of GPT-2's tokenizer, which vTrain's models have
FOLDER = Path(__file__).resolve().parent
DATA = FOLDER / "data"


COMMENT = "# source:"  # begins a line that says where a file's rows were published


@dataclass(frozen=True, slots=True)
class Case:
    """Represents one measured training step, with all that is needed to predict it.

    Attributes:
        label: name of the row in reports.
        size: rows of the same size are compared with each other when plans are ranked.
        measured_s: published seconds of a step.
        model: the model.
        parallel: the parallel degrees, completed if the row leaves some out.
        stack: name of the software stack.
        cluster: the cluster, or its name (see `read_published_cluster`).
        error: why the row cannot be predicted; None: it can.
        profile: measured layers to use instead of formulas; None: formulas.
        peak_gb: measured peak memory of a rank in GB; 0: not published.
    """

    label: str
    size: str
    measured_s: float
    model: Transformer
    parallel: Degrees
    stack: str
    cluster: str | Cluster
    error: WhaleError | None = None
    profile: Profile | None = None
    peak_gb: float = 0.0

    def predict(self) -> JobPrediction:
        """Predicts the step by the cost model; raises WhaleError if that is impossible."""
        if self.error is not None:
            raise self.error
        return predict(self.model, self.parallel, stack(self.stack), read_published_cluster(self.cluster), self.profile)


@dataclass(frozen=True, slots=True)
class Published:
    """Describes a published table and how its rows are read.

    Attributes:
        name: name of the publication in reports.
        columns: columns by which files of this table are recognised.
        case: converts a row to a case.
        ranked: whether the table has several plans per model size, so that their order can be compared.
    """

    name: str
    columns: frozenset[str]
    case: Callable[[Mapping[str, str]], Case]
    ranked: bool = False


def read_published_cluster(name: str | Cluster) -> Cluster:
    """Returns the cluster that rows were measured on: by the name of a file in clusters/, or the path of another
    file.
    """
    return name if isinstance(name, Cluster) else _read_cluster(name)


@cache
def _read_cluster(name: str) -> Cluster:
    return cluster.read(name if name.endswith((".yaml", ".yml")) else FOLDER / "clusters" / f"{name}.yaml")


def _megatron_row(row: Mapping[str, str]) -> Division:
    """Reads the parallel degrees from the columns of Megatron-LM's tables; the older ones have no ``seqpar``."""
    return Division(
        sizes=tuple(_number(row[name]) for name in ("tp", "pp", "dp", "vpp", "mbs")),
        devices=_number(row["gpus"]),
        batch=_whole(row["gbs"]),
        recompute=_recompute(row["recompute"]),
        sequence_parallel=row.get("seqpar", "").strip().lower() in ("1", "true", "yes"),
        zero=_whole(row.get("zero") or "0"),
    )


def _megatron(row: Mapping[str, str]) -> Case:
    """Reads a row of Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, table
    1."""
    model, division = _model(row), _megatron_row(row)
    software, where, division = _of_form(row, "megatron-2021", division)
    parallel, assumed = complete(division, model, software, read_published_cluster(where))
    # The paper counts full recompute in its FLOPs: 96 B s l h^2 (1 + s/6h + V/16lh); the table of H100 does not.
    work = model.step_flops(parallel.batch, "full" if where == "selene" else "none")
    seconds = work / (_whole(row["gpus"]) * float(row["tflops_gpu"]) * 1e12)
    label = f"{row['params_B']}B {_plan(parallel)}{assumed}"
    return Case(label, row["params_B"], seconds, model, parallel, software, where)


def _of_form(row: Mapping[str, str], software: str, division: Division) -> tuple[str, str, Division]:
    """Returns (stack, cluster, division) of a row in the form of Megatron-LM's tables.

    Megatron-Core's table of H100 has the same form; fields that were not published are left open there.
    """
    if re.search("core|h100", row.get("set", ""), re.I) is None:
        return software, "selene", division
    return "megatron-core-bf16", "dgx-h100", _open(division, row)


def _open(division: Division, row: Mapping[str, str]) -> Division:
    """Returns a division in which blank fields (recompute, sequence parallelism, ZeRO) are unknown instead of off."""
    return replace(
        division,
        recompute=division.recompute if row.get("recompute", "").strip() else None,
        sequence_parallel=division.sequence_parallel if row.get("seqpar", "").strip() else None,
        zero=division.zero if row.get("zero", "").strip() else None,
    )


def _korthikanti(row: Mapping[str, str]) -> Case:
    """Reads a row of Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, table
    5.
    """
    model = _model(row)
    software, where, division = _of_form(row, "megatron-2022", _megatron_row(row))
    parallel, assumed = complete(division, model, software, read_published_cluster(where))
    label = f"{row['model']} {_plan(parallel)}{assumed}"
    return Case(label, row["model"], float(row["iter_s"]), model, parallel, software, where)


def _megatron_zero(row: Mapping[str, str]) -> Case:
    """Reads a row of table 2 of Narayanan et al., SC 2021: models without model parallelism under DeepSpeed's ZeRO
    3.
    """
    model = _model(row)
    software, where, division = _of_form(row, "megatron-2021", _megatron_row(row))
    parallel, assumed = complete(division, model, software, read_published_cluster(where))
    label = f"{row['params_B']}B {_plan(parallel)} ZeRO {parallel.zero}{assumed}"
    return Case(label, row["params_B"], float(row["iter_s"]), model, parallel, software, where)


def _model(row: Mapping[str, str]) -> Transformer:
    names = ("layers", "hidden", "heads", "seq", "vocab")
    return Transformer(*(_whole(row[name]) for name in names))


def _number(text: str) -> int | None:
    """Parses a whole number; None if the field is blank."""
    return _whole(text) if text.strip() else None


def _whole(text: str) -> int:
    """Parses a whole number, which some programs write as 8.0; raises ValueError for other numbers."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(f"{text!r} is no whole number; write one such as 8")
    return int(value)


# Other words for kinds of recompute in tables.
RECOMPUTE_WORDS = {"": "none", "0": "none", "no": "none", "false": "none", "1": "full", "yes": "full", "true": "full"}


def _recompute(text: str) -> Recompute:
    """Parses a kind of recompute, "none" if blank; `Degrees` refuses invalid kinds later."""
    word = text.strip().lower()
    return cast(Recompute, RECOMPUTE_WORDS.get(word, word))


def _vtrain(row: Mapping[str, str], recompute: Recompute, software: str, where: str) -> Case:
    names = ("tensor parallelism", "pipeline parallelism", "data parallelism")
    tensor, pipeline, data = (_number(row[name]) for name in names)
    model = Transformer(
        layers=_whole(row["# layers"]),
        hidden=_whole(row["hidden size"]),
        heads=_whole(row["attention heads"]),
        sequence=_whole(row["sequence length"]),
        vocabulary=padded_vocabulary(GPT2_VOCABULARY, tensor or 1),
    )
    sizes = (tensor, pipeline, data, 1, _number(row["micro batch"]))
    division = Division(sizes, _number(row["# GPUs"]), _whole(row["global batch"]), recompute)
    parallel, assumed = complete(division, model, software, read_published_cluster(where))
    size = row.get("Parameters (billion)") or f"h{model.hidden} L{model.layers}"
    label = f"{size} {_plan(parallel)}{assumed}"
    return Case(label, size, float(row["iteration time (ms)"]) / 1e3, model, parallel, software, where)


def _vtrain_single(row: Mapping[str, str]) -> Case:
    """Reads a row of Bang et al., "vTrain", MICRO 2024, validation on one host; without recompute."""
    return _vtrain(row, "none", "megatron-vtrain", "vtrain-single")


def _vtrain_multi(row: Mapping[str, str]) -> Case:
    """Reads a row of Bang et al., "vTrain", MICRO 2024, validation on 64 to 512 GPUs.

    Full recompute is assumed, as the plans would not fit otherwise. They ran Megatron-DeepSpeed (data/README.md of
    github.com/VIA-Research/vTrain); its kernels are taken to be those of Megatron-LM.
    """
    return _vtrain(row, "full", "megatron-2021", "vtrain-multi")


# d_model, n_heads, n_layers of github.com/mosaicml/llm-foundry scripts/train/yamls/pretrain/mpt-*.yaml
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
MPT_VOCABULARY = 50368


def _mosaic(row: Mapping[str, str]) -> Case:
    """Reads a row of MosaicML llm-foundry, scripts/train/benchmarking, throughput tables (FSDP)."""
    name = row["Model"].strip().lower()
    if name not in MPT:
        raise ProgramError(
            "the row's model is not one of MosaicML's",
            given=f"Model: {row['Model']}",
            expected=", ".join(MPT),
            action="correct the column Model, or add the model's sizes to MPT in cost_model/validation/cases.py",
        )
    hidden, heads, layers = MPT[name]
    sharding = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}[row["Sharding Strategy"].strip().upper()]
    devices, micro_batch = _whole(row["# GPUs"]), _whole(row["MicroBatchSize"])
    parallel = Degrees(
        data=devices,
        micro_batch=micro_batch,
        batch=devices * micro_batch * _whole(row["GradAccum"]),
        recompute="full" if row["Activation Checkpointing"].strip() == "True" else "none",
        zero=sharding,
    )
    model = Transformer(layers, hidden, heads, _whole(row["SeqLen (T)"]), MPT_VOCABULARY)
    tokens = parallel.batch * model.sequence
    software = "composer-fp8" if "fp8" in row["Precision"] else "composer-bf16"
    software += "-pure" if row["MP Mode"].strip() == "PURE" else ""
    label = f"{row['GPU']} {name} s{model.sequence} x{devices} b{micro_batch}x{row['GradAccum']}"
    label += " recompute" if parallel.recompute == "full" else ""
    label += " fp8" if "fp8" in row["Precision"] else ""
    where = "mosaic-" + row["GPU"].strip().lower().replace("_", "-")
    return Case(label, name, tokens / float(row["Throughput (T/s)"]), model, parallel, software, where)


BERT = "TF BERT-large"
BERT_PREDICTED = {128: 20, 512: 80}  # masked words of a sequence, as that table's source trains
# (begin of a table's name, `software` of its rows -> the stack that stands for it); other software is taken as the name
# of a stack. TorchTitan's rows that were compiled have "compile" in their label.
SOFTWARE = (
    (BERT, {"tensorflow-fp32": "tensorflow-xla-fp32", "tensorflow-tf32": "tensorflow-xla-tf32"}),
    ("BLOOM", {"megatron-2021": "deepspeed-2022"}),
    ("MT-NLG", {"megatron-2021": "deepspeed-2022"}),
    ("BigScience", {"megatron-2021": "deepspeed-2022"}),
    ("NVIDIA", {"composer-bf16": "megatron-core-bf16", "composer-fp8": "megatron-core-fp8"}),
    ("NeMo", {"composer-bf16": "megatron-core-bf16", "composer-fp8": "megatron-core-fp8"}),
    ("Megatron", {"composer-bf16": "megatron-core-bf16", "composer-fp8": "megatron-core-fp8"}),
    ("MaxText", {"composer-bf16": "maxtext-bf16", "composer-fp8": "maxtext-fp8"}),
    ("TorchTitan", {"composer-bf16": "torchtitan-bf16", "composer-fp8": "torchtitan-fp8"}),
)
EAGER = {"torchtitan-bf16": "torchtitan-eager-bf16", "torchtitan-fp8": "torchtitan-eager-fp8"}
# Published models that tables describe by one plain feed-forward network with as many elements, which has the missing
# keys and the gate folded into it: (hidden, heads, that width) -> heads of keys, gate, the networks' own width.
FOLDED = {
    (4096, 32, 18432): (8, 1, 14336),  # Llama 3 8B
    (8192, 64, 35840): (8, 1, 28672),  # Llama 2 and 3 70B
    (16384, 128, 64512): (8, 1, 53248),  # Llama 3.1 405B
    (4096, 32, 16512): (0, 1, 11008),  # Llama 2 7B
    (5120, 40, 20736): (0, 1, 13824),  # Llama 2 13B
    (6144, 48, 19456): (8, 0, 24576),  # Nemotron 4 15B and 22B
    (18432, 96, 56832): (8, 0, 73728),  # Nemotron 4 340B
}
# Tables whose plain models are GPT-3's, which NVIDIA's recipes train with dropout, unlike Llama and Nemotron (0.1,
# github.com/NVIDIA/dgxc-benchmarking, nemo_megatron/gpt3_175b_hydra.yaml).
NEMO = ("NVIDIA", "NeMo")
FSDP_RANKS, FSDP_FROM = 128, 512  # MaxText's rows from so many ranks on shard over so many, as their notes say


def _read_shared_form(row: Mapping[str, str]) -> Case:
    """Reads a row of the shared form, which has a column for each field of a model, its plan, software and cluster.

    A row may leave out columns and fields of the plan. Context parallelism is a column, or `cp2` in the row's label, if
    the table counts its ranks among the data-parallel ones.
    """
    model, label, where = _described(row), row.get("row", "").strip(), row["cluster"]
    software = _software(row.get("set", ""), row["software"], label)
    division = _division(row, model, label)
    parallel, assumed = complete(division, model, software, read_published_cluster(where))
    text = f"{label or _plan(parallel)}{assumed}"
    return Case(text, row.get("group", ""), float(row["measured_s"]), model, parallel, software, where)


def _described(row: Mapping[str, str]) -> Transformer:
    given = {name: _whole(row[name]) for name in Transformer.__struct_fields__ if row.get(name, "").strip()}
    if row.get("set", "").startswith(BERT):
        given.setdefault("predicted_tokens", BERT_PREDICTED.get(given["sequence"], 0))
    known = FOLDED.get((given["hidden"], given["heads"], given.get("feed_forward", 0)))
    if known is not None and not {"kv_heads", "gated", "experts"} & given.keys():
        given |= dict(zip(("kv_heads", "gated", "feed_forward"), known), untied=1, rotary=1)
    elif known is None and row.get("set", "").startswith(NEMO) and not given.get("feed_forward"):
        given.setdefault("dropout", 1)
    return Transformer(**given)


def _software(table: str, software: str, label: str) -> str:
    found = next((known for name, known in SOFTWARE if table.startswith(name)), {}).get(software, software)
    return found if "compile" in label else EAGER.get(found, found)


def _division(row: Mapping[str, str], model: Transformer, label: str) -> Division:
    def number(*names: str) -> int | None:
        return next((_whole(row[name]) for name in names if row.get(name, "").strip()), None)

    names = (("tensor",), ("pipeline",), ("data",), ("chunks",), ("micro_batch",))
    tensor, stages, data, chunks, rows = (number(*name) for name in names)
    context = number("context", "cp") or 1
    folded = re.search(r"\bcp(\d+)\b", label)
    if context == 1 and folded and data and data % int(folded[1]) == 0:
        context = int(folded[1])
        data //= context
    devices = number("devices", "gpus")
    if devices is None and data is None and (found := re.search(r"\bx(\d+)\b", label)):
        devices = int(found[1])
    zero = number("zero")
    given = row.get("recompute", "").strip().lower()
    parallel = row.get("sequence_parallel", "").strip()
    open_ = None in (tensor, stages, rows) or (data is None and devices is None) or not given
    return Division(
        sizes=(tensor, stages, data, chunks, rows),
        devices=devices,
        batch=_whole(row["global_batch"]),
        recompute=_recompute(given) if given else None,
        sequence_parallel=None if open_ and not parallel else parallel.lower() in ("1", "1.0", "true", "yes"),
        zero=None if open_ and zero is None else zero or 0,
        context=context,
        shard=number("shard") or (FSDP_RANKS if _is_hybrid(row, data) else 0),
        stage_layers=_stage_layers(row, model.layers, (stages or 1) * (chunks or 1)),
        experts=number("expert_ranks") or 1,
    )


def _is_hybrid(row: Mapping[str, str], data: int | None) -> bool:
    told = f"FSDP {FSDP_RANKS} x DP" in row.get("note", "")
    return told and data is not None and data >= FSDP_FROM and data % FSDP_RANKS == 0


def _stage_layers(row: Mapping[str, str], layers: int, chunks: int) -> tuple[int, ...]:
    """Returns the number of layers of each chunk if a row's notes tell; () if stages are equal.

    Some tables count embedding and head as a layer each, so that the first and the last chunk have one layer less.
    """
    if given := row.get("stage_layers", "").strip():
        return tuple(int(number) for number in given.split())
    note = row.get("note", "")
    uneven = "first and last stage one fewer" in note or "counted as a layer of first and last stage" in note
    if not uneven or chunks < 2 or (layers + 2) % chunks or layers + 2 == chunks:
        return ()
    each = (layers + 2) // chunks
    return (each - 1, *[each] * (chunks - 2), each - 1)


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Represents a plan of Sailor's artifact.

    Attributes:
        tensor, data: tensor- and data-parallel degrees.
        layers: number of layers of each stage.
        micro_batch, batch: rows of a micro-batch and of a step.
        hosts: device type of each replica's host, stage by stage; a single one: of all hosts.
        recompute: assumed, as it is not published: full if the measured peak memory has no room for the activations.
    """

    tensor: int
    layers: tuple[int, ...]
    data: int
    micro_batch: int
    batch: int
    hosts: tuple[str, ...]
    recompute: Recompute = "none"


class _Sailor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Transformer]
    plans: dict[str, _Plan]
    layers: dict[str, list[MeasuredLayer]]


@cache
def _sailor_plans() -> _Sailor:
    path = FOLDER / "measured" / "sailor.yaml"
    return yaml_files.YamlFile(yaml_files.read_text(path, "plans"), str(path), "plans").decode(_Sailor)


def _sailor(row: Mapping[str, str]) -> Case:
    """Reads a row of Strati et al., "Sailor", SOSP 2025, artifact: measured steps and peak memory, with measured
    layers.

    The table's name contains the model, the devices and, for mixed devices, the network.
    """
    known, table, name = _sailor_plans(), row["table"].strip(), row["plan"].strip()
    mixed, _, network = table.partition("mixed ")
    plan = known.plans[f"{mixed}mixed/{name}" if network else f"{table}/{name}"]
    model = "GPT-Neo-2.7" if "GPT-Neo" in table else "OPT-350"
    parallel = Degrees(
        tensor=plan.tensor,
        stages=len(plan.layers),
        data=plan.data,
        micro_batch=plan.micro_batch,
        batch=plan.batch,
        stage_layers=plan.layers,
        recompute=plan.recompute,
    )
    replicas = parallel.stages * parallel.data
    each = [(host, 1) for host in plan.hosts] if len(plan.hosts) == replicas else [(plan.hosts[0], replicas)]
    hosts = [
        HostEntry(f"host-{i}", [DeviceEntry(kind, plan.tensor)], count, {"fabric": Attachment(1 if network else 4)})
        for i, (kind, count) in enumerate(each)
    ]
    where = Cluster(table, hosts, {"fabric": NetworkEntry(network or "slingshot-11")})
    label = f"{table} {name}" + f" {plan.recompute}" * (plan.recompute != "none")
    layers = known.layers[model]
    if plan.recompute == "full":  # they were measured without
        layers = [
            msgspec.structs.replace(one, backward_s=one.backward_s + one.forward_s) if one.part == "layer" else one
            for one in layers
        ]
    peak_gb = float(row.get("measured_peak_gb") or 0)
    more: dict[str, Any] = {"profile": Profile(layers), "peak_gb": peak_gb}
    measured_s = float(row["measured_s"])
    return Case(label, table, measured_s, known.models[model], parallel, "deepspeed-fp32", where, **more)


def _plan(p: Degrees) -> str:
    text = f"t{p.tensor} p{p.stages} d{p.data}"
    text += f" v{p.chunks}" if p.chunks > 1 else ""
    return f"{text} b{p.micro_batch}x{p.micro_batches}" + (f" {p.recompute}" if p.recompute != "none" else "")


SHARED_FORM = "shared form"  # whose tables are named after their files
_SHARED = frozenset({"layers", "hidden", "heads", "global_batch", "measured_s"})
# Columns of the shared form, and other names under which they are read.
_READ = _SHARED | {*Transformer.__struct_fields__} | {
    "row", "group", "set", "note", "software", "alt_software", "cluster", "tensor", "pipeline", "data", "chunks",
    "micro_batch", "context", "cp", "devices", "gpus", "zero", "recompute", "sequence_parallel", "shard",
    "stage_layers", "expert_ranks",
}  # fmt: skip
OTHER_COLUMNS = {
    "stages": "pipeline", "pp": "pipeline", "tp": "tensor", "dp": "data", "vpp": "chunks", "mbs": "micro_batch",
    "gbs": "global_batch", "batch": "global_batch", "seconds": "measured_s", "step_s": "measured_s", "seq": "sequence",
    "vocab": "vocabulary", "ffn": "feed_forward", "ep": "expert_ranks",
}  # fmt: skip
_VTRAIN = frozenset({"# GPUs", "micro batch", "tensor parallelism", "iteration time (ms)"})
# A file belongs to the first of these all of whose columns it has.
SETS = (
    Published("Megatron SC'21", frozenset({"tflops_gpu", "tp", "pp", "vpp"}), _megatron),
    Published("Korthikanti 2022", frozenset({"iter_s", "tp", "pp", "vpp", "seqpar"}), _korthikanti),
    Published("Megatron SC'21, ZeRO 3", frozenset({"iter_s", "tp", "pp", "vpp", "zero"}), _megatron_zero),
    Published("vTrain multi-node", _VTRAIN | {"Parameters (billion)"}, _vtrain_multi, ranked=True),
    Published("vTrain single node", _VTRAIN, _vtrain_single),
    Published(SHARED_FORM, _SHARED, _read_shared_form),
    Published("Sailor SOSP'25", frozenset({"table", "plan", "measured_s"}), _sailor),
    Published("MosaicML", frozenset({"Throughput (T/s)", "MicroBatchSize", "Sharding Strategy"}), _mosaic),
)


def _with(row: Mapping[str, str], folder: Path, software: str, cluster: str) -> Mapping[str, str]:
    """Returns a row with default software and cluster if it names none; paths of files are relative to the rows'
    folder.
    """
    given = {"software": row.get("software") or software, "cluster": row.get("cluster") or cluster}
    for name, value in given.items():
        if value.endswith((".yaml", ".yml")) and row.get(name) and (folder / value).is_file():
            given[name] = str(folder / value)
    return {**row, **given}


def read(
    path: Path, software: str = "", cluster: str | None = None, strict: bool = False
) -> tuple[Published, list[Case]]:
    """Reads a CSV file of measured steps; returns (the published table that its columns belong to, its rows as cases).

    A row with an impossible plan becomes a case with `error` set.

    Args:
        software, cluster: for rows of the shared form that name none.
        strict: whether unknown columns of the shared form are an error.

    Raises:
        ProgramError: the columns belong to no known table, or a row cannot be read (the error names its line).
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith(COMMENT))
        columns = set(rows.fieldnames or ())
        table = next((one for one in SETS if one.columns <= columns), None)
        if table is None or table.name == SHARED_FORM:
            names = [OTHER_COLUMNS.get(name, name) for name in rows.fieldnames or ()]
            rows.fieldnames, columns = names, set(names)
            table = next((one for one in SETS if one.columns <= columns), None)
        if table is not None and table.name == SHARED_FORM and strict and (unknown := sorted(columns - _READ)):
            raise ProgramError(
                "the table of measured steps has an unknown column",
                given=f"{path}: {', '.join(unknown)}",
                **catalogue.suggest_nearest(unknown[0], dict.fromkeys(_READ)),
            )
        if table is None:
            raise ProgramError(
                "the file's columns belong to no published table that is known",
                given=f"{path}: {', '.join(sorted(columns)) or 'no columns'}",
                expected="; ".join(f"{one.name}: {', '.join(sorted(one.columns))}" for one in SETS),
                action=f"name columns as the {SHARED_FORM} does, of which this file lacks "
                f"{', '.join(sorted(_SHARED - columns))} (docs/guides/stacks.md has an example)",
            )
        cases = []
        for row in rows:
            try:
                cases.append(table.case(_with(row, path.parent, software, cluster or "")))
            except (PlanError, ClusterError) as error:
                nothing = Transformer(1, 1, 1, 1, 1), Degrees(), "", ""
                cases.append(Case(f"line {rows.line_num}", "", math.nan, *nothing, error))
            except (KeyError, ValueError, TypeError, WhaleError) as error:
                raise ProgramError(
                    f"line {rows.line_num} of {path} is no row of {table.name}",
                    given=f"{type(error).__name__}: {error}",
                    expected=f"values in {', '.join(sorted(table.columns))}",
                    action="correct that line of the file, or remove it",
                ) from error
        return (replace(table, name=path.stem) if table.name == SHARED_FORM else table), cases
