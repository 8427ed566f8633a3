"""Defines sharding rules of random ops.

By default a program has one random stream: every rank draws all of it, or the first rank draws and sends it. On request
each rank draws its own rows from a stream of its own. Its seed is the program's seed plus the rank times a large odd
number (the golden ratio's fraction, Knuth, TAOCP vol. 3, section 6.4), so that the streams of programs with seeds 0, 1,
2, ... do not coincide. Rank 0 uses the program's seed.

Decision: 0019.
"""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import find_numpy_dtype
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.notation import FIRST_RANK, REPLICATED
from whale.sharding_rules.registry import rule

_GOLDEN = {32: 0x9E3779B1, 64: 0x9E3779B97F4A7C15}


def random_op(op: OpView) -> str:
    """Writes the sharding rule of a random op: replicated with a seed, as all ranks draw alike, else first rank."""
    return REPLICATED if op.attr("seed", 0) or op.attr("seed2", 0) else FIRST_RANK


def set_rank_seed(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Gives each rank another ``seed2`` attribute; an op without seeds draws differently on each rank anyway."""
    seeds = op.attr("seed", 0), op.attr("seed2", 0)
    if not _is_divided(strategy) or coordinate == 0 or seeds == (0, 0):
        return UNCHANGED
    return Local(seeds={"seed2": coordinate * _GOLDEN[32]})


def set_rank_key(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Gives each rank another seed or key operand."""
    if not _is_divided(strategy) or coordinate == 0:
        return UNCHANGED
    dtype = np.dtype(find_numpy_dtype(op.inputs[1].dtype))
    bits = 8 * dtype.itemsize
    moved = np.array((coordinate * _GOLDEN[bits]) % (1 << bits), f"uint{bits}").astype(dtype)
    return Local(added={1: moved})


def _is_divided(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) for p in strategy.outputs)


RULES = (
    rule(
        "RandomUniform RandomStandardNormal TruncatedNormal",
        random_op,
        local=set_rank_seed,
        local_stream="[out0] -> p*",
    ),
    rule("RandomUniformInt", random_op, local=set_rank_seed, local_stream="[out0], ., . -> p*"),
    rule(
        "ParameterizedTruncatedNormal RandomShuffle RandomGamma RandomPoisson RandomPoissonV2 RandomCrop Multinomial "
        "UniformCandidateSampler AllCandidateSampler "
        "LogUniformCandidateSampler LearnedUnigramCandidateSampler FixedUnigramCandidateSampler "
        "ThreadUnsafeUnigramCandidateSampler SampleDistortedBoundingBox SampleDistortedBoundingBoxV2",
        random_op,
    ),
    # The state is a variable, which all ranks hold and advance alike.
    rule(
        "StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormal StatefulStandardNormalV2 "
        "StatefulTruncatedNormal StatefulRandomBinomial RngSkip RngReadAndSkip",
        REPLICATED,
    ),
    rule("StatelessRandomGetAlg StatelessRandomGetKeyCounter", REPLICATED),
    rule(
        "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformFullInt",
        REPLICATED,
        local=set_rank_key,
        local_stream="[out0], k^ -> p*",
    ),
    rule("StatelessRandomUniformInt", REPLICATED, local=set_rank_key, local_stream="[out0], k^, ., . -> p*"),
    rule(
        "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessRandomUniformFullIntV2",
        REPLICATED,
        local=set_rank_key,
        local_stream="[out0], k^, c^, . -> p*",
    ),
    rule("StatelessRandomUniformIntV2", REPLICATED, local=set_rank_key, local_stream="[out0], k^, c^, ., ., . -> p*"),
)
