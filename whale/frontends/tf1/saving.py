"""Saves a session's variables when some are sharded: each rank writes its parts into the checkpoint of a tf Saver.

Decision: 0046.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.errors import CheckpointError, ProgramError
from whale.frontends.tf1.one_rank import SingleRankRuns
from whale.frontends.tf1.variables import SessionVariables, list_changed_names, list_used_names
from whale.ir.layout import divide_evenly, shard
from whale.ir.mesh import Region, make_one_axis_tiles
from whale.runtime.context import Context
from whale.runtime.files import remove_files
from whale.runtime.variables.checkpoint_regions import format_spec, list_regions, slice_spec

Feeds = Mapping[tf.Tensor, np.ndarray]
Settings = tuple[Any, Any]  # options and metadata of Session.run
# A part of a checkpoint: its name there, its slice, and a function that reads the values.
_Part = tuple[str, str, Callable[[], Any]]


class CheckpointRuns:
    """Executes a session's runs that write checkpoints: rank 0 writes, the other ranks add their parts of sharded
    variables.

    Args:
      one_rank: runs parts of the graph on rank 0.
      variables: the session's variables.
      run_on_all: makes a run on all ranks: a function of (fetches, targets, feeds, settings).
      saves_behind: ``saves_behind(wanted, feeds)`` returns the SaveV2 operations that these operations and tensors
        depend on.
    """

    def __init__(
        self,
        one_rank: SingleRankRuns,
        variables: SessionVariables,
        run_on_all: Callable[[Sequence[Any], Sequence[Any], Feeds, Settings], list[Any]],
        saves_behind: Callable[[Sequence[Any], Feeds], Sequence[tf.Operation]],
    ) -> None:
        self._one_rank, self._variables = one_rank, variables
        self._run_on_all, self._behind = run_on_all, saves_behind

    def run(
        self,
        saves: Sequence[tf.Operation],
        fetches: Sequence[tf.Tensor],
        targets: Sequence[tf.Operation],
        feeds: Feeds,
        settings: Settings,
    ) -> list[Any]:
        """Makes a run that writes checkpoints, and returns the fetched values once all files are complete; collective.

        Operations that change variables run on all ranks before the files are written, so the files have the new
        values.

        Args:
          saves: the operations of the run that write checkpoints.
          fetches: the tensors to fetch.
          targets: the operations to run.
          feeds: values of fed tensors.
          settings: (RunOptions, RunMetadata) of Session.run.

        Raises:
          ProgramError: an operation that changes variables waits for a checkpoint.
          CheckpointError: a rank could not write; raised on every rank.
        """
        files, rest = [op for op in saves if op.type == "SaveV2"], [*fetches, *targets]
        found: dict[tf.Tensor, Any] = {}
        changes = bool(self._one_rank.find_variable_names(list_changed_names, rest, feeds))
        if changes:
            rest = [w for w in rest if self._behind([w], feeds)]
            names = frozenset(op.name for op in files)
            if late := self._one_rank.find_variable_names(list_changed_names, rest, feeds, names, changes):
                raise ProgramError(
                    "a run changes variables after it has written a checkpoint",
                    op=late[0],
                    given="an operation that changes variables and has a control input from a save operation",
                    expected="changes before the checkpoint is written, or in another Session.run",
                    action="save in one Session.run, and run the operation in the next one",
                )
            found = self._run_before(files, rest, fetches, targets, feeds, settings)
        done = self._write(files, found, feeds, settings[0])
        self._variables.bring_whole(self._one_rank.find_variable_names(list_used_names, rest, feeds, done, changes))
        last = [t for t in fetches if t not in found]
        wait = [op for op in targets if op in rest]
        values = self._one_rank.run_on_first_rank(last, feeds, settings[0], wait, done, changes)
        found |= dict(zip(last, (v[()] for v in values)))
        return [found[t] for t in fetches]

    def _run_before(
        self,
        files: Sequence[tf.Operation],
        rest: Sequence[Any],
        fetches: Sequence[tf.Tensor],
        targets: Sequence[tf.Operation],
        feeds: Feeds,
        settings: Settings,
    ) -> dict[tf.Tensor, Any]:
        """Runs on all ranks what does not depend on a checkpoint, before the checkpoint is written.

        Args:
          files: the SaveV2 operations of the run.
          rest: fetches and targets that depend on one of them, and are left out.
          fetches, targets, feeds, settings: as for ``run``.

        Returns:
          Tensor -> value, for the fetches and for the inputs of ``files``.
        """
        tensors = dict.fromkeys(t for t in fetches if t not in rest)
        tensors.update(dict.fromkeys(t for save in files for t in (save.inputs[0], *save.inputs[3:])))
        first = dict.fromkeys(op for op in targets if op not in rest)
        first.update((op, None) for save in files for op in save.control_inputs if not self._behind([op], feeds))
        return dict(zip(tensors, self._run_on_all(list(tensors), list(first), feeds, settings)))

    def _write(
        self, files: Sequence[tf.Operation], found: Mapping[tf.Tensor, Any], feeds: Feeds, options: Any
    ) -> frozenset[str]:
        """Writes those files for which ``found`` has the values, or other ranks have parts.

        Args:
          files: the SaveV2 operations of the run.
          found: values of tensors that have been computed.
          feeds: values of fed tensors.
          options: the RunOptions of Session.run.

        Returns:
          Names of the SaveV2 operations whose files are written; the others are left to the run on rank 0.
        """
        done = set()
        for op in files:
            values, (prefix, *others) = found, _list_saved_tensors(op)
            if not found:
                if not any(map(self._variables.is_not_whole_here, _list_saved_variables(op))):
                    continue
                values = {prefix: self._one_rank.run_on_first_rank([prefix], feeds, options, ())[0]}
                values |= dict(zip(others, self._run_on_all(others, [], feeds, (options, None)) if others else ()))
            _write_parts(op, tf.compat.as_str(np.asarray(values[prefix]).item()), values, self._variables)
            done.add(op.name)
        return frozenset(done)


def _list_saved_variables(save: tf.Operation) -> list[str]:
    """Returns the names of the variables that a SaveV2 writes."""
    return [name for name in map(_find_variable, save.inputs[3:]) if name is not None]


def _list_saved_tensors(save: tf.Operation) -> list[tf.Tensor]:
    """Returns the tensor with the file name of a SaveV2, and those inputs that are not the value of a variable."""
    return [save.inputs[0], *(t for t in save.inputs[3:] if _find_variable(t) is None)]


def _write_parts(save: tf.Operation, path: str, values: Mapping[tf.Tensor, np.ndarray], held: SessionVariables) -> None:
    """Executes a SaveV2 with each rank writing its own parts, which rank 0 then merges; collective.

    Args:
      save: the SaveV2 operation.
      path: prefix of the checkpoint's files.
      values: values of those inputs that are not to be read from variables.
      held: the session's variables.

    Raises:
      CheckpointError: a rank could not write; raised on every rank.
    """
    keys, specs = ([text.decode() for text in tf.get_static_value(t)] for t in save.inputs[1:3])
    shares: list[list[_Part]] = [[] for _ in range(held.context.size)]
    for key, spec, tensor in zip(keys, specs, save.inputs[3:]):
        name = None if tensor in values else _find_variable(tensor)
        if name is not None and held.is_not_whole_here(name):
            for rank, part in _list_parts(key, spec, name, held):
                shares[rank].append(part)
        elif name is not None:
            shares[0].append((key, spec, partial(held.read, name, 0, tensor.dtype)))
        else:
            shares[0].append((key, spec, partial(np.asarray, values[tensor])))
    parts = {rank: f"{path}_part-{rank}" for rank, share in enumerate(shares) if share}

    def write() -> None:
        for rank in held.context.ranks:
            if rank in parts:
                keys, specs, reads = zip(*shares[rank])
                tensors = [read() for read in reads]
                tf.raw_ops.SaveV2(prefix=parts[rank], tensor_names=keys, shape_and_slices=specs, tensors=tensors)

    def merge() -> None:
        if held.context.rank == 0:
            prefixes = list(parts.values())
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=path, delete_old_dirs=False)

    for when, act in (("written", write), ("merged", merge)):
        try:
            _act_together(when, act, path, held.context)
        except CheckpointError:
            for rank in held.context.ranks:
                if rank in parts:
                    remove_files(parts[rank])
            raise


def _act_together(when: str, act: Callable[[], None], path: str, context: Context) -> None:
    """Calls ``act`` on every rank, and raises a CheckpointError on all of them if it fails on one; collective.

    Args:
      when: "written" or "merged", for the error.
    """
    said = [b""]
    try:
        with tf_context.eager_mode():
            act()
    except (OSError, tf.errors.OpError) as error:
        said = [f"{type(error).__name__}: {error}"[:2000].encode()]
    if context.has_other_processes:
        purpose = f"a checkpoint {path} that is to be {when}"
        said = context.comms[0].allgather_bytes(f"whale/saver/{when}", said[0], WRITE_TIMEOUT_S, purpose)
    failed = [rank for rank, text in enumerate(said) if text]
    if failed:
        raise CheckpointError(
            f"a checkpoint could not be {when}",
            given=path,
            ranks=", ".join(map(str, failed)),
            reason=said[failed[0]].decode(errors="replace"),
            expected="a directory with free space that every rank can write to",
            action="remove the cause that the reason names, and save again; earlier checkpoints are intact",
        )


def _list_parts(key: str, spec: str, name: str, held: SessionVariables) -> list[tuple[int, _Part]]:
    """Returns (rank, part of the checkpoint that the rank writes) for a variable that is not replicated on all ranks.

    A deferred initial value is computed for this and not kept.

    Args:
      key: name in the checkpoint.
      spec: the slice of ``key`` that the variable is; "" if it is all of it.
      name: name of the variable.
      held: the session's variables.
    """
    initial = held.find_deferred(name)
    if initial is not None:
        size, shape = held.context.size, initial.shape
        if not initial.is_divisible or not shape or shape[0] < size:
            return [(0, (key, spec, initial.compute_whole))]
        even = make_one_axis_tiles(shard(0, divide_evenly(shape[0], size)))

        def compute_part(place: int) -> tf.Tensor:
            return initial.make_part(even, place).read_value()

        return [
            (p.place, (key, _format_slice(spec, p, shape), partial(compute_part, p.place)))
            for p in list_regions(even, shape)
        ]
    lying, held_type = held.find_sharding(name), held.find_type(name)
    dtype = tf.as_dtype(held_type.dtype)

    def read_part(rank: int) -> np.ndarray:
        return held.read(name, held.context.ranks.index(rank), dtype)

    if lying.tiles is None:
        holder = min(lying.ranks)
        return [(holder, (key, spec, partial(read_part, holder)))]
    shape = tuple(n or 0 for n in held_type.shape or ())

    def read(region: Region) -> np.ndarray:
        part = read_part(lying.order[region.place])
        return part[tuple(slice(i, i + n) for i, n in zip(region.start, region.size))]

    regions = list_regions(lying.tiles, shape)
    return [(lying.order[p.place], (key, _format_slice(spec, p, shape), partial(read, p))) for p in regions]


def _format_slice(spec: str, region: Region, shape: tuple[int, ...]) -> str:
    """Returns the slice spec, as SaveV2 takes it, of a region of a variable in the checkpoint.

    Args:
      spec: the slice of a larger tensor of the checkpoint that the variable itself is; "" if it is a whole tensor.
      region: the region within the variable.
      shape: the variable's shape.
    """
    if not spec:
        return format_spec(region, shape)
    *whole, slices = spec.split(" ")
    begins = [0 if of_one == "-" else int(of_one.partition(",")[0]) for of_one in slices.split(":")]
    return slice_spec(tuple(map(int, whole)), [b + o for b, o in zip(begins, region.begin)], region.size)


def _find_variable(tensor: tf.Tensor) -> str | None:
    """Returns the name of the variable whose value ``tensor`` is; None if it is something else."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "ReadVariableOp" or tensor.op.inputs[0].op.type != "VarHandleOp":
        return None
    handle = tensor.op.inputs[0].op
    return handle.get_attr("shared_name").decode() or str(handle.name)
