"""Traits of ops hold what their comments say, of ops that exist, and are written nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import whale_ops
from whale.ir import ops

TRAITS: dict[str, frozenset[str]] = {
    name: value for name, value in vars(ops).items() if isinstance(value, frozenset) and not name.startswith("_")
}
# Traits that have nothing in common with each other.
DISJOINT = [
    ("EXCHANGES", "MEETINGS", "CONTROL_FLOW", "ALIASES", "READS", "UPDATES", "REF_UPDATES", "REF_VARIABLES",
     "CONTRACTIONS", "DRAWS", "STATELESS_DRAWS", "LISTS", "ASKS_SHAPE", "BATCH_NORMS", "BATCH_NORM_GRADIENTS",
     "SOFTMAXES", "CROSS_ENTROPIES", "REDUCTIONS"),
    ("COLLECTIVES", "POINT_TO_POINT"),
    ("LOOPS", "BRANCHES", "CALLS", "FRAMES"),
    ("IDENTITIES", "RESHAPES"),
    ("ASSIGNS", "APPLIES", "APPLIES_ROWS", "SCATTERS", "ADVANCES"),
    ("MATMULS", "CONVOLUTIONS", "EINSUMS"),
    ("LIST_PUTS", "LIST_TAKES", "LIST_STACKS"),
]  # fmt: skip
# Each is contained in the next, and is less than it.
CHAINS = [
    ("ALL_REDUCES", "RANK_REDUCTIONS", "COLLECTIVES", "EXCHANGES"),
    ("POINT_TO_POINT", "EXCHANGES"),
    ("LOOPS", "HAS_BODIES", "CONTROL_FLOW"),
    ("BRANCHES", "HAS_BODIES"),
    ("CALLS", "CONTROL_FLOW"),
    ("FRAMES", "CONTROL_FLOW"),
    ("IDENTITIES", "VIEWS", "ALIASES"),
    ("RESHAPES", "VIEWS"),
    ("READS_ROWS", "READS"),
    ("READS_ROWS", "LOOKUPS"),
    ("ROW_LOOKUPS", "LOOKUPS"),
    ("ADDS", "ASSIGNS", "UPDATES"),
    ("APPLIES", "UPDATES"),
    ("APPLIES_ROWS", "UPDATES"),
    ("SCATTERS", "UPDATES"),
    ("FUSED_UPDATES", "UPDATES"),
    ("ADVANCES", "UPDATES"),
    ("MATMULS", "CONTRACTIONS"),
    ("EINSUMS", "CONTRACTIONS"),
    ("FILTER_GRADIENTS", "CONVOLUTIONS", "CONTRACTIONS"),
    ("STREAM_DRAWS", "STATELESS_DRAWS", "RANDOM"),
    ("DRAWS", "RANDOM"),
    ("LIST_PUTS", "LISTS"),
    ("LIST_TAKES", "LISTS"),
    ("LIST_STACKS", "LISTS"),
]
# Trait -> the names of TensorFlow's ops that have it, and those that look so but do not.
FAMILIES = {
    "APPLIES": (r"ResourceApply\w+", ()),
    "APPLIES_ROWS": (r"ResourceSparseApply\w+", ()),
    "SCATTERS": (r"ResourceScatter\w+", ()),
    "ADVANCES": (r"Stateful(Uniform|Standard|Truncated|Random)\w*|Rng\w+", ()),
    "REF_UPDATES": (r"Assign(Add|Sub)?|(Sparse)?Apply[A-Z]\w+|Scatter(Nd)?(Add|Sub|Mul|Div|Max|Min|Update)|CountUpTo|"
                    r"StridedSliceAssign", ()),
    "READS_ROWS": (r"ResourceGather\w*", ()),
    "CONVOLUTIONS": (r"(Conv|Conv[23]D|DepthwiseConv2dNative)(Backprop\w+)?",
                     ("Conv3DBackpropFilter", "Conv3DBackpropInput")),  # no graph of today may have these
    "MATMULS": (r"(Batch)?MatMul(V\d)?", ()),
    "LISTS": (r"(Empty)?TensorList\w*", ()),
    "BATCH_NORMS": (r"FusedBatchNorm(V\d)?", ()),
    "BATCH_NORM_GRADIENTS": (r"FusedBatchNormGrad(V\d)?", ()),
    "LOOPS": (r"(Stateless)?While", ()),
    "BRANCHES": (r"(Stateless)?(If|Case)", ()),
    "FRAMES": (r"(Ref)?(Enter|Exit|Switch|Merge|NextIteration)|LoopCond", ()),
    "STATELESS_DRAWS": (r"Stateless(Random|Truncated|Parameterized|Multinomial|Shuffle|Sample)\w*|RandomIndexShuffle",
                        ("StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")),
}  # fmt: skip


@pytest.fixture(scope="module")
def registered() -> dict[str, object]:
    """TensorFlow's and Whale's ops, by name."""
    import tensorflow as tf
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import op_def_registry

    assert tf.raw_ops is not None  # all modules of ops are loaded
    found = op_def_pb2.OpList()
    found.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    whale_ops.load_ops()
    mine = {name: op_def_registry.get(name) for names in TRAITS.values() for name in names if name.startswith("Whale")}
    return {**{op.name: op for op in found.op}, **{name: op for name, op in mine.items() if op is not None}}


def test_traits_relate_as_documented() -> None:
    for group in DISJOINT:
        for i, one in enumerate(group):
            for other in group[i + 1 :]:
                assert not TRAITS[one] & TRAITS[other], (one, other)
    for chain in CHAINS:
        for one, other in pairwise(chain):
            assert TRAITS[one] < TRAITS[other], (one, other)
    assert ops.EXCHANGES == ops.COLLECTIVES | ops.POINT_TO_POINT
    assert ops.HAS_BODIES == ops.LOOPS | ops.BRANCHES
    assert ops.VIEWS == ops.IDENTITIES | ops.RESHAPES


def test_every_op_is_registered(registered: dict[str, object]) -> None:
    unknown = {name for names in TRAITS.values() for name in names} - registered.keys()
    assert unknown == {ops.HOROVOD_ALL_REDUCE}  # Horovod's library registers it, where it is installed


@pytest.mark.parametrize("trait", FAMILIES)
def test_a_trait_has_all_ops_of_its_family(trait: str, registered: dict[str, object]) -> None:
    pattern, others = FAMILIES[trait]
    family = {name for name in registered if re.fullmatch(pattern, name)}
    assert family - TRAITS[trait] == set(others)


def test_what_draws_has_seeds(registered: dict[str, object]) -> None:
    seeded = {
        name
        for name, op in registered.items()
        if op.is_stateful and {"seed", "seed2"} <= {a.name for a in op.attr}  # type: ignore[attr-defined]
    }
    others = {name for name in seeded - ops.DRAWS if not re.search("Sampler|CudnnRNN|Queue", name)}
    assert seeded >= ops.DRAWS and others == set()


def test_what_has_no_effect_is_stateless(registered: dict[str, object]) -> None:
    for trait in ("VIEWS", "ASKS_SHAPE", "CONTRACTIONS", "STATELESS_DRAWS", "SOFTMAXES", "REDUCTIONS", "BATCH_NORMS"):
        assert {n for n in TRAITS[trait] if registered[n].is_stateful} == set(), trait  # type: ignore[attr-defined]
    for trait in ("UPDATES", "READS", "DRAWS"):
        assert {n for n in TRAITS[trait] if not registered[n].is_stateful} == set(), trait  # type: ignore[attr-defined]


def test_updates_take_a_handle_and_lists_a_list(registered: dict[str, object]) -> None:
    def types(name: str) -> list[str]:
        operands = registered[name].input_arg  # type: ignore[attr-defined]
        return [{20: "resource", 21: "variant"}.get(a.type, "") for a in operands]

    for name in ops.UPDATES | (ops.READS - {"_ReadVariablesOp"}):  # which takes any number of handles
        assert types(name)[0] == "resource", name
    for name in ops.LIST_PUTS | ops.LIST_TAKES | ops.LIST_STACKS:
        assert types(name)[0] == "variant", name
    for name in ops.REF_UPDATES:
        assert registered[name].input_arg[0].is_ref, name  # type: ignore[attr-defined]


def test_the_op_library_says_the_same_of_what_communicates() -> None:
    ours = (ops.EXCHANGES | ops.MEETINGS) - {ops.HOROVOD_ALL_REDUCE}
    assert frozenset(whale_ops.COMMUNICATING_OPS) == ours | frozenset(ops.ON_DEVICE.values())


# -- no second home

ROOT = Path(__file__).resolve().parents[2]
# What may write out ops of a trait, by path: these say something of each op.
WRITTEN_OUT = {
    "whale/ir/ops.py": "the traits",
    "whale/sharding_rules/math": "a rule's line for the ops it names",
    "whale/sharding_rules/nn": "a rule's line for the ops it names",
    "whale/sharding_rules/structure": "a rule's line for the ops it names",
    "whale/passes/normalize/loss_scaling.py": "the operands with which each op changes nothing",
    "whale/passes/normalize/folding/arithmetic.py": "what to compute for each op",
    "whale/passes/normalize/folding/shapes.py": "the shape of each op's result",
    "whale/kernels/loops": "what an operation of a loop's turn is in the fused one",
    "whale/runtime/variables/initializer_recording.py": "the stateless twin of each op",
    "whale/frontends/epl/batch_scaling.py": "how the result of each op grows with the batch",
    "whale/tools/profile/operations.py": "the operands and results of each op that are images",
    "cost_model/kernels/op_work.py": "the formula of each op",
}
LEAST = 3  # names of one trait that make a table of it


def written_out(source: str) -> Iterator[tuple[int, str, set[str]]]:
    """(line, trait, names) where a literal lists ops of a trait: a collection, its keys, or words to be split."""
    for node in ast.walk(ast.parse(source)):
        items: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            items = node.elts
        elif isinstance(node, ast.Dict):
            items = node.keys
        words = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            if not all(re.fullmatch(r"_?[A-Z]\w+", word) for word in words):
                continue  # a sentence
        if len(words) < LEAST:
            continue
        for trait, names in TRAITS.items():
            if len(names & set(words)) >= LEAST:
                yield getattr(node, "lineno", 0), trait, names & set(words)


def test_a_trait_is_written_nowhere_else() -> None:
    found, unused = [], set(WRITTEN_OUT)
    for path in sorted(p for top in ("whale", "cost_model") for p in (ROOT / top).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        allowed = {prefix for prefix in WRITTEN_OUT if name == prefix or name.startswith(f"{prefix}/")}
        for line, trait, names in written_out(path.read_text()):
            unused -= allowed
            if not allowed:
                found.append(f"{name}:{line} lists {', '.join(sorted(names))}: use {trait}, or what it is built of")
    assert found == []
    assert unused == set(), "no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        'X = frozenset({"Identity", "StopGradient", "Snapshot"})',
        'X = ("Cast", "Identity", "StopGradient", "Snapshot")',
        'X = {"Identity": 1, "StopGradient": 1, "Snapshot": 2, **other}',
        'X = "Cast Identity StopGradient Snapshot".split()',
        'if node.op in ["Identity", "StopGradient", "Snapshot"]:\n    pass',
    ],
)
def test_tables_are_seen_however_they_are_written(source: str) -> None:
    assert {trait for _, trait, _ in written_out(source)} == {"IDENTITIES", "VIEWS", "ALIASES"}


def test_what_is_no_table_is_left_alone() -> None:
    assert not list(written_out('X = {"Identity", "StopGradient"} | SOMETHING'))
    assert not list(written_out('"""Identity StopGradient and Snapshot hand their operand on."""'))
