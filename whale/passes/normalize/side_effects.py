"""Makes side effects that one device would have happen once on each copy of what they change.

``run_python_everywhere``: a Python function (``tf.numpy_function``, ``tf.py_function``) may change objects of the
script: an environment, a list, a counter. Each rank runs the script and has such objects of its own, so each runs the
function, on the same replicated operands. The first rank's results are used on all ranks, since another rank may draw
other numbers. Lookup tables and queues are such objects too: the script finds on every rank what a step inserts. Their
strings, which cannot be sent, each rank reads from its own. Such objects are also the script's iterators and datasets
that a step reads, whose positions and shuffles continue from call to call, and what datasets' functions insert.

``use_shared_objects_once``: ranks that are threads of one process share the tables, queues and other objects of the
script. One of them, the first, uses these objects, in the order of the program, and the others get its results.

``share_hidden_updates``: a dataset that a step makes is read by the first rank only. If its functions change variables
(a layer that numbers the elements of a dataset of candidates, a reduction that counts), the first rank's copies differ
from the others'. After the op that reads such a dataset, nodes are added that assign the first rank's values on every
rank.

Decisions: 0179, 0180.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from whale.ir.ops import (
    DATASET_LOOPS,
    ELEMENTS_READ,
    HAS_BODIES,
    IDENTITIES,
    ITERATOR_READS,
    LOOPS,
    OBJECT_READS,
    OBJECT_UPDATES,
    PYTHON_FUNCTIONS,
    UPDATES,
)
from whale.ir.program import Node, Program, Ref, find_called_functions, iterate_function_refs
from whale.ir.values import UNMOVABLE, DType, TensorType
from whale.sharding_rules.graph import list_called_functions

# Ops that read a dataset to its end before nodes that wait for them begin.
_READERS = frozenset({"ReduceDataset", "DatasetToSingleElement"})

_ITERATORS_OF_SESSIONS = frozenset({"Iterator", "IteratorV2", "OneShotIterator"})

# AutoGraph turns a Python loop over a dataset into this op where the elements are datasets; all other such loops are
# loops over tensors (decision 0197). Mostly it is a training loop, which must not run on the first rank alone.
_LOOP = "ScanDataset"


def run_python_everywhere(program: Program) -> Program:
    """Marks Python functions, and changes of tables, queues and iterators, to run on every rank, and makes their
    readers read the first rank's results.

    Applies to the program and to the bodies of its loops and branches.
    """
    iterators = _reads_iterators(program)
    # Tables and queues that a session's graph makes are on the first rank only.
    given = _find_objects(program, lambda node: node.op == "Placeholder")
    bodies = {
        name: _take_first_results(program, program.functions[name], iterators, given.get(name, set()))
        for name in _list_bodies(program)
    }
    changed = _take_first_results(program, program, iterators, given[""])
    if changed is program and all(bodies[name] is program.functions[name] for name in bodies):
        return program
    return replace(changed, functions={**program.functions, **bodies})


def _reads_iterators(program: Program) -> bool:
    """Tells whether the program reads iterators that the script has, or loops over a dataset.

    A session's iterators are operations of its graph, which begin and are read on the first rank only.
    """
    if any(node.op in _ITERATORS_OF_SESSIONS for node in program.nodes):
        return False
    return any(node.op in ITERATOR_READS for graph in (program, *program.functions.values()) for node in graph.nodes)


def use_shared_objects_once(program: Program) -> Program:
    """Marks ops that take the handle of a table, queue, or another object that is no variable to run on the first rank.

    Applies to the program and to the bodies of its loops and branches.
    """
    objects = _find_objects(program, lambda node: True)
    if not objects[""]:
        return program
    bodies = {name: _mark_users(program.functions[name], refs) for name, refs in objects.items() if name}
    return replace(_mark_users(program, objects[""]), functions={**program.functions, **bodies})


def _find_objects(program: Program, made_by: Callable[[Node], bool]) -> dict[str, set[Ref]]:
    """Maps each graph ("": the program) to its handles of objects that are no variables; in the bodies of loops and
    branches, to those that are passed in.

    Args:
      made_by: tells whether handles that a node of the program yields count.
    """
    made = {
        ref
        for node in program.nodes
        if node.name not in program.variable_of and node.op not in HAS_BODIES | IDENTITIES and made_by(node)
        for ref, kind in zip(node.list_refs(), node.outputs)
        if kind.dtype == "resource"
    }
    found, waiting = {"": made}, [("", made)]
    while waiting:
        name, known = waiting.pop()
        graph = program.functions[name] if name else program
        for node in graph.nodes:
            if node.op in IDENTITIES and node.inputs[0] in known:
                known.update(node.list_refs())
            if node.op not in HAS_BODIES:
                continue
            if node.op in LOOPS:
                known.update(ref for given, ref in zip(node.inputs, node.list_refs()) if given in known)
            passed = [ref in known for ref in (node.inputs if node.op in LOOPS else node.inputs[1:])]
            for func in list_called_functions(node):
                body = program.functions[func.name]
                mine = {Ref(argument) for argument, one in zip(body.inputs, passed) if one}
                if not mine <= found.get(func.name, set()):
                    found[func.name] = found.get(func.name, set()) | mine
                    waiting.append((func.name, found[func.name]))
    return found


def _mark_users(graph: Program, objects: set[Ref]) -> Program:
    """Returns the graph with the ops that take one of ``objects`` marked; loops and branches pass them on."""
    passes_on = HAS_BODIES | IDENTITIES
    nodes = [
        node.with_marks(on_first_rank=True)
        if node.op not in passes_on and not objects.isdisjoint(node.inputs)
        else node
        for node in graph.nodes
    ]
    return graph.replace_nodes(tuple(nodes))


def _list_bodies(program: Program) -> Iterator[str]:
    """Yields the names of the functions of loops and branches, each once; functions of datasets are left out."""
    seen: set[str] = set()
    waiting = [program]
    while waiting:
        for node in waiting.pop().nodes:
            if node.op in HAS_BODIES:
                for func in list_called_functions(node):
                    if func.name in program.functions and func.name not in seen:
                        seen.add(func.name)
                        waiting.append(program.functions[func.name])
                        yield func.name


def _take_first_results(program: Program, graph: Program, iterators: bool, objects: set[Ref]) -> Program:
    """Returns the graph with ops that change objects of the script marked to run on every rank. Behind each of their
    results an Identity is added that yields the first rank's value on all ranks.

    Args:
      graph: the program, or the body of one of its loops or branches.
      iterators: whether iterators are read on every rank.
      objects: the handles of the script's objects in this graph.
    """
    called = {
        node.name
        for node in graph.nodes
        if _is_called(node, objects)
        or (iterators and node.op in ITERATOR_READS)
        or _moves_on_by_dataset(program, graph, node)
    }
    begins = any(graph.by_name[name].op in {"MakeIterator", *_READERS} for name in called)
    if not called and not any(node.op in ELEMENTS_READ for node in graph.nodes):
        return graph
    taken = {
        ref: Ref(f"{ref.node}/whale_of_first_{ref.index}")
        for node in graph.nodes
        if node.name in called or node.op in ELEMENTS_READ
        for ref, kind in zip(node.list_refs(), node.outputs)
        if kind.dtype not in UNMOVABLE
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        node = replace(node, inputs=tuple([taken.get(ref, ref) for ref in node.inputs]))
        everywhere = node.name in called or (begins and _makes_dataset(node))
        nodes.append(node.with_marks(on_every_rank=True) if everywhere else node)
        for ref, kind in zip(node.list_refs(), node.outputs):
            if ref in taken:
                first = Node(taken[ref].node, "Identity", (ref,), (), {"T": DType(kind.dtype)}, (kind,), node.scope)
                nodes.append(first.with_marks(of_first_rank=True))
    return graph.replace_nodes(tuple(nodes), outputs=tuple(taken.get(ref, ref) for ref in graph.outputs))


def _is_called(node: Node, objects: set[Ref]) -> bool:
    """Returns True if an op uses a table or queue that the script has on every rank, or is a stateful Python function
    whose results can be sent.
    """
    if node.op in OBJECT_UPDATES or node.op in OBJECT_READS:
        return node.inputs[0] in objects
    return node.op in PYTHON_FUNCTIONS and node.stateful and not any(t.dtype in UNMOVABLE for t in node.outputs)


def _moves_on_by_dataset(program: Program, graph: Program, node: Node) -> bool:
    """Returns True if an op reads a dataset, and by that changes objects of the script.

    If the script has made the dataset, these are the counters of its shuffles, from which the script's next loop over
    it takes its order. Functions of any dataset may change tables and queues.
    """
    if node.op not in _READERS:
        return False
    datasets = _list_datasets(graph, node)
    called = find_called_functions(datasets, program.functions).values()
    return any(made.op == "Placeholder" and made.outputs[0].dtype == "variant" for made in datasets) or any(
        inner.op in OBJECT_UPDATES for body in called for inner in body.nodes
    )


def _makes_dataset(node: Node) -> bool:
    return node.op.rstrip("V23456").endswith("Dataset") and node.op not in DATASET_LOOPS


def share_hidden_updates(program: Program) -> Program:
    """Adds nodes that give all ranks the first rank's values of variables that functions of a dataset change, after the
    op that reads the dataset.
    """
    readers = [node for node in program.nodes if node.op in _READERS]
    added: dict[str, list[Node]] = {}
    for reader in readers:
        changed = dict.fromkeys(
            handle for node in _list_datasets(program, reader) for handle in find_hidden_updates(program, node)
        )
        if changed:
            added[reader.name] = [
                node for handle in changed for node in _share(program, reader, program.variable_of[handle].type, handle)
            ]
    if not added:
        return program
    # Nodes that wait for the reader may use the variables: they wait for the assignments too.
    behind = {name: tuple(node.name for node in new if node.op == "AssignVariableOp") for name, new in added.items()}
    nodes: list[Node] = []
    for node in program.nodes:
        waits = [name for before in node.controls for name in (before, *behind.get(before, ()))]
        if len(waits) > len(node.controls):
            node = replace(node, controls=tuple(dict.fromkeys(waits)))
        nodes.append(node)
        nodes += added.get(node.name, ())
    effects = (*program.effects, *(name for names in behind.values() for name in names))
    return program.replace_nodes(tuple(nodes), effects=effects)


def find_hidden_updates(program: Program, node: Node) -> dict[str, Node]:
    """Maps the handle nodes of variables that functions of a dataset's ``node`` update to the updating op."""
    found: dict[str, Node] = {}
    mine = [r for r in node.inputs if program.find_type(r).dtype == "resource"]
    for _, func in iterate_function_refs(node):
        body = program.functions.get(func.name)
        if body is None:
            continue
        theirs = [name for name in body.inputs if body.by_name[name].outputs[0].dtype == "resource"]
        updates = _find_updated_arguments(program, body, set())
        if not updates:
            continue
        # Arguments of a dataset's function: the elements, which are no resources, then its captures, in order.
        passed = dict(zip(theirs, mine)) if len(theirs) == len(mine) else {}
        for argument, update in updates.items():
            refs = [passed[argument]] if argument in passed else mine
            found.update((ref.node, update) for ref in refs if ref.node in program.variable_of)
    return found


def _find_updated_arguments(program: Program, body: Program, seen: set[str]) -> dict[str, Node]:
    """Maps the arguments of a function that are variables to the op that updates them, in it or in functions that it
    calls; arguments that nothing updates are left out.

    Args:
      body: the function.
      seen: names of the functions that the search comes from, which are not entered again.
    """
    found: dict[str, Node] = {}
    if body.name in seen:
        return found
    for node in body.nodes:
        if node.op in UPDATES and node.inputs:
            found[node.inputs[0].node] = node
        for _, func in iterate_function_refs(node):
            inner = program.functions.get(func.name)
            if inner is not None and (updates := _find_updated_arguments(program, inner, {*seen, body.name})):
                update = next(iter(updates.values()))
                found.update((ref.node, update) for ref in node.inputs if body.find_type(ref).dtype == "resource")
    return found


def _list_datasets(program: Program, reader: Node) -> list[Node]:
    """Lists the reader and the nodes that create its dataset; [] if one of them is a Python loop over a dataset, which
    is refused elsewhere.
    """
    found: dict[str, Node] = {}
    waiting = [reader]
    while waiting:
        node = waiting.pop()
        if node.op == _LOOP:
            return []
        if node.name not in found:
            found[node.name] = node
            waiting += [program.by_name[r.node] for r in node.inputs if program.find_type(r).dtype == "variant"]
    return list(found.values())


def _share(program: Program, reader: Node, held: TensorType, handle: str) -> tuple[Node, Node, Node]:
    """Returns the nodes that read a variable after ``reader`` ran, take the first rank's value, and assign it on every
    rank.

    Args:
      held: type of the variable's value.
    """
    name = f"{reader.name}/whale_shared/{handle}"
    dtype: Mapping[str, DType] = {"dtype": DType(held.dtype)}
    # On ranks where the reader does not run, the assignment still waits for the reader's control inputs.
    read = Node(f"{name}/read", "ReadVariableOp", (Ref(handle),), (reader.name,), dtype, (held,), "", True)
    one = Node(f"{name}/of_first", "Identity", (Ref(read.name),), (), {"T": DType(held.dtype)}, (held,))
    assign = Node(
        f"{name}/assign",
        "AssignVariableOp",
        (Ref(handle), Ref(one.name)),
        tuple(dict.fromkeys((*reader.controls, reader.name, read.name))),
        {**dtype, "validate_shape": False},
        (),
        "",
        True,
    )
    return read, one.with_marks(of_first_rank=True), assign
