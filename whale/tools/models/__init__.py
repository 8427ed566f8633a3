"""Captures programs of well-known models from their hyper-parameters, without allocating weights."""

from whale.tools.models.capture import capture_program, trace_program
from whale.tools.models.families import FAMILIES, Description, read_description

__all__ = ["FAMILIES", "Description", "capture_program", "read_description", "trace_program"]
