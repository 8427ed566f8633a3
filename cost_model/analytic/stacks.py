"""Describes training software: which kernels are fused, what communication is overlapped, what the host spends per
launch.

A stack is a YAML file: the package's are in hardware/stacks, and a user's own has the same fields. A stack that differs
from one of the package's in few fields names it as its `base` and gives only these fields. Every figure has its source
beside it.

Decisions: 0152, 0208.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from cost_model.cluster import yaml_files
from cost_model.hardware import AttentionKernel, catalogue
from cost_model.kernels.compute import SIZE_BYTES
from whale.errors import ClusterError, PlanError

NotNegative = Annotated[float, Meta(ge=0)]
Part = Annotated[float, Meta(ge=0, le=1)]
Module = Literal["core", "norms", "activation", "queries", "network"]
_WHOLE_BYTES = {dtype: math.ceil(size) for dtype, size in SIZE_BYTES.items()}
EXPERT_STREAMS = 4  # TransformerEngine, common/include/transformer_engine/gemm.h, num_streams
# When a pipeline's stages gather and sum what ZeRO 2 and 3 divide (see `Stack.shards_stages`).
When = Literal["pass", "step", "chunk"]


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records how far measured steps under a stack were from predictions, on devices of one efficiency curve.

    Attributes:
        rows: number of published steps that were compared.
        low, high: nine of ten further steps are expected to take between `low` and `high` times the prediction.
    """

    rows: Annotated[int, Meta(ge=1)]
    low: Annotated[float, Meta(gt=0, le=1)]
    high: Annotated[float, Meta(ge=1)]


class Stack(catalogue.Entry, frozen=True):
    """Represents a software stack: its kernels, memory traffic, overlap of communication, and host time per launch.

    Traffic is in bytes read and written in the device's memory.

    Attributes:
        dtype: dtype of activations and matrix products.
        weights_dtype: dtype of the products with layers' weights, if it is another one (FP8).
        quantise_bytes: traffic per operand element to convert to `weights_dtype`, scales and transposes included.
        fused_attention: whether attention never writes its scores to memory.
        attention: the attention kernel that is used if it is fused.
        dropout: whether models are trained with dropout.
        softmax_bytes: traffic of scale, mask and softmax, per score.
        norm_bytes: traffic of a normalisation's forward pass, per element.
        separate_bias: whether the bias of the first attention product is a kernel of its own.
        pointwise_passes: traffic of bias, dropout and residual sum, as a multiple of that of one fused kernel.
        pointwise_kernels: number of kernels that these take.
        hides_tensor_parallel: whether collectives of the tensor-parallel backward pass overlap matrix products.
        hides_sequence_parallel: fraction of sequence parallelism's all-gathers and reduce-scatters that runs, in
            pieces, beside the products that they feed or follow (Transformer Engine's userbuffers); products wait for
            the rest.
        scatter_gather: whether each tensor-parallel rank sends only a part of the activations to the next stage, which
            all-gathers them.
        hides_point_to_point: whether stages do not wait for their sends.
        overlaps_sends: whether, with several chunks per stage, sends overlap the next chunk's kernels.
        accumulate_bytes: traffic per parameter to add one micro-batch's gradient to those of earlier ones.
        gradient_bytes: bytes of one gradient element in the data-parallel reduction.
        gradient_copy_bytes: traffic per parameter of copies into and out of that reduction's buffers.
        hides_data_parallel: whether the gradient reduction starts during the last backward pass, and gathers and
            reductions of ZeRO 2 and 3 overlap kernels; if not, kernels wait for them.
        selective: modules that selective recomputation repeats: scores and softmax (`core`), `norms`, `activation`,
            `queries` (with keys and values), the feed-forward `network` up to its activation.
        selective_part: fraction of a layer's other products and pointwise kernels that selective recomputation also
            repeats.
        drops_unneeded: whether full recomputation leaves out a layer's last product, whose result no backward pass
            reads.
        shards_tensors: whether ZeRO 2 and 3 move each tensor by a collective of its own, whose pieces are copied one by
            one (if not, a layer at once, in place), and gather weights a third time for recomputation.
        optimizer_bytes: traffic per parameter of unscaling, clipping, update and casts.
        loss_forward_bytes, loss_backward_bytes: traffic of the loss per logit.
        logit_bytes: memory per logit at its peak, when the backward pass begins.
        host_us: microseconds of the host per kernel launch of the forward pass, framework included.
        backward_host_us: the same in the backward pass, which the framework runs without the script.
        collective_host_us: microseconds of the host per collective.
        pass_host_us: microseconds of the host once per forward or backward pass of a chunk, for its batch and to
            synchronise with neighbours.
        update_kernels: kernel launches per parameter tensor after the last backward pass.
        compared: how far published steps under this stack were from predictions, by the efficiency curve of their
            devices (`curve_of`).
        compared_experts: whether models with experts are among these; if not, `compared` does not apply to such models.
        step_ms: milliseconds once per step: input data, loss to the host, logging.
        kept_operand_bytes: bytes of an element of a product's operand that is kept for the backward pass; None: as in
            `dtype`.
        kept_inner_bytes: the same of the input of a feed-forward network's activation function, which is cast back
            before its gradient; None: as in `dtype`.
        held_gradient_bytes: bytes of an element of the gradients that are summed over micro-batches; None: as in
            `dtype`.
        shards_stages: when the stages of a pipeline gather parameters and reduce gradients under ZeRO 2 and 3. `pass`:
            in every pass. `step`: once per step, with whole parameters and gradients in between, as under ZeRO 1 (FSDP2
            that does not reshard after the forward pass). `chunk`: as `step`, but the gradients of a chunk are reduced
            after its last micro-batch, if all forward passes come first.
        launches_each_expert: whether the products of a rank's experts are launched one by one on `EXPERT_STREAMS`
            streams (if not, as one grouped kernel).
        dispatches_once: whether a token is sent once to each host that has some of its experts, and from there over the
            links inside once to each rank (if not, once to each expert).
        dispatch_bytes: bytes of an element that is sent to experts; None: as in `dtype`. Results always come back in
            `dtype`.
        hides_experts: fraction of the experts' all-to-all that overlaps kernels of another micro-batch.
        expert_wait_us: microseconds for which a device has no kernel to run in each layer with experts and micro-batch,
            since the host waits until the experts' tokens are counted before it launches what works on them; 0: their
            number stays on the device.
        kernel_time: factor on the time that the devices' efficiency curves give for kernels (fitted; other clocks or
            kernels).
        base_gb: memory of the framework itself on every rank in GB, CUDA context, loaded kernels and libraries' buffers
            included; at least the device's `context_gb`.
        receives_block: whether a stage waits as long for what it receives as the sender for what it sends.
        weighs_experts_inside: whether the router's weights multiply the operand of an expert's last product, so that
            its result need not be kept.
    """

    dtype: str
    fused_attention: bool
    dropout: bool
    softmax_bytes: NotNegative
    norm_bytes: NotNegative
    separate_bias: bool
    pointwise_passes: NotNegative
    pointwise_kernels: Annotated[int, Meta(ge=1)]
    hides_tensor_parallel: bool
    scatter_gather: bool
    hides_point_to_point: bool
    accumulate_bytes: NotNegative
    gradient_bytes: NotNegative
    gradient_copy_bytes: NotNegative
    hides_data_parallel: bool
    shards_tensors: bool
    optimizer_bytes: NotNegative
    loss_forward_bytes: NotNegative
    loss_backward_bytes: NotNegative
    logit_bytes: NotNegative
    host_us: NotNegative
    backward_host_us: NotNegative
    collective_host_us: NotNegative
    pass_host_us: NotNegative
    update_kernels: NotNegative
    step_ms: NotNegative
    attention: AttentionKernel = "flash-1"
    hides_sequence_parallel: Part = 0.0
    overlaps_sends: bool = False
    selective: tuple[Module, ...] = ("core",)
    selective_part: Part = 0.0
    drops_unneeded: bool = False
    compared: dict[str, Compared] = msgspec.field(default_factory=dict)
    compared_experts: bool = False
    weights_dtype: str | None = None
    quantise_bytes: NotNegative = 0.0
    kept_operand_bytes: NotNegative | None = None
    base_gb: NotNegative = 0.0
    receives_block: bool = False
    weighs_experts_inside: bool = False
    kept_inner_bytes: NotNegative | None = None
    held_gradient_bytes: NotNegative | None = None
    shards_stages: When = "pass"
    launches_each_expert: bool = False
    dispatches_once: bool = False
    dispatch_bytes: NotNegative | None = None
    hides_experts: Part = 0.0
    expert_wait_us: NotNegative = 0.0
    kernel_time: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of one element of activations, weights and gradients, rounded up."""
        return _WHOLE_BYTES[self.dtype]

    @property
    def operand_bytes(self) -> float:
        """Returns the bytes of one element of an operand of a product with weights, in the dtype in which it is
        all-gathered.
        """
        return SIZE_BYTES[self.weights_dtype] if self.weights_dtype else self.element_bytes

    @property
    def gradient_element_bytes(self) -> float:
        """Returns the bytes of one element of the gradients that are held between micro-batches."""
        return self.element_bytes if self.held_gradient_bytes is None else self.held_gradient_bytes

    @property
    def repeats_selectively(self) -> bool:
        """Returns True if selective recomputation changes anything; fused attention, e.g., has no scores to
        recompute.
        """
        modules = set(self.selective) - ({"core"} if self.fused_attention else set())
        return bool(modules) or self.selective_part > 0


def find_modules(names: Sequence[str]) -> tuple[Module, ...]:
    """Returns the module names to recompute in the order of `Module`, without duplicates; raises PlanError for unknown
    names.
    """
    known: tuple[Module, ...] = get_args(Module)
    if wrong := [name for name in names if name not in known]:
        raise PlanError(
            "the plan's `selective` names modules that selective recomputation cannot repeat",
            given=", ".join(wrong),
            expected=", ".join(known),
            action="correct these names in `selective` of the job's plan, or leave them out",
        )
    return tuple(name for name in known if name in names)


def curve_of(devices: Iterable[catalogue.Device]) -> str:
    """Returns the name of the devices' efficiency curve; of unlike devices, names in order joined by "+".

    `Stack.compared` uses these names as keys.
    """
    return "+".join(sorted({device.efficiency for device in devices}))


FOLDER = catalogue.FOLDER / "stacks"
KIND = "stack file"


@cache
def stacks() -> Mapping[str, Stack]:
    """Returns the package's stacks by name, e.g. `megatron-2022`."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.yaml"))}


def is_file(name: str) -> bool:
    """Returns True if a stack's name is the path of a YAML file, and not the name of one of the package's stacks."""
    return name.endswith((".yaml", ".yml"))


def stack(name: str) -> Stack:
    """Returns the package's stack of this name, or reads it if the name is the path of a YAML file.

    Raises:
        ClusterError: there is no such stack (the error names the nearest known one), or the file is invalid.
    """
    if is_file(name):
        return read(name)
    found = stacks().get(name)
    if found is None:
        raise ClusterError("there is no such software stack", given=name, **catalogue.suggest_nearest(name, stacks()))
    return found


def read(path: str | Path) -> Stack:
    """Reads a stack file and fills it up from its `base`; ClusterError with line and key if it contains a mistake."""
    file = yaml_files.YamlFile(yaml_files.read_text(path, KIND), str(path), KIND)
    file.data = _complete(file.data, (Path(path).stem,))
    needed = {f.name for f in msgspec.structs.fields(Stack) if f.required} - {"name", "sources"}
    if isinstance(file.data, dict) and len(needed - {*file.data}) > 1:
        raise file.make_error(
            [],
            f"this stack has {len(needed & {*file.data})} of the {len(needed)} fields that every stack needs",
            action="name one of the package's stacks to take the other fields from, e.g. `base: megatron-core-bf16`",
        )
    found = file.decode(Stack)
    for field, dtype in (("dtype", found.dtype), ("weights_dtype", found.weights_dtype)):
        if dtype is not None and dtype not in SIZE_BYTES:
            raise file.make_error([field], "unknown dtype", given=dtype, **catalogue.suggest_nearest(dtype, SIZE_BYTES))
    return found


def _complete(data: Any, names: tuple[str, ...]) -> Any:
    """Returns a stack's fields merged over those of its `base`, recursively; data without a base is returned unchanged.

    Args:
        names: stacks that were read on the way here, to refuse a base that leads back to one of them.
    """
    if not isinstance(data, dict) or "base" not in data:
        return data
    base, own = data["base"], {key: value for key, value in data.items() if key != "base"}
    path = FOLDER / f"{base}.yaml"
    if base in names or not path.is_file():
        known = {one.stem: one for one in FOLDER.glob("*.yaml")}
        raise ClusterError(
            "the field `base` of a stack file names none of the software stacks that the package has",
            given=base,
            **catalogue.suggest_nearest(str(base), known),
        )
    text = yaml_files.read_text(path, KIND)
    fields = _complete(yaml_files.YamlFile(text, str(path), KIND).data, (*names, base))
    sources = own.get("sources") or {}
    merged = {
        **fields,
        "compared": {},
        "compared_experts": False,
        **own,
    }  # measurements that the base was compared with do not apply to another stack
    if isinstance(sources, dict):  # a field's own source comes before that of a base, whose key may name several
        merged["sources"] = {**sources, **{key: text for key, text in fields["sources"].items() if key not in sources}}
    return merged
