"""What one operation of a captured program does, from its shapes: FLOPs, bytes of memory, kernels."""

from .contraction import matmul_flops
from .work import Work, covered, program_work, work

__all__ = ["Work", "covered", "matmul_flops", "program_work", "work"]
