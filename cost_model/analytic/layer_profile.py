"""Reads measured tables of a model's layers, which take the place of formulas: a model is planned without its code.

    layers:
      - {device: a100, tensor: 8, micro_batch: 1, forward_s: 0.0021, backward_s: 0.0064, memory_gb: 0.05}
      - {device: v100, tensor: 8, micro_batch: 1, forward_s: 0.0052, backward_s: 0.0161, update_s: 0.0004}

Seconds are those of one layer and one micro-batch on one rank, with its tensor-parallel communication and, in the
backward pass, what recompute repeats; `update_s` is the optimizer's part for one layer, `memory_gb` what the layer
keeps of one micro-batch. `part: embedding` and `part: head` are measurements of what the first and the last layer have
besides. What is not measured (sends, reductions, and these two where they are missing) comes from formulas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cost_model.cluster import yaml_files
from cost_model.hardware import catalogue
from whale.errors import ClusterError

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class MeasuredLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement of a layer, or of the embedding or the head; update_s and memory_gb may be left to the
    formulas.
    """

    device: str
    forward_s: Seconds
    backward_s: Seconds
    tensor: Count = 1
    micro_batch: Count = 1
    update_s: Annotated[float, Meta(ge=0)] | None = None
    memory_gb: Annotated[float, Meta(ge=0)] | None = None
    part: Literal["layer", "embedding", "head"] = "layer"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements of a model."""

    layers: Annotated[list[MeasuredLayer], Meta(min_length=1)]

    def layer(self, device: str, tensor: int, micro_batch: int) -> MeasuredLayer:
        """Returns the measurement on a device (a name of the catalogue); ClusterError if there is none."""
        if (found := self.find("layer", device, tensor, micro_batch)) is not None:
            return found
        raise ClusterError(
            "the profile has no measurement that the plan needs",
            given=f"{device}, {tensor} tensor-parallel ranks, micro-batch {micro_batch}",
            expected="; ".join(f"{one.device}, {one.tensor}, {one.micro_batch}" for one in self.layers),
            action="measure it, or choose a plan with what is measured",
        )

    def find(self, part: str, device: str, tensor: int, micro_batch: int) -> MeasuredLayer | None:
        """Returns the measurement of a layer, of the embedding or of the head on a device, if there is one."""
        wanted = part, device, tensor, micro_batch
        return next((o for o in self.layers if (o.part, o.device, o.tensor, o.micro_batch) == wanted), None)


def read(path: str | Path) -> Profile:
    """Reads a profile; device names become those of the catalogue, and a mistake raises an error with line and key."""
    file = yaml_files.YamlFile(yaml_files.read_text(path, "profile"), str(path), "profile")
    found = file.decode(Profile)
    layers = []
    for i, one in enumerate(found.layers):
        try:
            layers.append(msgspec.structs.replace(one, device=catalogue.find_device(one.device).name))
        except ClusterError as error:
            raise file.make_error(["layers", i, "device"], error.message, action=error.action, **error.facts) from None
    return Profile(layers)
