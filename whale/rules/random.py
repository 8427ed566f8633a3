"""Random ops: one stream for the whole program, so every rank draws all of it, or the first rank draws and sends."""

from __future__ import annotations

from whale.rules.base import OpView
from whale.rules.notation import OWNER, REPLICATED
from whale.rules.registry import rule


def seeded(op: OpView) -> str:
    """whether there is a seed: then all ranks draw the same"""
    return REPLICATED if op.attr("seed", 0) or op.attr("seed2", 0) else OWNER


RULES = (
    rule(
        "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal ParameterizedTruncatedNormal "
        "RandomShuffle "
        "RandomGamma RandomPoisson RandomPoissonV2 RandomCrop Multinomial UniformCandidateSampler AllCandidateSampler "
        "LogUniformCandidateSampler LearnedUnigramCandidateSampler FixedUnigramCandidateSampler "
        "ThreadUnsafeUnigramCandidateSampler SampleDistortedBoundingBox SampleDistortedBoundingBoxV2",
        seeded,
    ),
    # The state is a variable, which all ranks hold and advance alike.
    rule(
        "StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormal StatefulStandardNormalV2 "
        "StatefulTruncatedNormal StatefulRandomBinomial RngSkip RngReadAndSkip",
        REPLICATED,
    ),
    rule("StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomUniformV2", REPLICATED),
)
