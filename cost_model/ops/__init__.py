"""What one operation of a captured program does, from its shapes: FLOPs, bytes of memory, kernels."""

from cost_model.ops.contraction import matmul_flops
from cost_model.ops.loops import executions
from cost_model.ops.work import Work, covered, program_work, work

__all__ = ["Work", "covered", "executions", "matmul_flops", "program_work", "work"]
