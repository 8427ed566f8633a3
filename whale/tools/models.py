"""Captures the training steps of well-known models from their hyper-parameters, without allocating weights.

A model file is a family and its hyper-parameters, as YAML:

    family: gpt
    layers: 24
    hidden: 1024
    heads: 16
    sequence: 1024
    vocabulary: 50304
    batch: 32

The step is built in a TensorFlow 1 graph, whose variables take no memory before they are initialised, so that models of
any size can be captured, like the graph of any session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import tensorflow as tf
from msgspec import Meta

from cost_model.cluster import yaml_files
from whale.capture.function import capture_function
from whale.capture.v1 import GraphCapture
from whale.errors import PlanError
from whale.ir.program import Program
from whale.runtime.scopes import enter_path, mark_held, mark_recomputed

_v1 = tf.compat.v1
RATE = 1e-3
Count = Annotated[int, Meta(ge=1)]
_MASKED = 0.15  # part of a row's words that is masked if a description does not say how many
Weight = Callable[[str, Sequence[int]], tf.Tensor]
Scope = Callable[[], AbstractContextManager[None]]
Batch = Mapping[str, tf.Tensor]


def capture_program(d: Description, mark_gradients: bool = False) -> Program:
    """Returns the captured step of a description, not normalised; allocates no weights.

    If the description recomputes, activations are marked for ``PlanSettings.memory.recompute="marked"``, and gradients
    too.

    Args:
        mark_gradients: mark gradients in any case.
    """
    with tf.Graph().as_default() as graph:
        batch = {name: _v1.placeholder(dtype, shape, name) for name, (shape, dtype) in list_inputs(d).items()}
        made: dict[str, Any] = {}

        loss, updates = _build_step(d, batch, made, _Handle)
        capture = GraphCapture(graph, mark_gradients=mark_gradients or d.recompute != "none")
        captured = capture.capture([loss, *updates], {t: tuple(t.shape.as_list()) for t in batch.values()})
    return _mark_compiled(captured.program) if d.xla else captured.program


def _mark_compiled(program: Program) -> Program:
    """Marks all nodes of a program as compiled by XLA."""
    nodes = tuple(replace(node, marks=node.marks.replace_marks(compiled=True)) for node in program.nodes)
    return replace(program, nodes=nodes, functions={n: _mark_compiled(p) for n, p in program.functions.items()})


class _Handle:
    """Represents a variable without an initial value, which is several times as fast to build as a `tf.Variable`."""

    def __init__(self, name: str, shape: Sequence[int], dtype: str) -> None:
        self.handle = tf.raw_ops.VarHandleOp(dtype=tf.as_dtype(dtype), shape=shape, shared_name=name, name=name)
        self._dtype, self._shape = tf.as_dtype(dtype), shape

    def read_value(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._dtype)
        value.set_shape(self._shape)
        return value


def make_step(d: Description) -> Callable[..., tf.Tensor]:
    """Returns the same step as a Python function of the batch's tensors, with allocated weights; for small models."""
    made: dict[str, Any] = {}

    def variable(name: str, shape: Sequence[int], dtype: str) -> Any:
        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

    def step(*tensors: tf.Tensor) -> tf.Tensor:
        loss, _ = _build_step(d, dict(zip(list_inputs(d), tensors)), made, variable)
        return loss

    return tf.function(step, jit_compile=True) if d.xla else step


def trace_program(d: Description) -> Program:
    """Returns the program of `make_step`, captured as a user's function is; compare `capture_program`."""
    specs = [tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in list_inputs(d).items()]
    return capture_function(make_step(d), specs, {}, mark_gradients=d.recompute != "none").program


def _build_step(
    d: Description, batch: Batch, made: dict[str, Any], variable: Callable[[str, Sequence[int], str], Any]
) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Builds the forward pass, the backward pass, and an update of each weight in the current graph.

    Args:
        batch: the batch's tensors by name.
        made: filled with the variables by name.
        variable: (name, shape, dtype) -> a new variable.

    Returns:
        (the loss, the update operations).
    """
    values: dict[str, tf.Tensor] = {}

    def make_held(name: str, shape: Sequence[int]) -> Any:
        if name not in made:
            made[name] = variable(name, shape, d.dtype)
        return made[name]

    def make_weight(name: str, shape: Sequence[int]) -> tf.Tensor:
        if name not in values:
            values[name] = make_held(name, shape).read_value()
        return values[name]

    loss = compute_loss(d, make_weight, batch)
    gradients = tf.gradients(loss, list(values.values()))
    updates = []
    rate, some, most, small = (tf.constant(x, d.dtype) for x in (RATE, 0.9, 0.999, 1e-7))
    for (name, value), gradient in zip(values.items(), gradients):
        shape = value.shape.as_list()
        weights = make_held(name, shape)
        if d.optimizer == "sgd" and isinstance(gradient, tf.IndexedSlices):  # rows of a table
            ids, step = gradient.indices, rate * gradient.values
            updates.append(tf.raw_ops.ResourceScatterSub(resource=weights.handle, indices=ids, updates=step))
            continue
        gradient = tf.convert_to_tensor(gradient)
        if d.optimizer == "sgd":
            done = tf.raw_ops.ResourceApplyGradientDescent(var=weights.handle, alpha=rate, delta=gradient)
        else:
            done = tf.raw_ops.ResourceApplyAdam(
                var=weights.handle, m=make_held(f"{name}/m", shape).handle, v=make_held(f"{name}/v", shape).handle,
                beta1_power=some, beta2_power=most, lr=rate, beta1=some, beta2=most, epsilon=small, grad=gradient,
            )  # fmt: skip
        updates.append(done)
    return loss, updates


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="family"):
    """Holds the fields that all families have.

    Attributes:
        batch: rows of the global batch.
        dtype: element type of weights and activations.
        xla: XLA compiles the step.
    """

    recompute: ClassVar[str] = "none"
    tensor_parallel: ClassVar[bool] = False
    sequence_parallel: ClassVar[bool] = False
    batch: Count
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    optimizer: Literal["adam", "sgd"] = "adam"
    xla: bool = False


class _Transformer(_Model, frozen=True, kw_only=True):
    """Holds the fields of transformers.

    ``recompute: full`` keeps only the inputs of layers and recomputes the rest for the backward pass; ``selective``
    recomputes attention scores and their softmax (Korthikanti et al., 2022, section 5).
    """

    recompute: Literal["none", "selective", "full"] = "none"  # type: ignore[misc]
    layers: Count
    hidden: Count
    heads: Count
    feed_forward: int = 0  # 0: 4 x hidden

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise PlanError(
                "hidden is not a multiple of heads",
                given=f"hidden={self.hidden}, heads={self.heads}",
                expected="a whole number of columns for each attention head",
                action="change hidden or heads in the model's description",
            )

    @property
    def inner(self) -> int:
        """Returns the width of the hidden layer of the feed-forward network."""
        return self.feed_forward or 4 * self.hidden


class _Text(_Transformer, frozen=True, kw_only=True):
    sequence: Count
    vocabulary: Count


class _DividedText(_Text, frozen=True, kw_only=True):
    """Holds the fields of text transformers that can be tensor parallel.

    ``tensor_parallel``: all ranks shard the weights of layers, embedding and logits, as under ``wh.split``;
    ``sequence_parallel``: ranks also shard the sequence of activations between products, as with ``sequence=1``.
    """

    tensor_parallel: bool = False  # type: ignore[misc]
    sequence_parallel: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_parallel and not self.tensor_parallel:
            raise PlanError(
                "sequence_parallel needs tensor_parallel: it divides the activations between split products",
                given="sequence_parallel without tensor_parallel",
                expected="both",
                action="set tensor_parallel: true, or leave sequence_parallel out",
            )


class Gpt(_DividedText, frozen=True, kw_only=True, tag="gpt"):
    """Describes a decoder with a causal mask; the logits are computed with the embedding's weights."""


class Bert(_DividedText, frozen=True, kw_only=True, tag="bert"):
    """Describes an encoder with logits for the masked words of each row only (Devlin et al., 2019, section 3.1).

    ``masked``: number of these words; 0: 15 % of the sequence.
    """

    masked: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masked > self.sequence:
            raise PlanError(
                "more words are masked than a row has",
                given=f"masked={self.masked}, sequence={self.sequence}",
                expected="masked of at most sequence; 0 stands for 15 % of it",
                action="give a smaller masked",
            )

    @property
    def predicted(self) -> int:
        """Returns the number of words of a row that are masked and predicted."""
        return self.masked or max(1, round(_MASKED * self.sequence))


class T5(_Text, frozen=True, kw_only=True, tag="t5"):
    """Describes an encoder and a decoder with ``layers`` layers each, on sequences of equal length."""


class Moe(_Text, frozen=True, kw_only=True, tag="moe"):
    """Describes a GPT whose feed-forward layers are experts; each token goes to one expert.

    An expert takes at most ``capacity`` times its even share of the tokens.
    """

    experts: Count
    capacity: Annotated[float, Meta(gt=0)] = 1.25


class Vit(_Transformer, frozen=True, kw_only=True, tag="vit"):
    """Describes a vision transformer on square images."""

    image: Count = 224
    patch: Count = 16
    classes: Count = 1000


class Resnet(_Model, frozen=True, kw_only=True, tag="resnet"):
    """Describes a ResNet with bottleneck blocks (He et al., 2016).

    ``blocks``: number of blocks in each group; 3, 4, 6, 3 for ResNet-50.
    """

    blocks: Annotated[tuple[Count, ...], Meta(min_length=1)] = (3, 4, 6, 3)
    width: Count = 64
    image: Count = 224
    classes: Count = 1000
    optimizer: Literal["adam", "sgd"] = "sgd"


class Dlrm(_Model, frozen=True, kw_only=True, tag="dlrm"):
    """Describes a recommendation model (Naumov et al., 2019): embeddings, dense features, their products, two
    perceptrons.

    ``split``: ranks shard the tables by rows, as under ``wh.split(dim=0)``.
    """

    tables: Count
    rows: Count
    factors: Count = 64
    dense: Count = 13
    bottom: tuple[Count, ...] = (512, 256)
    top: tuple[Count, ...] = (1024, 512)
    optimizer: Literal["adam", "sgd"] = "sgd"
    split: bool = False


class Classifier(_Model, frozen=True, kw_only=True, tag="classifier"):
    """Describes a dense layer and a softmax over very many classes.

    ``split``: ranks shard the classes, as under ``wh.split``.
    """

    classes: Count
    features: Count = 512
    inputs: Count = 512
    split: bool = False


FAMILIES = (Gpt, Bert, T5, Moe, Vit, Resnet, Dlrm, Classifier)
Description = Gpt | Bert | T5 | Moe | Vit | Resnet | Dlrm | Classifier


def read_description(path: str | Path) -> Description:
    """Reads a model file; the error for a mistake in it names line and key."""
    file = yaml_files.YamlFile(yaml_files.read_text(path, "model file"), str(path), "model file")
    return file.decode(Description)  # type: ignore[arg-type]


def list_inputs(d: Description) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns {name: (shape, dtype)} of the batch's tensors."""
    if isinstance(d, Vit | Resnet):
        return {"images": ((d.batch, d.image, d.image, 3), d.dtype), "labels": ((d.batch,), "int32")}
    if isinstance(d, Dlrm):
        return {"dense": ((d.batch, d.dense), d.dtype), "ids": ((d.batch, d.tables), "int32"),
                "labels": ((d.batch,), "int32")}  # fmt: skip
    if isinstance(d, Classifier):
        return {"features": ((d.batch, d.inputs), d.dtype), "labels": ((d.batch,), "int32")}
    if isinstance(d, Bert):
        words = ((d.batch, d.predicted), "int32")
        return {"tokens": ((d.batch, d.sequence), "int32"), "positions": words, "labels": words}
    names = ("tokens", "labels", "source") if isinstance(d, T5) else ("tokens", "labels")
    return dict.fromkeys(names, ((d.batch, d.sequence), "int32"))


def compute_loss(d: Description, weight: Weight, batch: Batch) -> tf.Tensor:
    """Builds the forward pass of a description; returns the mean loss of the batch.

    Args:
        weight: (name, shape) -> the value of a weight.
        batch: the batch's tensors by name.
    """
    scope = "split_0(sequence=1)" if d.sequence_parallel else "split_0"
    with enter_path(scope) if d.tensor_parallel else nullcontext():
        return _compute_loss(d, weight, batch)


def _compute_loss(d: Description, weight: Weight, batch: Batch) -> tf.Tensor:
    if isinstance(d, Resnet):
        return _compute_mean(_resnet(d, weight, batch["images"]), batch["labels"])
    if isinstance(d, Vit):
        return _compute_mean(_vit(d, weight, batch["images"]), batch["labels"])
    if isinstance(d, Dlrm):
        return _compute_mean(_dlrm(d, weight, batch["dense"], batch["ids"]), batch["labels"])
    if isinstance(d, Classifier):
        hidden = tf.tanh(_dense(weight, "features", batch["features"], d.features))
        with enter_path("split_0") if d.split else nullcontext():
            return _compute_mean(hidden @ weight("classes", (d.features, d.classes)), batch["labels"])
    table = weight("embedding", (d.vocabulary, d.hidden))
    memory = None
    if isinstance(d, T5):
        memory = _apply_layers(d, weight, "encoder", _embed(d, weight, table, batch["source"]), False, tf.nn.relu)
    hidden = _embed(d, weight, table, batch["tokens"])
    activation = tf.nn.relu if isinstance(d, T5) else tf.nn.gelu
    hidden = _apply_layers(d, weight, "layers", hidden, not isinstance(d, Bert), activation, memory)
    if isinstance(d, Bert):
        hidden = tf.gather(hidden, batch["positions"], batch_dims=1)
    flat = tf.reshape(hidden, (-1, d.hidden))
    return _compute_mean(tf.matmul(flat, table, transpose_b=True), tf.reshape(batch["labels"], (-1,)))


def _compute_mean(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _embed(d: Any, weight: Weight, table: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, tokens) + weight("positions", (d.sequence, d.hidden))


def _apply_layers(
    d: Any,
    weight: Weight,
    name: str,
    x: tf.Tensor,
    causal: bool,
    activation: Callable[..., tf.Tensor],
    memory: tf.Tensor | None = None,
) -> tf.Tensor:
    core: Scope = mark_recomputed if d.recompute == "selective" else nullcontext
    for i in range(d.layers):
        at = f"{name}/{i}"
        if d.recompute == "full":
            x = mark_held(x)
        x = x + attention(weight, f"{at}/attention", norm(weight, f"{at}/norm1", x), d.heads, causal, core=core)
        if memory is not None:
            x = x + attention(weight, f"{at}/cross", norm(weight, f"{at}/norm3", x), d.heads, memory=memory, core=core)
        normed = norm(weight, f"{at}/norm2", x)
        if isinstance(d, Moe):
            x = x + _experts(weight, f"{at}/experts", normed, d.inner, d.experts, d.capacity)
        else:
            x = x + feed_forward(weight, f"{at}/feed_forward", normed, d.inner, activation)
    return norm(weight, f"{name}/norm", x)


def _vit(d: Vit, weight: Weight, images: tf.Tensor) -> tf.Tensor:
    kernel = weight("patches/kernel", (d.patch, d.patch, 3, d.hidden))
    patches = tf.nn.conv2d(images, kernel, d.patch, "VALID")
    count = (d.image // d.patch) ** 2
    x = tf.reshape(patches, (d.batch, count, d.hidden)) + weight("positions", (count, d.hidden))
    x = _apply_layers(d, weight, "layers", x, False, tf.nn.gelu)
    return _dense(weight, "head", tf.reduce_mean(x, 1), d.classes)


def _resnet(d: Resnet, weight: Weight, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(_convolution(weight, "stem", images, d.width, 7, 2))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for group, blocks in enumerate(d.blocks):
        for block in range(blocks):
            stride = 2 if group and not block else 1
            x = _bottleneck(weight, f"group{group}/{block}", x, d.width << group, stride)
    return _dense(weight, "head", tf.reduce_mean(x, (1, 2)), d.classes)


def _perceptron(weight: Weight, name: str, x: tf.Tensor, widths: Sequence[int]) -> tf.Tensor:
    for i, width in enumerate(widths):
        x = tf.nn.relu(_dense(weight, f"{name}/{i}", x, width))
    return x


def _dlrm(d: Dlrm, weight: Weight, features: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    bottom = _perceptron(weight, "bottom", features, [*d.bottom, d.factors])
    with enter_path("split_0(dim=0)") if d.split else nullcontext():
        rows = [tf.gather(weight(f"table{i}", (d.rows, d.factors)), ids[:, i]) for i in range(d.tables)]
    stacked = tf.stack([bottom, *rows], 1)
    products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), (d.batch, (d.tables + 1) ** 2))
    return _dense(weight, "head", _perceptron(weight, "top", tf.concat([bottom, products], 1), d.top), 2)


# The functions below build layers of TensorFlow ops. Their weights come from `weight`: eager variables, or variables of
# a graph without values.
def _dense(weight: Weight, name: str, x: tf.Tensor, width: int) -> tf.Tensor:
    """Multiplies the last dimension of ``x`` by a kernel, and adds a bias."""
    shape = x.shape.as_list()
    flat = tf.reshape(x, (-1, shape[-1])) if len(shape) > 2 else x
    flat = tf.nn.bias_add(
        tf.matmul(flat, weight(f"{name}/kernel", (shape[-1], width))), weight(f"{name}/bias", (width,))
    )
    return tf.reshape(flat, (*shape[:-1], width)) if len(shape) > 2 else flat


def norm(weight: Weight, name: str, x: tf.Tensor) -> tf.Tensor:
    """Applies layer normalisation over the last dimension, with scale and shift."""
    width = x.shape[-1]
    mean = tf.reduce_mean(x, -1, keepdims=True)
    centred = x - mean
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-5) * weight(f"{name}/scale", (width,)) + weight(
        f"{name}/shift", (width,)
    )


def attention(
    weight: Weight,
    name: str,
    x: tf.Tensor,
    heads: int,
    causal: bool = False,
    memory: tf.Tensor | None = None,
    core: Scope = nullcontext,
) -> tf.Tensor:
    """Computes multi-head self-attention, or cross-attention if ``memory`` is given.

    Args:
        name: prefix of the weights' names.
        causal: mask later positions.
        memory: the sequence that keys and values are computed from; None: ``x``.
        core: context manager under which scores and their softmax are built, to mark them for recomputation.
    """
    rows, length, width = x.shape.as_list()
    size = width // heads

    def split_heads(t: tf.Tensor, count: int) -> list[tf.Tensor]:
        # Columns are ordered head by head, as in Megatron-LM, so that a shard of columns has whole heads.
        split = tf.reshape(t, (rows, t.shape[1], heads, count, size))
        return [tf.transpose(part, (0, 2, 1, 3)) for part in tf.unstack(split, axis=3)]

    if memory is None:
        query, key, value = split_heads(_dense(weight, f"{name}/qkv", x, 3 * width), 3)
    else:
        (query,) = split_heads(_dense(weight, f"{name}/q", x, width), 1)
        key, value = split_heads(_dense(weight, f"{name}/kv", memory, 2 * width), 2)
    with core():
        scores = tf.matmul(query, key, transpose_b=True) * tf.constant(size**-0.5, x.dtype)
        if causal:
            scores += tf.constant(_mask(length), x.dtype)
        shares = tf.nn.softmax(scores)
    mixed = tf.matmul(shares, value)
    return _dense(weight, f"{name}/out", tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (rows, length, width)), width)


def _mask(length: int) -> list[list[float]]:
    return [[0.0 if column <= row else -1e4 for column in range(length)] for row in range(length)]


def feed_forward(
    weight: Weight, name: str, x: tf.Tensor, inner: int, activation: Callable[..., tf.Tensor]
) -> tf.Tensor:
    """Computes a feed-forward network: two dense layers with an activation between."""
    return _dense(weight, f"{name}/out", activation(_dense(weight, f"{name}/in", x, inner)), x.shape[-1])


def _experts(weight: Weight, name: str, x: tf.Tensor, inner: int, count: int, capacity: float) -> tf.Tensor:
    """Computes a mixture of experts with one expert per token (Switch Transformer).

    Tokens that exceed an expert's capacity are dropped.
    """
    rows, length, width = x.shape.as_list()
    tokens = rows * length
    places = max(1, round(capacity * tokens / count))
    flat = tf.reshape(x, (tokens, width))
    gates = tf.nn.softmax(tf.matmul(flat, weight(f"{name}/gate", (width, count))))
    chosen = tf.one_hot(tf.argmax(gates, -1), count, dtype=x.dtype)
    position = tf.cast(tf.reduce_sum((tf.cumsum(chosen, exclusive=True)) * chosen, -1), tf.int32)
    sent = chosen[:, :, None] * tf.one_hot(position, places, dtype=x.dtype)[:, None, :]
    taken = tf.einsum("tec,td->ecd", sent, flat)
    hidden = tf.nn.gelu(tf.matmul(taken, weight(f"{name}/in", (count, width, inner))))
    made = tf.matmul(hidden, weight(f"{name}/out", (count, inner, width)))
    mixed = tf.einsum("tec,ecd->td", sent, made) * tf.reduce_sum(gates * chosen, -1, keepdims=True)
    return tf.reshape(mixed, (rows, length, width))


def _convolution(weight: Weight, name: str, x: tf.Tensor, width: int, size: int, stride: int = 1) -> tf.Tensor:
    """Computes a convolution without bias, followed by batch normalisation."""
    kernel = weight(f"{name}/kernel", (size, size, x.shape[-1], width))
    x = tf.nn.conv2d(x, kernel, stride, "SAME")
    found = tf.compat.v1.nn.fused_batch_norm(
        x, weight(f"{name}/scale", (width,)), weight(f"{name}/shift", (width,)), epsilon=1e-5, is_training=True
    )
    return found[0]


def _bottleneck(weight: Weight, name: str, x: tf.Tensor, width: int, stride: int) -> tf.Tensor:
    """Computes a residual block of three convolutions."""
    kept = x
    if x.shape[-1] != 4 * width or stride > 1:
        kept = _convolution(weight, f"{name}/kept", x, 4 * width, 1, stride)
    y = tf.nn.relu(_convolution(weight, f"{name}/1", x, width, 1))
    y = tf.nn.relu(_convolution(weight, f"{name}/2", y, width, 3, stride))
    return tf.nn.relu(_convolution(weight, f"{name}/3", y, 4 * width, 1) + kept)
