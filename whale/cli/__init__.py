"""Implements the command ``whale``: a verb parses its arguments and calls the part that does the work.

A file per verb, but for those that read a saved plan (show, explain, diff, check, trace, html): they are in ``show``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import whale
from whale.cli import (
    cluster,
    completion,
    config,
    doctor,
    plan,
    profile,
    run,
    show,
    simulate,
    top,
    why,
)
from whale.cli.given import Parser
from whale.errors import WhaleError, no_tensorflow
from whale.log import set_level

VERBS = (
    run,
    plan,
    show,
    profile,
    simulate,
    cluster,
    config,
    doctor,
    top,
    why,
    completion,
)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    top = Parser(
        prog="whale",
        description="Runs a training program written for one device over many unequal ones.",
    )
    top.add_argument("--version", action="version", version=f"whale {whale.__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns the exit code: that of the verb, 2 for a mistake that Whale explains, 130 after Ctrl-C."""
    options = make_parser().parse_args(arguments)
    # Ranks have GPUs by number: that of nvidia-smi, and of cluster files that are written by it, not CUDA's own order,
    # which begins with the fastest.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if getattr(options, "verbose", False):
        set_level("debug")
    try:
        code = int(options.call(options))
        sys.stdout.flush()  # here, where it is known what to do if nobody reads it
        return code
    except WhaleError as error:
        print(f"whale {options.verb}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        if missing.name != "tensorflow":
            raise
        print(f"whale {options.verb}: {no_tensorflow(f'whale {options.verb}')}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads what this would still say
        return 141
    except OSError as error:
        print(f"whale {options.verb}: a file cannot be used: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
