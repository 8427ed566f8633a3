"""Reads model files: a family and its hyper-parameters, as YAML.

family: gpt
layers: 24
hidden: 1024
heads: 16
sequence: 1024
vocabulary: 50304
batch: 32
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from cost_model.cluster import yaml_files
from whale.errors import PlanError

Count = Annotated[int, Meta(ge=1)]


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="family"):
    """The fields that all families have: rows of the global batch, element type, optimizer.

    ``xla``: XLA compiles the step.
    """

    recompute: ClassVar[str] = "none"
    tensor_parallel: ClassVar[bool] = False
    sequence_parallel: ClassVar[bool] = False
    batch: Count
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    optimizer: Literal["adam", "sgd"] = "adam"
    xla: bool = False


class _Transformer(_Model, frozen=True, kw_only=True):
    """The fields of transformers.

    ``recompute: full`` holds the layers' inputs only and recomputes the rest for the backward pass.
    ``selective`` recomputes the scores of the attentions and their softmax (Korthikanti et al., 2022, section 5).
    """

    recompute: Literal["none", "selective", "full"] = "none"  # type: ignore[misc]
    layers: Count
    hidden: Count
    heads: Count
    feed_forward: int = 0  # 0: 4 x hidden

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise PlanError("hidden is not a multiple of heads", given=f"{self.hidden} and {self.heads}")

    @property
    def inner(self) -> int:
        """Returns the width of the feed-forward layer."""
        return self.feed_forward or 4 * self.hidden


MASKED = 0.15  # of the words of a row, where a description does not say how many


class _Text(_Transformer, frozen=True, kw_only=True):
    sequence: Count
    vocabulary: Count


class _DividedText(_Text, frozen=True, kw_only=True):
    """The fields of transformers whose weights may be divided.

    ``tensor_parallel``: all ranks divide the weights of layers, embedding and logits, as under ``wh.split``.
    ``sequence_parallel``: and the sequence of what lies between products, as with ``sequence=1``.
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
    """Decoder with a causal mask; the logits use the embedding's weights."""


class Bert(_DividedText, frozen=True, kw_only=True, tag="bert"):
    """Encoder, whose logits are of the masked words of each row (Devlin et al., 2019, section 3.1).

    ``masked``: how many words these are; 0: 15 % of the sequence.
    """

    masked: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masked > self.sequence:
            raise PlanError("more words are masked than a row has", given=f"{self.masked} of {self.sequence}")

    @property
    def predicted(self) -> int:
        """Returns the words of a row that are predicted."""
        return self.masked or max(1, round(MASKED * self.sequence))


class T5(_Text, frozen=True, kw_only=True, tag="t5"):
    """Encoder and decoder, so many layers each, of sequences of equal length."""


class Moe(_Text, frozen=True, kw_only=True, tag="moe"):
    """GPT whose feed-forward layers are experts: each token goes to one, which takes `capacity` times its share."""

    experts: Count
    capacity: Annotated[float, Meta(gt=0)] = 1.25


class Vit(_Transformer, frozen=True, kw_only=True, tag="vit"):
    """Vision transformer on square images."""

    image: Count = 224
    patch: Count = 16
    classes: Count = 1000


class Resnet(_Model, frozen=True, kw_only=True, tag="resnet"):
    """ResNet with bottlenecks (He et al., 2016): blocks of each of its groups, 3, 4, 6, 3 for ResNet-50."""

    blocks: Annotated[tuple[Count, ...], Meta(min_length=1)] = (3, 4, 6, 3)
    width: Count = 64
    image: Count = 224
    classes: Count = 1000
    optimizer: Literal["adam", "sgd"] = "sgd"


class Dlrm(_Model, frozen=True, kw_only=True, tag="dlrm"):
    """Recommendation (Naumov et al., 2019): embeddings and dense features, their products, and two perceptrons.

    ``split``: the ranks divide the tables by rows, as under ``wh.split(dim=0)``.
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
    """A dense layer and a softmax over very many classes. ``split``: the ranks divide these, as under ``wh.split``."""

    classes: Count
    features: Count = 512
    inputs: Count = 512
    split: bool = False


FAMILIES = (Gpt, Bert, T5, Moe, Vit, Resnet, Dlrm, Classifier)
Description = Gpt | Bert | T5 | Moe | Vit | Resnet | Dlrm | Classifier


def read_description(path: str | Path) -> Description:
    """Reads a model file; a mistake raises an error with line and key."""
    file = yaml_files.YamlFile(yaml_files.read_text(path, "model file"), str(path), "model file")
    return file.decode(Description)  # type: ignore[arg-type]
