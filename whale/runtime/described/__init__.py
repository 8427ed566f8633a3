"""Captures programs of well-known models from their hyper-parameters, without allocating anything."""

from whale.runtime.described.families import FAMILIES, Description, read_description
from whale.runtime.described.program import capture_program, trace_program

__all__ = ["FAMILIES", "Description", "capture_program", "read_description", "trace_program"]
