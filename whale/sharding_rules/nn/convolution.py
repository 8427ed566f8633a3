"""Defines sharding rules of convolutions and their gradients: by batch, by channels, and by rows and columns with
halos.

Decision: 0037.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whale.ir.layout import Shard, shard
from whale.ir.values import Dims, TensorType
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy, make_labels, write_windows
from whale.sharding_rules.registry import rule


# Convolutions whose rows or columns are sharded: an operand also holds its neighbours' adjacent rows (``Shard.halo``).
#
# A rank computes the results whose windows begin in its own rows. In the forward pass, and for the filter's gradient,
# it needs the image's rows that these windows read; for the image's gradient, the incoming gradients of all windows
# that read its own rows. A reshard adds the halo to the operand. The rank's node has explicit padding: that of the
# program at the image's edges, and none where it holds neighbours' rows.
@dataclass(frozen=True, slots=True)
class _Axis:
    """Represents one spatial dimension of a convolution.

    Attributes:
      dim: number of the dimension in the image.
      size: its size in the image.
      reach: number of image positions from the first to the last one that a window reads, with dilation.
      step: distance of neighbouring windows.
      before: padding before the image.
      after: padding after the image.
    """

    dim: int
    size: int
    reach: int
    step: int
    before: int
    after: int


def _find_shapes(op: OpView) -> tuple[Dims | None, Dims | None]:
    """Returns the shapes of the image and of the filter."""
    if "BackpropInput" in op.node.op:
        return op.outputs[0].shape, op.inputs[1].shape
    return op.inputs[0].shape, op.outputs[0].shape if "BackpropFilter" in op.node.op else op.inputs[1].shape


def _find_axes(op: OpView) -> list[_Axis]:
    """Returns the two spatial dimensions, with the padding of SAME; [] if sizes are unknown."""
    image, kernel = _find_shapes(op)
    first = 2 if str(op.attr("data_format", "NHWC")).startswith("NC") else 1
    if image is None or kernel is None:
        return []
    found = []
    for i in range(2):
        size, width, step = image[first + i], kernel[i], int(op.attr("strides")[first + i])
        if size is None or width is None:
            return []
        gaps = op.attr("dilations", ()) or (1,) * len(image)
        reach = (width - 1) * int(gaps[first + i]) + 1
        padding = max((-(-size // step) - 1) * step + reach - size, 0)
        found.append(_Axis(first + i, size, reach, step, padding // 2, padding - padding // 2))
    return found


def _find_crossed_axis(op: OpView, strategy: Strategy) -> _Axis | None:
    """Returns the sharded spatial dimension in which windows reach into neighbouring shards; None if there is none."""
    if op.attr("padding") != "SAME":
        return None
    cut = {p.dim for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)}
    image = strategy.outputs[0] if "BackpropInput" in op.node.op else strategy.inputs[0]
    if not isinstance(image, Shard):
        return None
    return next((a for a in _find_axes(op) if a.dim == image.dim and a.dim in cut and a.reach > a.step), None)


def _widen(strategy: Strategy, i: int, halo: tuple[int, int]) -> Strategy | None:
    have = strategy.inputs[i]
    if not isinstance(have, Shard) or have.blocks > 1:
        return None
    wide = shard(have.dim, have.sizes, 1, halo)
    return replace(strategy, inputs=(*strategy.inputs[:i], wide, *strategy.inputs[i + 1 :]))


def widen_image(op: OpView, strategy: Strategy) -> Strategy | None:
    """Adds a halo to the image (operand 0): the neighbours' rows that windows of the rank's own results read."""
    axis = _find_crossed_axis(op, strategy)
    return strategy if axis is None else _widen(strategy, 0, (axis.before, axis.reach - axis.step - axis.before))


def widen_gradient(op: OpView, strategy: Strategy) -> Strategy | None:
    """Adds a halo to the incoming gradient (operand 2): that of the neighbours' windows that read the rank's own
    rows.
    """
    axis = _find_crossed_axis(op, strategy)
    if axis is None:
        return strategy
    before, after = (axis.reach - 1 - axis.before) // axis.step, (axis.step - 1 + axis.before) // axis.step
    return _widen(strategy, 2, (before, after))


def make_padding_explicit(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Replaces SAME padding by explicit one for the rank's shard: none where it has neighbours' rows."""
    axis = _find_crossed_axis(op, strategy)
    if axis is None:
        return UNCHANGED
    if "BackpropInput" in op.node.op:
        have, slope = strategy.outputs[0], strategy.inputs[2]
        assert isinstance(have, Shard) and isinstance(slope, Shard)
        first, end = slope.find_span(coordinate)
        begin, stop = have.find_span(coordinate)
        margins = begin - (first * axis.step - axis.before), (end - 1) * axis.step - axis.before + axis.reach - stop
    else:
        have = strategy.inputs[0]
        assert isinstance(have, Shard)
        begin = have.starts[coordinate]
        stop = begin + have.sizes[coordinate]
        margins = max(0, have.halo[0] - begin), max(0, stop + have.halo[1] - axis.size)
    rank = len(str(op.attr("data_format", "NHWC")))
    padding = [0] * (2 * rank)
    for one in _find_axes(op):
        padding[2 * one.dim : 2 * one.dim + 2] = margins if one.dim == axis.dim else (one.before, one.after)
    return Local(attrs={"padding": "EXPLICIT", "explicit_paddings": tuple(padding)})


def write_image_term(
    op: OpView, spatial: str | Sequence[str], channels: str, batch: str = "b", default: str = "NHWC"
) -> str:
    """Writes the term of an image-like tensor in the op's data format: batch, spatial dimensions, channels.

    Args:
      spatial: an item for each spatial dimension; or a prefix for labels with the flag ``^``.
      channels: the item of the channels.
      batch: the item of the batch.
      default: the data format if the op has no such attribute.
    """
    layout = str(op.attr("data_format", default))
    count = len(layout) - 2
    places = [f"{spatial}{i}^" for i in range(count)] if isinstance(spatial, str) else list(spatial)
    if layout.startswith("NC"):
        return " ".join([batch, channels, *places])
    return " ".join([batch, *places, channels])


def _find_channel_dim(op: OpView, rank: int) -> int:
    return 1 if str(op.attr("data_format", "NHWC")).startswith("NC") else rank - 1


def _is_grouped(op: OpView, image_operand: int | None, filter_depth: int | None) -> bool:
    """Returns True if each filter reads only a group of the image's channels, or if that is unknown.

    Args:
      image_operand: number of the operand with the image; None: output 0 has it.
      filter_depth: number of channels that a filter reads.
    """
    kind = op.outputs[0] if image_operand is None else op.inputs[image_operand]
    if kind.shape is None or filter_depth is None:
        return True
    return kind.shape[_find_channel_dim(op, len(kind.shape))] != filter_depth


def _write_group_dims(filter_shape: tuple[int | None, ...] | None, channels: int | None) -> tuple[str, str]:
    """Writes the (input, output) channel dimensions of a grouped convolution, which can be sharded in whole groups.

    They cannot be sharded if sizes are unknown.
    """
    depth, out = (None, None) if filter_shape is None else filter_shape[-2:]
    if channels is None or not depth or out is None or channels % depth or out % (channels // depth):
        return "c^", "o^"
    return f"(g {depth})", f"(g {out // (channels // depth)})"


def _count_channels(op: OpView, kind: TensorType) -> int | None:
    return None if kind.shape is None else kind.shape[_find_channel_dim(op, len(kind.shape))]


def _find_filter_depth(shape: tuple[int | None, ...] | None) -> int | None:
    return None if shape is None or len(shape) < 2 else shape[-2]


def _write_kernel_term(count: int, tail: str) -> str:
    return " ".join([f"{k}^" for k in make_labels("k", count)] + [tail])


def _write_spatial_dims(
    op: OpView, image: TensorType, kernel: TensorType, count: int, flag: str = ""
) -> tuple[list[str], list[str]]:
    """Writes the spatial dimensions (before, after) the convolution, which are sharded together if the step divides
    them.

    Args:
      image: type of the image.
      kernel: type of the filter.
      count: number of spatial dimensions.
      flag: "+" if the result sums over them.
    """
    first = 2 if str(op.attr("data_format", "NHWC")).startswith("NC") else 1
    before, after = [f"x{i}^" for i in range(count)], [f"y{i}^" for i in range(count)]
    if image.shape is None or kernel.shape is None or op.attr("padding") not in ("SAME", "VALID"):
        return before, after
    steps = list(op.attr("strides", ()))[first : first + count]
    apart = list(op.attr("dilations", ()))[first : first + count] or [1] * count
    if None in kernel.shape[:count] or len(steps) != count:
        return before, after
    reach = [(size - 1) * gap + 1 for size, gap in zip(kernel.shape, apart)]  # type: ignore[operator]
    if count == 2 and op.attr("padding") == "SAME" and None not in image.shape[first : first + count]:
        reach = [min(size, step) for size, step in zip(reach, steps)]  # a halo supplies what windows read beyond
    for i, found in enumerate(write_windows(image.shape[first : first + count], reach, steps)):
        if found is not None:
            before[i], after[i] = found.replace(f"s{i}", f"s{i}{flag}"), f"s{i}{flag}"
    return before, after


def make_forward_spec(count: int) -> Callable[[OpView], str]:
    """Returns a function that writes the line of a convolution over ``count`` spatial dimensions."""
    default = "NDHWC" if count == 3 else "NHWC"

    def convolution(op: OpView) -> str:
        """Writes the sharding rule of a convolution, from ``data_format`` and groups of channels."""
        if _is_grouped(op, 0, _find_filter_depth(op.inputs[1].shape)):
            c, o = _write_group_dims(op.inputs[1].shape, _count_channels(op, op.inputs[0]))
            before, kernel, after = c, f"i^ {o}", o
        else:
            before, kernel, after = "i+", "i+ o", "o"
        rows = _write_spatial_dims(op, op.inputs[0], op.inputs[1], count)
        x, y = (
            write_image_term(op, rows[0], before, default=default),
            write_image_term(op, rows[1], after, default=default),
        )
        return f"{x}, {_write_kernel_term(count, kernel)} -> {y}"

    return convolution


def make_input_gradient_spec(count: int, like: bool = False) -> Callable[[OpView], str]:
    """Returns a function that writes the line of a convolution's gradient for its image.

    Args:
      count: number of spatial dimensions.
      like: True if operand 0 is the image itself, of which only the shape matters; False: it is the shape.
    """
    default = "NDHWC" if count == 3 else "NHWC"

    def convolution_input_gradient(op: OpView) -> str:
        """Writes the sharding rule of a convolution's image gradient, from ``data_format`` and groups of channels."""
        grouped = _is_grouped(op, None, _find_filter_depth(op.inputs[1].shape))
        i, o = _write_group_dims(op.inputs[1].shape, _count_channels(op, op.outputs[0])) if grouped else ("i", "o+")
        rows = _write_spatial_dims(op, op.outputs[0], op.inputs[1], count)
        result = write_image_term(op, rows[0], i, default=default)
        first = f"~{result}" if like else "[out0]"
        kernel = _write_kernel_term(count, f"i^ {o}" if grouped else "i o+")
        return f"{first}, {kernel}, {write_image_term(op, rows[1], o, default=default)} -> {result}"

    return convolution_input_gradient


def make_filter_gradient_spec(count: int, like: bool = False) -> Callable[[OpView], str]:
    """Returns a function that writes the line of a convolution's gradient for its filter.

    Args:
      count: number of spatial dimensions.
      like: True if operand 1 is the filter itself, of which only the shape matters; False: it is the shape.
    """
    default = "NDHWC" if count == 3 else "NHWC"

    def convolution_filter_gradient(op: OpView) -> str:
        """Writes the sharding rule of a convolution's filter gradient, from ``data_format`` and groups of channels."""
        grouped = _is_grouped(op, 0, _find_filter_depth(op.outputs[0].shape))
        i, o = _write_group_dims(op.outputs[0].shape, _count_channels(op, op.inputs[0])) if grouped else ("i", "o")
        result = _write_kernel_term(count, f"i^ {o}" if grouped else "i o")
        first = f"~{result}" if like else "[out0]"
        rows = _write_spatial_dims(op, op.inputs[0], op.outputs[0], count, "+")
        operand = write_image_term(op, rows[0], i, "b+", default)
        return f"{operand}, {first}, {write_image_term(op, rows[1], o, 'b+', default)} -> {result}"

    return convolution_filter_gradient


def depthwise(op: OpView) -> str:
    """Writes the sharding rule of DepthwiseConv2dNative, from ``data_format``."""
    before, after = _write_spatial_dims(op, op.inputs[0], op.inputs[1], 2)
    return f"{write_image_term(op, before, 'c')}, k0^ k1^ c m^ -> {write_image_term(op, after, '(c m^)')}"


def depthwise_input_gradient(op: OpView) -> str:
    """Writes the sharding rule of a depthwise convolution's image gradient, from ``data_format``."""
    before, after = _write_spatial_dims(op, op.outputs[0], op.inputs[1], 2)
    return f"[out0], k0^ k1^ c m^, {write_image_term(op, after, '(c m^)')} -> {write_image_term(op, before, 'c')}"


def depthwise_filter_gradient(op: OpView) -> str:
    """Writes the sharding rule of a depthwise convolution's filter gradient, from ``data_format``."""
    before, after = _write_spatial_dims(op, op.inputs[0], op.outputs[0], 2, "+")
    x, y = write_image_term(op, before, "c", "b+"), write_image_term(op, after, "(c m^)", "b+")
    return f"{x}, [out0], {y} -> k0^ k1^ c m^"


def general_convolution(op: OpView) -> str:
    """Writes the sharding rule of Conv, from the rank, the number of batch dimensions and ``data_format``."""
    shape, kernel = op.inputs[0].shape, op.inputs[1].shape
    if shape is None or kernel is None:
        return "replicated"
    count = len(kernel) - 2
    lead = " ".join(make_labels("b", len(shape) - count - 1))
    last = op.attr("data_format", "CHANNELS_LAST") == "CHANNELS_LAST"
    whole = shape[-1 if last else len(shape) - count - 1] == kernel[-2]
    i, o, pair = ("i+", "o", "i+ o") if whole else ("c^", "o^", "i^ o^")
    xs, ys = (" ".join(f"{k}^" for k in make_labels(p, count)) for p in "xy")
    before, after = (f"{xs} {i}", f"{ys} {o}") if last else (f"{i} {xs}", f"{o} {ys}")
    return f"{lead} {before}, {_write_kernel_term(count, pair)} -> {lead} {after}"


RULES = (
    rule("Conv2D", make_forward_spec(2), lin="0|1", halo=widen_image, local=make_padding_explicit),
    rule("Conv3D", make_forward_spec(3), lin="0|1"),
    rule("Conv", general_convolution, lin="0|1"),
    rule(
        "Conv2DBackpropInput",
        make_input_gradient_spec(2),
        lin="1|2",
        halo=widen_gradient,
        local=make_padding_explicit,
    ),
    rule(
        "Conv2DBackpropInputV2",
        make_input_gradient_spec(2, like=True),
        lin="1|2",
        halo=widen_gradient,
        local=make_padding_explicit,
    ),
    rule(
        "Conv2DBackpropFilter",
        make_filter_gradient_spec(2),
        lin="0|2",
        halo=widen_image,
        local=make_padding_explicit,
    ),
    rule(
        "Conv2DBackpropFilterV2",
        make_filter_gradient_spec(2, like=True),
        lin="0|2",
        halo=widen_image,
        local=make_padding_explicit,
    ),
    rule("Conv3DBackpropInputV2", make_input_gradient_spec(3), lin="1|2"),
    rule("Conv3DBackpropInput", make_input_gradient_spec(3, like=True), lin="1|2"),
    rule("Conv3DBackpropFilterV2", make_filter_gradient_spec(3), lin="0|2"),
    rule("Conv3DBackpropFilter", make_filter_gradient_spec(3, like=True), lin="0|2"),
    rule("DepthwiseConv2dNative", depthwise, lin="0|1", halo=widen_image, local=make_padding_explicit),
    rule(
        "DepthwiseConv2dNativeBackpropInput",
        depthwise_input_gradient,
        lin="1|2",
        halo=widen_gradient,
        local=make_padding_explicit,
    ),
    rule(
        "DepthwiseConv2dNativeBackpropFilter",
        depthwise_filter_gradient,
        lin="0|2",
        halo=widen_image,
        local=make_padding_explicit,
    ),
    rule("Dilation2D", "b h^ w^ c, k0^ k1^ c -> b y^ x^ c"),
    rule("Dilation2DBackpropInput", "b h^ w^ c, k0^ k1^ c, b y^ x^ c -> b h^ w^ c", lin="2"),
    rule("Dilation2DBackpropFilter", "b+ h^ w^ c, k0^ k1^ c, b+ y^ x^ c -> k0^ k1^ c", lin="2"),
)
