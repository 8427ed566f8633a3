"""Translates DeepSpeed's configuration files to Whale's keys, and explains what becomes of their other fields.

Jobs for DeepSpeed have a file `ds_config.json`. `whale config --from ds_config.json` writes the keys of Whale that
correspond to it, and prints for every other field what does the same here, if anything. A run never reads the file
itself: its batch sizes are those of a process, its optimizer and schedule are code here, and its settings for CPUs are
often meant only for accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SCRIPT = "nothing to set: the script does this itself, written for one device"
_OURS = "nothing to set: Whale decides this itself"
_ABSENT = "not supported: Whale has nothing that does this"
_TRACKERS = (
    "what the script logs on `wh.rank() == 0` (docs/guides/monitoring.md); `whale run --logdir DIR` for TensorBoard"
)
_TIMES = "`whale run --trace FILE` and `whale why FILE`, or `whale top`"
# Fields without a corresponding key -> what does the same in Whale.
_NOTES = {
    "aio": _ABSENT,
    "checkpoint": "`wh.CheckpointManager` (docs/guides/checkpoints.md)",
    "comet": _TRACKERS,
    "comms_logger": "`whale run -v`, which ends with tables of what was communicated",
    "compile": "jit_compile=True of a wh.function",
    "compression_training": _ABSENT,
    "csv_monitor": _TRACKERS,
    "curriculum_learning": _SCRIPT,
    "data_efficiency": _SCRIPT,
    "data_types": _OURS,
    "disable_allgather": _OURS,
    "dump_state": "`whale config show`, and debug.log: debug",
    "eigenvalue": _ABSENT,
    "flops_profiler": "`whale profile`, and `whale show plan.json --analyze`",
    "gradient_clipping": "clipping in the script's optimizer (global_clipnorm=1.0): of the whole batch's gradients",
    "gradient_predivide_factor": _OURS,
    "hybrid_engine": _ABSENT,
    "memory_breakdown": "`print(wh.memory_report())`",
    "monitor_config": _TRACKERS,
    "nebula": "`wh.CheckpointManager(..., asynchronous=True)`",
    "optimizer": _SCRIPT,
    "prescale_gradients": _OURS,
    "progressive_layer_drop": _SCRIPT,
    "quantize_training": _ABSENT,
    "scheduler": _SCRIPT,
    "seed": _SCRIPT,
    "sequence_parallel_size": "`whale run --mesh` and `with wh.split():` (docs/guides/split.md)",
    "sparse_attention": _SCRIPT,
    "sparse_gradients": "nothing to set: sparse gradients (tf.IndexedSlices) stay sparse",
    "steps_per_print": _SCRIPT,
    "tensor_parallel": "`with wh.split():` around layers; `whale run --mesh data=2,tensor=4` (docs/guides/split.md)",
    "tensorboard": _TRACKERS,
    "use_data_before_expert_parallelism": _OURS,
    "wall_clock_breakdown": _TIMES,
    "wandb": _TRACKERS,
    "weight_quantization": _ABSENT,
    "zero_allow_untested_optimizer": "nothing to set: ZeRO works with every optimizer",
    "zero_force_ds_cpu_optimizer": "nothing to set: the script's optimizer runs where its state is kept",
}
# Fields with a corresponding key -> that key, and how to set it.
_KEYS = {
    "train_batch_size": "nothing to set: the batch that the script passes is the global one",
    "train_micro_batch_size_per_gpu": "pipeline.micro_batches, a number of parts of the global batch",
    "gradient_accumulation_steps": "pipeline.micro_batches",
    "zero_optimization": "memory.zero for its stage, memory.offload for what it offloads",
    "fp16": "precision.compute_dtype: float16",
    "bf16": "precision.compute_dtype: bfloat16",
    "bfloat16": "precision.compute_dtype: bfloat16",
    "amp": "precision.compute_dtype: float16",
    "activation_checkpointing": "memory.recompute",
    "autotuning": "mesh.auto_parallel",
    "elasticity": "fault.elastic",
    "communication_data_type": "communication.wire_dtype",
    "pipeline": "pipeline.stages, with mesh.auto_parallel, or `with wh.stage():` in the script",
}
# Fields of zero_optimization that are translated.
_ZERO = {"stage", "stage3_param_persistence_threshold", "offload_optimizer", "offload_param", "cpu_offload"}
_ZERO |= {"cpu_offload_params"}
_DTYPES = {"fp16": "float16", "float16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16", "bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Translation:
    """Holds the translation of a DeepSpeed configuration.

    Attributes:
        keys: keys of Whale's configuration -> values.
        sources: the same keys -> the field that each comes from.
        notes: the other fields -> what does the same here, or why nothing is needed.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def describe_field(name: str) -> str:
    """Returns what to write in Whale for a field of DeepSpeed's (a dotted path); "" if DeepSpeed has no such field."""
    first = name.partition(".")[0]
    return _KEYS.get(first) or _NOTES.get(first, "")


def is_deepspeed(fields: Mapping[str, Any]) -> bool:
    """Returns True if any key of a file is a field of DeepSpeed's configuration."""
    return any(describe_field(name) for name in fields)


def translate(fields: Mapping[str, Any]) -> Translation:
    """Translates a DeepSpeed configuration to keys of Whale's.

    Args:
        fields: content of ds_config.json.
    """
    found = Translation()
    for name, key, value in _find_keys(fields):
        found.keys[key], found.sources[key] = value, name
    for name, note in _find_notes(fields):
        found.notes[name] = note
    for name, value in fields.items():
        if name not in _KEYS and not (isinstance(value, Mapping) and value.get("enabled") is False):
            found.notes[name] = describe_field(name) or "unknown: DeepSpeed's documentation has no such field"
    return found


def _find_keys(fields: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields (DeepSpeed's field, Whale's key, value) for each field that corresponds to a key of Whale's."""
    zero = _part(fields, "zero_optimization")
    if level := _whole(zero.get("stage", int(fields.get("zero_optimization") is True))):
        yield "zero_optimization.stage", "memory.zero", level
    if (kept := _whole(zero.get("stage3_param_persistence_threshold"))) and level == 3:
        yield "zero_optimization.stage3_param_persistence_threshold", "memory.zero_min_bytes", 4 * kept
    for name, older, what in (
        ("offload_optimizer", "cpu_offload", "optimizer"),
        ("offload_param", "cpu_offload_params", "parameters"),
    ):
        if _part(zero, name).get("device", "none") != "none" or zero.get(older) is True:
            yield f"zero_optimization.{name if name in zero else older}", "memory.offload", what
    for name, dtype in (("amp", "float16"), ("bfloat16", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16")):
        if _part(fields, name).get("enabled") is True:
            yield f"{name}.enabled", "precision.compute_dtype", dtype
    scale = _part(fields, "fp16").get("loss_scale")
    if isinstance(scale, (int, float)) and scale > 0 and _part(fields, "fp16").get("enabled") is True:
        yield "fp16.loss_scale", "precision.loss_scale", float(scale)
    if (steps := _whole(fields.get("gradient_accumulation_steps"))) > 1:
        yield "gradient_accumulation_steps", "pipeline.micro_batches", steps
    if "activation_checkpointing" in fields:
        yield "activation_checkpointing", "memory.recompute", "auto"
    if _part(fields, "autotuning").get("enabled") is True:
        yield "autotuning.enabled", "mesh.auto_parallel", True
    if _part(fields, "elasticity").get("enabled") is True:
        yield "elasticity.enabled", "fault.elastic", "memory"
    if dtype := _DTYPES.get(str(fields.get("communication_data_type")).lower(), ""):
        yield "communication_data_type", "communication.wire_dtype", dtype


def _find_notes(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (field of DeepSpeed's, note) for fields that a key of Whale's does not fully replace; the note says what
    to add.
    """
    whole, part = _whole(fields.get("train_batch_size")), _whole(fields.get("train_micro_batch_size_per_gpu"))
    steps = _whole(fields.get("gradient_accumulation_steps"))
    if whole:
        yield "train_batch_size", f"the script gives its step {whole} rows: the batch of all ranks together"
    elif "train_batch_size" in fields:
        yield "train_batch_size", _KEYS["train_batch_size"]
    if part:
        rows = f"the script gives its step {part * max(1, steps)} rows times the number of ranks"
        if whole and not steps:
            rows = f"pipeline.micro_batches: {whole} / {part} / the number of ranks, if that is more than 1"
        if not (whole and steps):
            yield "train_micro_batch_size_per_gpu", rows
    zero = _part(fields, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        if _part(zero, name).get("device") == "nvme":
            yield f"zero_optimization.{name}", "offloaded to the host's memory instead of a disk"
    if _part(zero, "offload_optimizer") or _part(zero, "offload_param") or zero.get("cpu_offload") is True:
        yield "zero_optimization.offload", "only for ranks with an accelerator; on CPUs leave memory.offload out"
    if others := sorted(zero.keys() - _ZERO):
        yield f"zero_optimization: {', '.join(others)}", _OURS
    if "activation_checkpointing" in fields:
        yield "activation_checkpointing", "auto chooses what is kept; marked: what `wh.checkpoint` marks in the script"
    if "pipeline" in fields:
        yield "pipeline", _KEYS["pipeline"]


def _part(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a mapping inside the file; {} if the field is missing or no mapping."""
    found = fields.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(value: Any) -> int:
    """Returns a number of at least 1 as an integer; 0 for anything else, such as "auto"."""
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1 else 0
