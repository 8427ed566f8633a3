"""Names the layers of giant models, which enter ``wh.split`` themselves during a run: ``wh.layers``."""

from whale.frontends.layers.mixture_of_experts import MoE as MoE
