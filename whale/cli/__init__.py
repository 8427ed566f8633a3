"""Implements the command ``whale``: each verb parses its arguments and calls the module that does the work.

Each verb has a file, except those that read a saved plan (show, explain, diff, check, trace, html), which are in
``show``. A verb's module has `add_parser`, which declares its options, and `run_command`, which returns the exit code.
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
    """Returns the argument parser of the command with all its verbs."""
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
    """Runs one verb of the command ``whale``.

    Args:
        arguments: the command line without the command's name; None: that of this process.

    Returns:
        the exit code: that of the verb, 2 for a mistake that Whale explains, 130 after Ctrl-C, 141 if the reader of the
        output has gone.
    """
    options = make_parser().parse_args(arguments)
    # Ranks get GPUs by the numbers of nvidia-smi, as cluster files do; CUDA's own order begins with the fastest GPU.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if getattr(options, "verbose", False):
        set_level("debug")
    try:
        code = int(options.call(options))
        sys.stdout.flush()  # so that a closed pipe raises here, where it is handled
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: discard what is still buffered
        return 141
    except OSError as error:
        print(
            f"whale {options.verb}: a file cannot be used: {error}\n"
            "  next: check the path, its permissions and the disk",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
