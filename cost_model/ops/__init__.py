"""What one operation of a captured program does, from its shapes: FLOPs, bytes of memory, kernels."""

from .contraction import matmul_flops
from .loops import executions
from .work import Work, covered, program_work, work

__all__ = ["Work", "covered", "executions", "matmul_flops", "program_work", "work"]
