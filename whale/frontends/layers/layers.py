"""Lists the names of ``wh.layers``: layers for giant models, which enter ``wh.split`` themselves during a run."""

from whale.frontends.layers.embedding import Embedding as Embedding
from whale.frontends.layers.embedding import hot_ids as hot_ids
from whale.frontends.layers.mixture_of_experts import MoE as MoE
