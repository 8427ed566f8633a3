"""Reads profiles: measured times of a model's layers, used instead of formulas to plan a model without its code.

    layers:
      - {device: a100, tensor: 8, micro_batch: 1, forward_s: 0.0021, backward_s: 0.0064, memory_gb: 0.05}
      - {device: v100, tensor: 8, micro_batch: 1, forward_s: 0.0052, backward_s: 0.0161, update_s: 0.0004}

Seconds are those of one layer and one micro-batch on one rank, with its tensor-parallel communication and, in the
backward pass, what recompute repeats; `update_s` is the optimizer's time for one layer, `memory_gb` the activations of
one micro-batch that the layer keeps for its backward pass. `part: embedding` and `part: head` measure what the first
and the last layer run in addition. Everything that is not measured (sends, reductions, and embedding and head if they
are missing) is computed by formulas.
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
    """Represents one measurement, of a layer, the embedding or the head, for one device, tensor-parallel degree and
    micro-batch.

    `update_s` and `memory_gb` may be missing; formulas then supply them.
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
    """Represents a profile file: all measurements of one model."""

    layers: Annotated[list[MeasuredLayer], Meta(min_length=1)]

    def layer(self, device: str, tensor: int, micro_batch: int) -> MeasuredLayer:
        """Returns the measurement of a layer on a device; ClusterError if the profile has none.

        Args:
            device: name of the device in the catalogue.
            tensor: tensor-parallel degree.
            micro_batch: rows of a micro-batch.
        """
        if (found := self.find("layer", device, tensor, micro_batch)) is not None:
            return found
        raise ClusterError(
            "the profile has no measurement that the plan needs",
            given=f"{device}, {tensor} tensor-parallel ranks, micro-batch {micro_batch}",
            expected="one of " + "; ".join(f"{one.device}, {one.tensor}, {one.micro_batch}" for one in self.layers),
            action="add this measurement to the profile, or choose a plan whose devices, tensor and micro_batch it has",
        )

    def find(self, part: str, device: str, tensor: int, micro_batch: int) -> MeasuredLayer | None:
        """Returns the measurement of `part` ("layer", "embedding" or "head") on a device, or None if there is none."""
        wanted = part, device, tensor, micro_batch
        return next((o for o in self.layers if (o.part, o.device, o.tensor, o.micro_batch) == wanted), None)


def read(path: str | Path) -> Profile:
    """Reads a profile file; raises ClusterError with line and key for a mistake, or a device that the catalogue lacks.

    Devices' aliases are replaced by their names in the catalogue.
    """
    file = yaml_files.YamlFile(yaml_files.read_text(path, "profile"), str(path), "profile")
    found = file.decode(Profile)
    layers = []
    for i, one in enumerate(found.layers):
        try:
            layers.append(msgspec.structs.replace(one, device=catalogue.find_device(one.device).name))
        except ClusterError as error:
            raise file.make_error(["layers", i, "device"], error.message, action=error.action, **error.facts) from None
    return Profile(layers)
