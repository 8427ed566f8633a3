"""Replaces operations of ranks' programs by faster ones, as far as the settings say so."""

from __future__ import annotations

from whale.ir.program import Program
from whale.kernels.elementwise.fuse import fuse_elementwise
from whale.kernels.matmuls.batches import batches_as_products
from whale.kernels.matmuls.convolutions import convolutions_as_products
from whale.kernels.matmuls.einsums import einsums_by_own_kernel
from whale.kernels.matmuls.padding import with_padding
from whale.kernels.nn import with_own_kernels
from whale.kernels.updates.fuse import fuse_updates
from whale.passes.settings import PlanSettings


def substitute_kernels(ranks: list[Program], settings: PlanSettings) -> list[Program]:
    """Puts faster operations in place of others in ranks' programs, as far as the settings say so."""
    fuse = settings.fuse
    if fuse.convolutions:
        ranks = list(map(convolutions_as_products, ranks))
    if fuse.products:
        ranks = list(map(batches_as_products, ranks))
    if fuse.einsums:
        ranks = list(map(einsums_by_own_kernel, ranks))
    if fuse.padding:
        ranks = list(map(with_padding, ranks))
    if fuse.nn:
        ranks = list(map(with_own_kernels, ranks))
    if fuse.updates:
        ranks = list(map(fuse_updates, ranks))
    return list(map(fuse_elementwise, ranks)) if fuse.elementwise else ranks
