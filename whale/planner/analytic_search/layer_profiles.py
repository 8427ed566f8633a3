"""Reads measured tables of a model's layers, from which a model is planned without its code (`whale plan --profile`).

JSON or YAML:

    model: my-model
    batch: 64
    layers:                       # the model's layers in order
      - {name: embedding, parameters: 3.9e+7, output_bytes: 1.0e+6}
      - {name: block, count: 24, parameters: 1.26e+7, output_bytes: 1.0e+6}
      - {name: head, parameters: 3.9e+7, output_bytes: 0}
    measured:
      - {layer: block, device: v100, tensor: 1, micro_batch: 4, forward_s: 0.0041, backward_s: 0.0083,
         update_s: 0.0002, memory_bytes: 1.2e+8}

A layer may be measured with activations computed again as well (`recompute: full` or `selective`, `none` unless told);
then on all devices, degrees and sizes on which it is measured without, and so are all other layers. The planner chooses
for each stage.

The measurements may also lie in a CSV file of the same name beside it, with the columns of `measured`.

`parameters` are those of the whole layer; `output_bytes` what one row sends to the next layer. `forward_s` and
`backward_s` are seconds of one micro-batch of so many rows on one rank, tensor-parallel communication included;
`update_s` the optimizer's (without it, by formula), `memory_bytes` what the layer keeps of that micro-batch for its
backward pass. Between two measured sizes of micro-batch, values are interpolated; outside of them nothing is assumed.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cost_model.analytic.layer_costs import LayerCosts, first_alike, sums
from cost_model.analytic.stacks import Stack
from cost_model.cluster import yaml_files
from cost_model.cluster.pools import Machines
from cost_model.hardware import catalogue
from cost_model.kernels.collectives import point_to_point_s
from whale.errors import ClusterError, PlanError
from whale.ir.strategy import Recompute

Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]


class TableLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Represents `count` consecutive equal layers of a profile.

    Attributes:
        name: what the measurements refer to.
        parameters: of one whole layer, not divided over tensor-parallel ranks.
        output_bytes: what one row sends to the next layer.
    """

    name: str
    count: Count = 1
    parameters: NotNegative = 0.0
    output_bytes: NotNegative = 0.0


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds one measurement of a layer: on which device, with which tensor-parallel degree, micro-batch size and
    recompute.

    Attributes:
        layer: name of the layer.
        device: name of the device in the hardware catalogue.
        forward_s, backward_s: seconds of one micro-batch on one rank, with tensor-parallel communication.
        tensor: tensor-parallel degree.
        micro_batch: rows of one micro-batch on the rank.
        update_s: seconds of the optimizer; None: computed by formula.
        memory_bytes: activations kept of one micro-batch for the backward pass.
    """

    layer: str
    device: str
    forward_s: NotNegative
    backward_s: NotNegative
    tensor: Count = 1
    micro_batch: Count = 1
    update_s: NotNegative | None = None
    memory_bytes: NotNegative = 0.0
    recompute: Recompute = "none"


class LayerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the content of a profile file: a model's layers and their measurements.

    Attributes:
        batch: global batch in rows; None: given elsewhere.
        working_bytes: memory that each rank needs in addition, whichever layers it holds.
    """

    layers: Annotated[list[TableLayer], Meta(min_length=1)]
    measured: list[Measured] = []
    model: str = "measured model"
    batch: Count | None = None
    working_bytes: NotNegative = 0.0


def read(path: str | Path) -> LayerProfile:
    """Reads a profile (YAML or JSON), with measurements in the same file or in a CSV file of the same name beside it.

    Raises:
        ClusterError: the file has a mistake; the error names line and key.
    """
    file = yaml_files.YamlFile(yaml_files.read_text(path, "profile"), str(path), "profile")
    beside = Path(path).with_suffix(".csv")
    found = file.decode(LayerProfile)
    measured = list(found.measured)
    if not measured and beside.is_file():
        with beside.open(newline="") as rows:
            measured = [msgspec.convert({k: v for k, v in row.items() if v}, Measured, strict=False)
                        for row in csv.DictReader(rows)]  # fmt: skip
    names = {layer.name for layer in found.layers}
    checked = []
    for i, one in enumerate(measured):
        if one.layer not in names:
            raise file.make_error(
                ["measured", i, "layer"],
                "a measurement names a layer that is not in `layers`",
                given=one.layer,
                expected=", ".join(sorted(names)),
            )
        try:
            checked.append(msgspec.structs.replace(one, device=catalogue.find_device(one.device).name))
        except ClusterError as error:
            raise file.make_error(["measured", i, "device"], error.message, **error.facts) from None
    if not checked:
        raise file.make_error(
            ["layers"],
            "the profile has no measurements",
            expected=f"a list `measured` in this file, or a file {beside.name} beside it with those columns",
        )
    if missing := _unlike(checked):
        raise file.make_error(
            ["measured"],
            "layers are not measured alike with recompute",
            given=missing,
            expected="each recompute measured for the same layers, devices, tensor degrees and micro-batches as none",
        )
    return msgspec.structs.replace(found, measured=checked)


def _unlike(measured: list[Measured]) -> str:
    """Describes a layer that is measured with one kind of recompute but not with another; empty: all are measured
    alike.
    """
    of: dict[str, set[tuple[str, str, int, int]]] = {"none": set()}
    for one in measured:
        of.setdefault(one.recompute, set()).add((one.layer, one.device, one.tensor, one.micro_batch))
    for kind, known in of.items():
        for layer, device, tensor, rows in sorted(known ^ of["none"]):
            lacks = "none" if (layer, device, tensor, rows) in known else kind
            return f"no {layer} on {device}, tensor {tensor}, micro_batch {rows}, recompute {lacks}"
    return ""


class TableModel:
    """Implements the planner's `Model` with measured layers instead of formulas."""

    def __init__(self, table: LayerProfile, stack: Stack, machines: Machines) -> None:
        self.table, self.stack, self.machines, self.name = table, stack, machines, table.model
        self.kinds = [layer for layer in table.layers for _ in range(layer.count)]
        self.count = len(self.kinds)
        self.experts, self.tied_parameters, self.sequence = 0, 0.0, 0
        self.alike = first_alike(self.kinds)
        self.of: dict[tuple[str, int, str], dict[str, dict[int, Measured]]] = {}
        for one in table.measured:
            key = one.device, one.tensor, one.recompute
            self.of.setdefault(key, {}).setdefault(one.layer, {})[one.micro_batch] = one
        self.layer_costs = lru_cache(maxsize=None)(self._layer_costs)

    def on(self, machines: Machines) -> TableModel:
        """Returns a model with the same measurements for other machines."""
        return TableModel(self.table, self.stack, machines)

    def _select_measured(self, pool: int, tensor: int, recompute: str = "none") -> dict[str, dict[int, Measured]]:
        return self.of.get((self.machines.pools[pool].device.name, tensor, recompute), {})

    def _layer_costs(
        self, pool: int, tensor: int, rows: int, recompute: str, sequence_parallel: bool, ranks: int, replicas: int = 1
    ) -> LayerCosts:
        share = self.machines.pools[pool].entry.share
        known = self._select_measured(pool, tensor, recompute)
        if any(layer.name not in known for layer in self.table.layers):
            raise PlanError(
                "the profile has no measurement that the plan needs",
                given=f"{self.machines.pools[pool].device.name}, {tensor} tensor-parallel ranks, recompute {recompute}",
                expected="measurements of every layer with these three",
                action="add them to `measured` in the profile, or fix others: --set tensor=N, --set recompute=KIND",
            )
        each = {name: _interpolate(sizes, rows) for name, sizes in known.items()}
        own = [each[layer.name] for layer in self.kinds]
        zeros = sums([0.0] * self.count)
        updates = None
        if all(one.update_s is not None for one in own):
            updates = sums((one.update_s or 0.0) / share for one in own)
        return LayerCosts(
            forward_s=sums(one.forward_s / share for one in own),
            backward_s=sums(one.backward_s / share for one in own),
            forward_exposed_s=zeros,
            backward_exposed_s=zeros,
            forward_host_s=zeros,
            backward_host_s=zeros,
            begin_s=0.0,
            begin_host_s=0.0,
            held_bytes=sums(one.memory_bytes for one in own),
            parameters=sums(layer.parameters / tensor for layer in self.kinds),
            twice=0.0,
            update_s=updates,
            working_bytes=self.table.working_bytes,
            last_bytes=0.0,
            element_bytes=self.stack.element_bytes,
        )

    def tensor_degrees(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees that one host of the pool has devices for and at which every layer was
        measured.
        """
        own = self.machines.pools[pool]
        wanted = {layer.name for layer in self.table.layers}
        return sorted(
            tensor
            for (device, tensor, recompute), known in self.of.items()
            if device == own.device.name and tensor <= own.per_host and recompute == "none" and wanted <= known.keys()
        )

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Returns all micro-batch sizes (rows of a rank) in the range in which every layer was measured on the pool's
        device.
        """
        known = self._select_measured(pool, tensor).values()
        low, high = max(min(sizes) for sizes in known), min(max(sizes) for sizes in known)
        return list(range(low, high + 1))

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns (recompute, sequence parallel) for each measured kind of recompute; a profile never has sequence
        parallelism.
        """
        kinds: tuple[Recompute, ...] = ("none", "selective", "full")
        measured = {recompute for _, _, recompute in self.of}
        return [(kind, False) for kind in kinds if kind in measured]

    def send_s(self, cut: int, tensor: int, rows: float, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Returns the seconds to send a micro-batch's activations to the stage that begins with layer `cut`.

        Args:
            rows: rows of the micro-batch.
            path: (bytes per second, microseconds per message) of the link.
        """
        return point_to_point_s(self.kinds[cut - 1].output_bytes * rows, *path)


def _interpolate(sizes: dict[int, Measured], rows: int) -> Measured:
    """Returns the measurement for `rows` rows, linearly interpolated between the two nearest measured sizes if
    need be.
    """
    if rows in sizes:
        return sizes[rows]
    order = sorted(sizes)
    at = bisect_left(order, rows)
    if at in (0, len(order)):
        raise PlanError(
            f"the profile has no measurement of layer {sizes[order[0]].layer} for this micro-batch size",
            given=f"{rows} rows",
            expected=f"{order[0]} to {order[-1]} rows, as measured",
            action=f"measure the layers with {rows} rows, or fix a micro_batch in that range",
        )
    low, high = sizes[order[at - 1]], sizes[order[at]]
    part = (rows - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def mix(a: float, b: float) -> float:
        return a + part * (b - a)

    update_s = None if low.update_s is None or high.update_s is None else mix(low.update_s, high.update_s)
    return msgspec.structs.replace(
        low,
        micro_batch=rows,
        forward_s=mix(low.forward_s, high.forward_s),
        backward_s=mix(low.backward_s, high.backward_s),
        memory_bytes=mix(low.memory_bytes, high.memory_bytes),
        update_s=update_s,
    )
