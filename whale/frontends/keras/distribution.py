"""Implements ``keras.distribution`` for the TensorFlow backend: devices are ranks, a LayoutMap gives variables'
layouts.

If the device mesh has an axis besides the batch axis, steps are planned as if all their code were inside of
``wh.split``. A variable that the LayoutMap names gets the layout given there; Whale plans all other layouts.

Decision: 0063.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from whale.errors import ConfigError, PlanError
from whale.frontends.keras.patches import replace_function, replace_method
from whale.ir.layout import divide_evenly, shard
from whale.ir.mesh import DATA, TENSOR, Tiles
from whale.log import log
from whale.passes.analysis.scopes import nearest
from whale.runtime.context import Context, find_running, require_current
from whale.runtime.variables.deferred import announce_size


def patch_backend(frontend: Any, backend: Any, variable: type) -> None:
    """Adds the functions of Keras' distribution API to its TensorFlow backend, which lacks them.

    Args:
      frontend: the module keras.src.distribution.distribution_lib.
      backend: the module keras.src.backend.tensorflow.distribution_lib.
      variable: the backend's class of variables.
    """
    for function in (
        list_devices, get_device_count, initialize, num_processes, process_id, distribute_tensor, distribute_variable,
    ):  # fmt: skip
        setattr(backend, function.__name__, function)
    backend._to_backend_mesh = backend._to_backend_layout = _return_as_is
    replace_function(frontend, "set_distribution", _set_distribution)
    replace_method(variable, "_initialize", _initialize)


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns one device per rank, in order of ranks: "gpu:0", "gpu:1", ... or "cpu:0", "cpu:1", ...

    Args:
      device_type: "gpu" or "cpu"; the list is empty if the ranks compute on the other type. None: whichever they use.
    """
    context = require_current("keras.distribution.list_devices()")
    kind = "gpu" if tf.config.get_visible_devices("GPU") else "cpu"
    if device_type is not None and device_type.lower() != kind:
        return []
    return [f"{kind}:{rank}" for rank in range(context.planned_size)]


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of ranks; 0 if they do not compute on devices of ``device_type``."""
    return len(list_devices(device_type))


def initialize(
    job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Checks that the arguments agree with the run, since the launcher and ``wh.init`` have already connected the
    processes.

    Raises:
      ConfigError: the run has another number of processes, or this process another number.
    """
    context = require_current("keras.distribution.initialize()")
    for name, given, found in (
        ("num_processes", num_processes, context.place.size),
        ("process_id", process_id, context.place.rank),
    ):
        if given is not None and given != found:
            raise ConfigError(
                f"keras.distribution.initialize got another {name} than the launcher started",
                given=f"keras.distribution.initialize({name}={given})",
                expected=f"{name}={found}, as started by {context.place.launcher}",
                action=f"leave {name} out, or start another number of ranks",
            )


def num_processes() -> int:
    """Returns 1, since Keras would otherwise divide the data, which Whale does."""
    return 1


def process_id() -> int:
    """Returns 0, as if this were the only process; see ``num_processes``."""
    return 0


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns ``tensor`` unchanged: Whale's plan decides the layouts of activations."""
    return tensor


def distribute_variable(value: Any, layout: Any) -> Any:
    """Returns ``value`` unchanged: the variable itself carries its layout to the plan."""
    return value


def _return_as_is(value: Any) -> Any:
    return value


def _set_distribution(original: Callable[[Any], None], distribution: Any) -> None:
    """Replaces ``keras.distribution.set_distribution``: sets the run's mesh from the distribution's device mesh.

    Args:
      original: Keras' own function, which is called as well.
      distribution: a keras.distribution.Distribution, or None.
    """
    context = find_running()
    assert context is not None
    if distribution is not None:
        groups, group = _find_mesh(distribution, context)
        if hasattr(distribution, "_layout_map"):
            context.scoping.dividing_scope_seen = True  # variables created from now on may be sharded
            context.scoping.split_everything |= group > 1
            context.scoping.split_ranks = group if groups > 1 and group > 1 else 0
            if context.rank == 0:
                distribution._whale_paths = []
                context.hooks.at_end.append(partial(_say_what_fits_nothing, distribution))
    original(distribution)


def _say_what_fits_nothing(distribution: Any) -> None:
    """Warns at the end of the run about keys of a LayoutMap that match no variable, e.g. because of a misspelling."""
    layouts, paths = distribution._layout_map, distribution._whale_paths
    for key in (key for key in layouts if paths and not key.endswith("output")):  # "output" keys are for activations
        one = type(layouts)(layouts.device_mesh)
        one[key] = layouts[key]
        if all(one[path] is None for path in paths):
            near = nearest(key, paths) or paths[:3]
            log.warning(f"no variable fits the LayoutMap's {key!r}; there are {', '.join(near)}")


def _find_mesh(distribution: Any, context: Context) -> tuple[int, int]:
    """Returns (size of the batch axis, size of the other axis) of a distribution's device mesh.

    Raises:
      PlanError: the mesh does not list all ranks in order, has several axes besides the batch axis, or has the batch
        axis last.
    """
    mesh = distribution.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    names = [name for name, size in sizes.items() if size > 1 and name != distribution.batch_dim_name]
    rows = sizes[distribution.batch_dim_name]
    problem = ""
    if list(mesh.devices.flatten()) != list_devices():
        problem = f"the devices {[str(d) for d in mesh.devices.flatten()]}"
    elif len(names) > 1:
        problem = f"the axes {names} besides the batch axis"
    elif names and rows > 1 and mesh.axis_names.index(names[0]) < mesh.axis_names.index(distribution.batch_dim_name):
        problem = f"the axis {names[0]!r} before the batch axis"
    if problem:
        raise PlanError(
            "the device mesh does not fit this run",
            given=problem,
            expected=f"the devices of keras.distribution.list_devices() in order: {list_devices()}; the batch axis "
            "first, and at most one other axis larger than 1",
            action="create the DeviceMesh from these devices, or start as many ranks as the mesh has devices",
        )
    return rows, sizes[names[0]] if names else 1


def _initialize(original: Callable[..., None], variable: Any, value: Any) -> None:
    """Replaces the method of a Keras variable that creates its tf.Variable, and gives this the layout of the LayoutMap.

    Args:
      original: Keras' own method.
      variable: the Keras variable.
      value: its initial value.
    """
    with nullcontext() if variable._shape is None else announce_size(variable._shape, variable._dtype):
        original(variable, value)
    distribution = _find_distribution()
    context = find_running()
    if distribution is None or context is None or not hasattr(distribution, "_layout_map"):
        return
    if hasattr(distribution, "_whale_paths"):
        distribution._whale_paths.append(variable.path)
    layout = distribution._layout_map[variable.path]
    if layout is not None:
        variable._layout = layout
        variable._value._whale_tiles = _find_tiles(variable, layout, distribution, context)


def _find_distribution() -> Any:
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("distribution")


def _find_tiles(variable: Any, layout: Any, distribution: Any, context: Context) -> Tiles:
    """Returns the tiles of a variable for a layout such as (None, "model") or ("batch", "model")."""
    groups, group = _find_mesh(distribution, context)
    sizes = dict(zip(distribution.device_mesh.axis_names, distribution.device_mesh.shape))
    batch = distribution.batch_dim_name
    divided = [(axis, dim) for dim, axis in enumerate(layout.axes) if axis is not None and sizes[axis] > 1]
    divided.sort(key=lambda found: found[0] != batch)  # the batch's axis is the first one of the ranks' mesh
    cuts = tuple(
        shard(dim, divide_evenly(int(variable.shape[dim]), groups if axis == batch else group)) for axis, dim in divided
    )
    return Tiles(tuple(DATA if axis == batch else TENSOR for axis, _ in divided), cuts)
