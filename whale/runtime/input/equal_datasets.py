"""Checks that the ranks read the same dataset: the same data, through the same functions, in the same order.

Ranks take different rows of a dataset, so their rows do not show whether all read the same one. What it is built of
does, without reading it: tensors, numbers, seeds, functions, and what these capture, such as tables. Where Python
functions, generators or files decide the elements, checksums of these are taken as they are read (``Summary``).

Decision: 0134.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from whale.ir.ops import DRAWS
from whale.runtime.input.equal_inputs import FIRST_STEPS, number_tables

# Datasets that change no element, or name files of this host only.
_LEFT_OUT = (
    "_PrefetchDataset",
    "_OptionsDataset",
    "CacheDataset",
    "_SaveDataset",
    "_SnapshotDataset",
    "_RebatchDataset",
)
_OF_SPEED = ("parallel", "prefetch", "buffer_output")  # parts of names of attributes that may differ between hosts
# Attributes of operations that refer to objects of this process.
_OF_PROCESS = ("token", "shared_name", "container", "metadata", "config", "config_proto", "executor_type", "name")
# Datasets whose elements follow from what they are built of; their names also occur as ops inside of functions.
_SEEN = (
    "AssertCardinality Batch Concatenate Filter FlatMap Interleave List Map Options PaddedBatch ParallelBatch "
    "ParallelInterleave ParallelMap Prefetch Range Rebatch Repeat Scan Shard Skip Take TakeWhile TensorSlice Tensor "
    "Unbatch Unique Window Zip"
).split()
_SEEN_DATASETS = {f"_{name}Dataset" for name in _SEEN}
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_FACTOR = 1_000_003
_BEFORE_A_ROUND = 1 << 62  # stands for a batch number after which any other number begins a new round
_MOST_SAMPLES = 1 << 40  # larger than any batch
_READS = (*_PYTHON, "ReadFile", "MatchingFiles")


def describe_build(dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """Returns all that decides a dataset's elements, keyed by a description for messages; equal on ranks that read the
    same.

    What a Python function, a generator or a file yields is not covered.
    """
    found: dict[str, tf.Tensor] = {}
    for number, node in enumerate(_nodes(dataset)):
        kind = type(node).__name__.strip("_")
        if type(node).__name__ in _LEFT_OUT:
            continue
        place = f"{kind} ({number} before the end)" if number else kind
        found[f"the kind of {place}"] = tf.constant(kind)
        for what, value in _attributes(node):
            found[f"{what} of {place}"] = _strip_folder(value)
        for wrapper in node._functions():
            called = getattr(getattr(wrapper, "_func", None), "__name__", "a function")
            for what, value in _describe_function(wrapper.function):
                found[f"{what} of `{called}` in {place}"] = value
    return found


def _nodes(dataset: Any) -> Iterator[Any]:
    """Yields the dataset and all datasets that it is made from, each once."""
    seen, left = set(), [dataset]
    while left:
        node = left.pop(0)
        if id(node) not in seen:
            seen.add(id(node))
            left += node._inputs()
            yield node


def _attributes(node: Any) -> Iterator[tuple[str, tf.Tensor]]:
    for name, value in sorted(vars(node).items()):
        if any(part in name for part in _OF_SPEED):
            continue
        name = name.strip("_")
        if name == "reshuffle_each_iteration":
            yield name, tf.constant(value in (None, True))
        elif _is_held(value):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value) if _is_held(one))


def _is_held(value: Any) -> bool:
    return isinstance(value, tf.__internal__.EagerTensor) and value.dtype not in (tf.resource, tf.variant)


def _describe_function(function: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields (description, value) of what decides the results of a dataset's function: its operations, constants, seeds
    and captures.
    """
    graph_def = function.graph.as_graph_def()
    constants: list[tf.Tensor] = []
    seeds: list[int] = []
    yield "the operations", tf.constant(_operations(graph_def, constants, seeds))
    yield "the seeds", tf.constant(seeds, tf.int64)
    for i, constant in enumerate(constants):
        yield f"constant {i}", _strip_folder(constant)
    variables = {id(v.handle): v for v in function.graph.variables}
    for i, value in enumerate(
        function.captured_inputs
    ):  # variables and tables are numbered, since their names depend on what the process has created before
        if _is_held(value):
            yield f"captured tensor {i}", _strip_folder(value)
        elif (variable := variables.get(id(value))) is not None and not _is_random_state(variable):
            yield f"the captured variable {i}", tf.convert_to_tensor(variable)
    yield from number_tables({str(i): value for i, value in enumerate(function.captured_inputs)}).items()


def _is_random_state(variable: Any) -> bool:
    """Returns True if a variable has the dtype and shape of a generator's state; each rank may perturb its own samples
    differently.
    """
    shape = variable.shape.as_list()
    return (variable.dtype == tf.int64 and shape in ([2], [3])) or (variable.dtype == tf.uint32 and shape == [2])


def _operations(graph_def: Any, constants: list[tf.Tensor], seeds: list[int]) -> int:
    """Returns a checksum of the operations of a graph and of the functions that it calls, independent of their names.

    Args:
      constants: list to which the values of constants are appended.
      seeds: list to which the seeds of random operations are appended.
    """
    library = {f.signature.name: f for f in graph_def.library.function}
    numbers: dict[str, int] = {}  # of functions, in the order in which they are met
    left: list[str] = []

    def number_of(name: str) -> str:
        if name not in numbers:
            numbers[name] = len(numbers)
            left.append(name)
        return f"function {numbers[name]}"

    found = _describe_nodes(graph_def.node, {}, number_of, library, constants, seeds)
    while left:
        function = library.get(left.pop(0))
        if function is not None:
            arguments = {arg.name: i for i, arg in enumerate(function.signature.input_arg)}
            found.append(_describe_nodes(function.node_def, arguments, number_of, library, constants, seeds))
    return zlib.crc32(repr(found).encode())


def _describe_nodes(
    nodes: Any,
    arguments: Mapping[str, int],
    number_of: Callable[[str], str],
    library: Mapping[str, Any],
    constants: list[tf.Tensor],
    seeds: list[int],
) -> list[Any]:
    places = dict(arguments) | {node.name: len(arguments) + i for i, node in enumerate(nodes)}
    found: list[Any] = []
    for node in nodes:
        operands = [(places.get(name.lstrip("^").partition(":")[0]), name.partition(":")[2]) for name in node.input]
        op = number_of(node.op) if node.op in library else node.op
        definition = op_def_registry.get(node.op)
        known = [a.name for a in definition.attr] if definition is not None else []
        attributes: list[Any] = []
        for name in known:
            if name in _OF_PROCESS or name not in node.attr:
                continue
            attribute = node.attr[name]
            if node.op == "Const" and name == "value":
                constants.append(tf.constant(tf.make_ndarray(attribute.tensor)))
            elif name in ("seed", "seed2"):
                seeds.append(attribute.i)
            elif attribute.WhichOneof("value") == "func":
                attributes.append((name, number_of(attribute.func.name)))
            elif attribute.list.func:
                attributes.append((name, [number_of(f.name) for f in attribute.list.func]))
            else:
                attributes.append((name, attribute.SerializeToString(deterministic=True)))
        found.append((op, operands, attributes))
    return found


def _strip_folder(value: tf.Tensor) -> tf.Tensor:
    """Removes from paths of files the folder that they have in common, which may differ between hosts; returns other
    values unchanged.
    """
    if value.dtype != tf.string or not tf.size(value):
        return value
    texts = np.asarray(value.numpy(), object).reshape(-1).tolist()
    if not all(text.startswith(b"/") or b"://" in text for text in texts):
        return value
    folders = [text.split(b"/")[:-1] for text in texts]
    common = next((i for i, names in enumerate(zip(*folders)) if len(set(names)) > 1), min(map(len, folders)))
    return tf.constant([b"/".join(text.split(b"/")[common:]) for text in texts])


def is_seen(dataset: Any) -> bool:
    """Returns True if ``describe_build`` covers all that decides a dataset's elements, wherever in it the ranks begin
    to read; its batches then need not be compared.
    """
    for node in _nodes(dataset):
        kind = type(node).__name__
        in_memory = kind == "CacheDataset" and not tf.strings.length(node._filename)
        if kind not in _SEEN_DATASETS and not in_memory:
            return False
        for wrapper in node._functions():
            for op in _types(wrapper.function.graph.as_graph_def()):
                kind = op.rstrip("0123456789").removesuffix("V")
                if op in _READS or (kind.endswith("Dataset") and f"_{kind}" not in _SEEN_DATASETS):
                    return False
    return True


def _types(graph_def: Any) -> Iterator[str]:
    for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)):
        yield from (node.op for node in nodes)


def find_drawn_leaves(dataset: Any) -> list[bool]:
    """Returns, for each tensor of an element, True if ranks may have different values, as when each rank perturbs its
    own samples.

    These are values of random operations without a seed, of a generator's state, or floating-point values from Python.
    """
    leaves = tf.nest.flatten(dataset.element_spec)
    sources = [find_drawn_leaves(source) for source in dataset._inputs()]
    before = [drawn for source in sources for drawn in source]
    functions = [wrapper.function for wrapper in dataset._functions()]
    if type(dataset).__name__ in ("_MapDataset", "_ParallelMapDataset"):
        found = _find_drawn_results(functions[0], before, parallel=type(dataset).__name__ == "_ParallelMapDataset")
        if len(found) == len(leaves):
            return found
    if len(sources) > 1 and len(before) != len(leaves) and len(before) % len(leaves) == 0:
        return [any(before[i :: len(leaves)]) for i in range(len(leaves))]  # elements of one source after the other
    drawn = any(_draws(node) for f in functions for node in _iterate_nodes(f.graph.as_graph_def()))
    if len(before) == len(leaves) and not drawn:
        return before
    return [drawn or any(before)] * len(leaves)


def _iterate_nodes(graph_def: Any) -> Iterator[Any]:
    for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)):
        yield from nodes


def _draws(node: Any) -> bool:
    return node.op in DRAWS and not (node.attr["seed"].i or node.attr["seed2"].i)


def _find_drawn_results(function: Any, before: list[bool], parallel: bool) -> list[bool]:
    """Returns, for each result of a map's function, True if ranks may have different values.

    Args:
      before: the same for the function's arguments.
      parallel: whether the map runs in parallel, so that calls of Python come in any order.
    """
    graph = function.graph
    captured = set(map(id, graph.internal_captures))
    arguments = [t for t in graph.inputs if id(t) not in captured]
    states = {id(v.handle) for v in graph.variables if _is_random_state(v)}
    begin = {id(t) for t, drawn in zip(arguments, before) if drawn} if len(arguments) == len(before) else set()
    if len(arguments) != len(before) and any(before):
        begin = set(map(id, arguments))
    begin |= {
        id(inner) for inner, outer in zip(graph.internal_captures, function.captured_inputs) if id(outer) in states
    }
    library = graph.as_graph_def().library.function
    in_calls = any(_draws(node) for f in library for node in f.node_def)

    known: dict[int, tuple[bool, bool]] = {}  # of an operation: (drawn, from Python)

    def look_up(tensor: Any) -> tuple[bool, bool]:
        if id(tensor) in begin:
            return True, False
        op = tensor.op
        if id(op) not in known:
            known[id(op)] = False, False
            behind = [look_up(t) for t in op.inputs]
            calls = any(a.HasField("func") or a.list.func for a in op.node_def.attr.values())
            drawn = _draws(op.node_def) or (calls and in_calls) or any(d for d, _ in behind)
            known[id(op)] = drawn, op.type in ("PyFunc", "EagerPyFunc") or any(p for _, p in behind)
        return known[id(op)]

    found = []
    for tensor in graph.outputs:
        drawn, python = look_up(tensor)
        found.append(drawn or (python and (parallel or tensor.dtype.is_floating)))
    return found


def summary_of(samples: Sequence[Any], every: int) -> Summary | None:
    """Returns a `Summary`, which records some batches so that they can be compared between ranks, or None if none is
    needed.

    None is needed where elements follow from what the datasets are built of, which is compared when they are made. None
    is possible where every tensor comes of random maps without a seed, in which ranks may differ.

    Args:
      samples: the datasets that are zipped: a sample has the tensors of the first, then those of the second, and so on.
      every: every how many batches one is recorded; 0: none.
    """
    if not every or all(map(is_seen, samples)):
        return None
    leaves = [i for i, drawn in enumerate(drawn for one in samples for drawn in find_drawn_leaves(one)) if not drawn]
    return Summary(leaves, every) if leaves else None


class Summary:
    """Records values of whole batches as a dataset's functions see them, before a rank takes its rows, to be compared
    between ranks.

    Args:
      leaves: indices of the tensors of a sample that are recorded.
      every: the first batches are recorded, and after them every n-th one, n being ``every``.
    """

    def __init__(self, leaves: Sequence[int], every: int) -> None:
        self._leaves, self._every = leaves, every
        self._held: dict[tuple[int, int], list[np.ndarray]] = {}  # by round of a repetition, and number in it
        self._rounds_met = self._rounds_yielded = 0
        self._last = _BEFORE_A_ROUND
        self._reads = self._mixed = False

    def begin(self) -> None:
        """Begins an iteration. If another one is open, nothing is recorded any more, since it is unknown which of them
        a batch belongs to.
        """
        self._mixed = self._mixed or self._reads
        self._held, self._reads = {}, True
        self._rounds_met = self._rounds_yielded = 0
        self._last = _BEFORE_A_ROUND

    def end(self) -> None:
        """Ends the iteration."""
        self._reads = False

    def note_after(self, number: tf.Tensor, samples: tf.data.Dataset) -> tf.Tensor:
        """Returns an int64 zero that depends, in the dataset's graph, on the recording of batch number ``number``, if
        this batch is to be recorded. The caller adds it to a value that it uses, so that the recording happens before.
        """
        specs = tf.nest.flatten(samples.element_spec)
        one_shape = all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs)

        def fold(sums: tf.Tensor, *sample: Any) -> tf.Tensor:
            tensors = tf.nest.flatten(sample)
            text = tf.stack([tf.io.serialize_tensor(tensors[i]) for i in self._leaves])
            return sums * _FACTOR + tf.strings.to_hash_bucket_fast(text, 1 << 62)

        def tell() -> tf.Tensor:
            if one_shape:
                whole = tf.nest.flatten(samples.batch(_MOST_SAMPLES).get_single_element())
                kept = [whole[i] for i in self._leaves]
            else:  # takes milliseconds, as functions of datasets are made anew for each
                kept = [samples.reduce(tf.zeros([len(self._leaves)], tf.int64), fold)]
            return tf.ensure_shape(tf.numpy_function(self._keep, [number, *kept], tf.int64), [])

        first = number < FIRST_STEPS
        wanted = first | tf.equal(number % self._every, 0) if one_shape else first
        return tf.cond(wanted, tell, lambda: tf.zeros([], tf.int64))

    def _keep(self, number: np.ndarray, *tensors: np.ndarray) -> np.ndarray:
        if not self._mixed:  # what reads ahead may be in a later round than what is yielded
            self._rounds_met += number == 0
            self._held[self._rounds_met, int(number)] = [np.array(tensor) for tensor in tensors]
        return np.int64(0)

    def find(self, number: int) -> list[tf.Tensor]:
        """Returns what was recorded of the latest recorded batch up to batch ``number``; [] if nothing was, or it is
        unknown.

        Args:
          number: of the batch that is yielded, within its repetition.
        """
        if number <= self._last:
            self._rounds_yielded += 1
        self._last = number
        latest = number if number < FIRST_STEPS else max(FIRST_STEPS - 1, number - number % self._every)
        wanted = self._rounds_yielded, latest
        for key in [key for key in list(self._held) if key < wanted]:
            del self._held[key]
        return [] if self._mixed else [tf.constant(tensor) for tensor in self._held.get(wanted, [])]
