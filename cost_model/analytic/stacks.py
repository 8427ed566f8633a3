"""Describes training software: which kernels are fused, which communication is hidden, the host's cost of a launch.

A stack is a file: those of the package are in hardware/stacks, and a user's own has the same fields. One that differs
from another in a few names it as its `base` and gives these. Every figure has its source beside it.

Decision: 0152.
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
EXPERT_STREAMS = 4  # TransformerEngine, common/include/transformer_engine/gemm.h, num_streams
# When a pipeline's stages gather and sum what ZeRO 2 and 3 divide (see `Stack.shards_stages`).
When = Literal["pass", "step", "chunk"]


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distance of measured steps under a stack from predictions, on devices of one efficiency curve.

    Attributes:
        rows: published steps that were compared.
        low, high: of measured / predicted, between which nine of ten further steps are expected.
    """

    rows: Annotated[int, Meta(ge=1)]
    low: Annotated[float, Meta(gt=0, le=1)]
    high: Annotated[float, Meta(ge=1)]


class Stack(catalogue.Entry, frozen=True):
    """One software stack.

    Attributes:
        dtype: of activations and matrix products.
        weights_dtype: of the products with layers' weights, where it is another one; quantise_bytes: memory traffic per
            operand element to convert to it, scales and transposes included.
        fused_attention: attention never writes its scores; attention: by which kernel.
        dropout: whether the model is trained with dropout.
        softmax_bytes: memory traffic of scale, mask and softmax, per score.
        norm_bytes: memory traffic of a normalisation's forward pass, per element.
        separate_bias: the bias of the first attention product is a kernel of its own.
        pointwise_passes, pointwise_kernels: traffic (of one fused kernel = 1) and kernels of bias, dropout, sum.
        hides_tensor_parallel: collectives of the tensor-parallel backward pass run behind matrix products.
        hides_sequence_parallel: part of sequence parallelism's gathers and scatters that runs, in pieces, beside the
            products that they feed or follow (Transformer Engine's userbuffers); products wait for the rest.
        scatter_gather: tensor-parallel ranks each send a part to the next stage, which gathers it.
        hides_point_to_point: stages do not wait for their sends; overlaps_sends: with several chunks a stage, sends run
            beside the next chunk's kernels.
        accumulate_bytes: memory traffic per parameter to add one micro-batch's gradient.
        gradient_bytes: of one gradient element in the data-parallel reduction.
        gradient_copy_bytes: memory traffic per parameter around that reduction.
        hides_data_parallel: the reduction starts during the last backward pass; what ZeRO 2 and 3 gather and reduce
            runs beside kernels. Else kernels wait for it.
        selective: what selective recomputation repeats: scores and softmax (`core`), `norms`, `activation`, `queries`
            (with keys and values), the feed-forward `network` up to its activation.
        selective_part: part of a layer's other products and pointwise kernels that it repeats besides.
        drops_unneeded: full recomputation leaves out a layer's last product, whose result no backward pass reads.
        shards_tensors: ZeRO 2 and 3 move each tensor by a collective of its own, whose pieces are copied one by one
            (else a layer's at once, in place), and gather weights once more for what is computed again.
        optimizer_bytes: memory traffic per parameter of unscaling, clipping, update and casts.
        loss_forward_bytes, loss_backward_bytes: memory traffic per logit.
        logit_bytes: held per logit at the peak, when the backward pass begins.
        host_us: what the host spends per kernel launch of the forward pass, framework included.
        backward_host_us: the same in the backward pass, which the framework runs without the script.
        collective_host_us: the same per collective.
        pass_host_us: once per forward or backward pass of a chunk: its batch, synchronising with neighbours.
        update_kernels: launches per parameter tensor after the last backward pass.
        compared: how far published steps under it were from predictions, by the efficiency curve of their devices
            (`curve_of`).
        compared_experts: whether models with experts are among these; else nothing is known of such ones.
        step_ms: once per step: data, loss to the host, logging.
        kept_operand_bytes: of an element of a product's operand that is kept for the backward pass, where it is not
            kept in `dtype`.
        kept_inner_bytes: the same of what goes into a network's activation, which is cast back before its gradient.
        held_gradient_bytes: of an element of the gradients that micro-batches are added to, where it is not `dtype`.
        shards_stages: when the stages of a pipeline gather parameters and sum gradients under ZeRO 2 and 3: in each
            `pass`; once a `step`, both lying whole in between, as under ZeRO 1 (FSDP2 that does not reshard after the
            forward pass); the same, but a `chunk`'s gradients are summed when its last micro-batch has passed, where
            all forward passes come first.
        launches_each_expert: the products of a rank's experts are launched one by one, on `EXPERT_STREAMS` streams
            (else as one kernel).
        dispatches_once: a token goes once to each host that has some of its experts, and from there to these over the
            links inside (else once to each expert).
        dispatch_bytes: of an element of what is sent to experts, where it is not sent in `dtype` (what comes back is).
        hides_experts: part of what experts exchange that runs beside kernels of another micro-batch.
        kernel_time: of what the devices' curves say that kernels take (as fitted: clocks, kernels that are others).
        base_gb: memory of the framework's own on every rank, context, loaded kernels and libraries' buffers included;
            at least the device's `context_gb`.
        receives_block: a stage waits for what it receives as long as the sender for what it sends: nothing runs beside.
        weighs_experts_inside: the router's weights multiply what goes into an expert's last product, whose result is
            not kept then.
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
    kernel_time: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of an element of activations, weights and gradients."""
        return math.ceil(SIZE_BYTES[self.dtype])

    @property
    def operand_bytes(self) -> float:
        """Returns the bytes of an element of the operands of products with layers' weights, as they are gathered."""
        return SIZE_BYTES[self.weights_dtype] if self.weights_dtype else self.element_bytes

    @property
    def gradient_element_bytes(self) -> float:
        """Returns the bytes of an element of the gradients that lie there between micro-batches."""
        return self.element_bytes if self.held_gradient_bytes is None else self.held_gradient_bytes

    @property
    def repeats_selectively(self) -> bool:
        """Tells whether selective recomputation has something to leave out: fused attention keeps no scores."""
        modules = set(self.selective) - ({"core"} if self.fused_attention else set())
        return bool(modules) or self.selective_part > 0


def find_modules(names: Sequence[str]) -> tuple[Module, ...]:
    """Returns the modules of these names that selective recomputation may repeat; raises PlanError for others."""
    known: tuple[Module, ...] = get_args(Module)
    if wrong := [name for name in names if name not in known]:
        raise PlanError("selective recomputation cannot repeat this", given=", ".join(wrong), expected=", ".join(known))
    return tuple(name for name in known if name in names)


def curve_of(devices: Iterable[catalogue.Device]) -> str:
    """Returns the efficiency curve of devices, or those of unlike ones in order, as `Stack.compared` has them."""
    return "+".join(sorted({device.efficiency for device in devices}))


FOLDER = catalogue.FOLDER / "stacks"
KIND = "stack file"


@cache
def stacks() -> Mapping[str, Stack]:
    """Returns the package's stacks by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.yaml"))}


def is_file(name: str) -> bool:
    """Tells whether a stack is named by its file."""
    return name.endswith((".yaml", ".yml"))


def stack(name: str) -> Stack:
    """Returns the stack of a name, or that of a file (YAML).

    Raises:
        ClusterError: there is no such stack (the error names the nearest known one), or the file is none.
    """
    if is_file(name):
        return read(name)
    found = stacks().get(name)
    if found is None:
        raise ClusterError("there is no such software stack", given=name, **catalogue.suggest_nearest(name, stacks()))
    return found


def read(path: str | Path) -> Stack:
    """Reads a stack's file; ClusterError says line and key of a mistake."""
    file = yaml_files.YamlFile(yaml_files.read_text(path, KIND), str(path), KIND)
    file.data = _complete(file.data, (Path(path).stem,))
    needed = {f.name for f in msgspec.structs.fields(Stack) if f.required} - {"name", "sources"}
    if isinstance(file.data, dict) and len(needed - {*file.data}) > 1:
        raise file.make_error(
            [],
            f"it has {len(needed & {*file.data})} of the {len(needed)} fields that every stack needs",
            action="name one of the package's stacks, from which others are taken: `base: megatron-core-bf16`",
        )
    found = file.decode(Stack)
    for field, dtype in (("dtype", found.dtype), ("weights_dtype", found.weights_dtype)):
        if dtype is not None and dtype not in SIZE_BYTES:
            raise file.make_error([field], "unknown dtype", given=dtype, **catalogue.suggest_nearest(dtype, SIZE_BYTES))
    return found


def _complete(data: Any, names: tuple[str, ...]) -> Any:
    """Returns a stack's fields with those of its base, of which its own take the place; `names`: those read."""
    if not isinstance(data, dict) or "base" not in data:
        return data
    base, own = data["base"], {key: value for key, value in data.items() if key != "base"}
    path = FOLDER / f"{base}.yaml"
    if base in names or not path.is_file():
        known = {one.stem: one for one in FOLDER.glob("*.yaml")}
        raise ClusterError(
            "a stack's base is none of the package's", given=base, **catalogue.suggest_nearest(str(base), known)
        )
    text = yaml_files.read_text(path, KIND)
    fields = _complete(yaml_files.YamlFile(text, str(path), KIND).data, (*names, base))
    sources = own.get("sources") or {}
    merged = {
        **fields,
        "compared": {},
        "compared_experts": False,
        **own,
    }  # what its base was compared with says nothing of another stack
    if isinstance(sources, dict):  # a field's own source comes before that of a base, whose key may name several
        merged["sources"] = {**sources, **{key: text for key, text in fields["sources"].items() if key not in sources}}
    return merged
