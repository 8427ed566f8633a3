"""Captures programs of well-known models from their hyper-parameters, without allocating anything."""

from whale.runtime.described.families import FAMILIES, Description, read
from whale.runtime.described.program import program_of, traced

__all__ = ["FAMILIES", "Description", "program_of", "read", "traced"]
