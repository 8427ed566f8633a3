"""Checks the arguments of verbs before anything slow is imported: numbers, files to read, files to write."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from whale.errors import PlanError, find_similar
from whale.quiet import STARTUP

if TYPE_CHECKING:
    from whale.config import Config

_CONTRADICTIONS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, AssertionError, RecursionError)

_FILTER = (
    "import re, sys\n"
    "for line in sys.stdin.buffer:\n"
    "    if not re.search(sys.argv[1].encode(), line): sys.stdout.buffer.write(line); sys.stdout.buffer.flush()"
)
_END_S = 5.0


class Parser(argparse.ArgumentParser):
    """Parses arguments; a mistake ends the process with exit code 2 and one sentence that says what to do next.

    Attributes:
        others_options: {option of another launcher: what to write instead}, for errors.
    """

    others_options: Mapping[str, str] = MappingProxyType({})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; an unknown option ends the process with an error that names the most similar known one.

        Each verb's parser refuses unknown options itself, so that the error names the verb (`whale run`).
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = {option.lstrip("-"): option for action in self._actions for option in action.option_strings}
            given = unknown[0].partition("=")[0]
            near = options.get(find_similar(given.lstrip("-"), options)) if given.startswith("-") else None
            what = self.others_options.get(given) or (near and f"write {near}, if that is meant")
            if what is None:
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
            text = f"{self.prog}: there is no option {given}\n  next: {what}"
            self.exit(2, f"{text}; see `{self.prog} --help`\n")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Prints an error and ends the process with exit code 2; argparse calls it."""
        self.exit(2, f"{self.prog}: {message}\n  next: see `{self.prog} --help`\n")


def parse_positive(text: str) -> int:
    """Parses a whole number above 0, as `type=` of an argparse option."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def parse_seconds(text: str) -> float:
    """Parses a number of seconds above 0, as `type=` of an argparse option."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def parse_amount(text: str) -> float:
    """Parses a finite number above 0, as `type=` of an argparse option."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found


def require_readable(*paths: object) -> None:
    """Checks that each path is a readable file; None and "local" (this machine) are skipped.

    Raises:
        PlanError: names the first path that cannot be read, and why.
    """
    for path in paths:
        if path is None or path == "local":  # --cluster local is this machine
            continue
        try:
            with open(str(path), "rb") as file:
                file.read(1)
        except OSError as error:
            raise PlanError(
                "a file cannot be read",
                given=path,
                reason=error.strerror,
                looked_in=os.getcwd(),
                expected="the path of a file",
                action="correct the path",
            ) from error


def require_writable(path: object, option: str = "-o") -> None:
    """Checks that a file can be written at a path, before the work whose result goes there; None is skipped.

    Args:
        option: the option that gave the path, for the error.

    Raises:
        PlanError: says why nothing can be written there.
    """
    if path is None:
        return
    text = os.path.abspath(str(path))
    folder = os.path.dirname(text)
    reason = ""
    if os.path.isdir(text):
        reason = "this is a folder"
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder}"
    elif not os.access(text if os.path.exists(text) else folder, os.W_OK):
        reason = "no permission"
    if reason:
        raise PlanError(
            "the result cannot be written there",
            given=f"{option} {path}",
            reason=reason,
            expected="a file in a folder that exists and is writable",
            action=f"correct {option}, or create the folder",
        )


def add_settings(verb: argparse.ArgumentParser) -> None:
    """Adds the options --config and --set to a verb; `take_settings` evaluates them."""
    add_config(verb)
    verb.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the configuration, such as memory.zero=2 or zero=2, over what the script says; may be repeated",
    )


def add_config(verb: argparse.ArgumentParser) -> None:
    """Adds the option --config to a verb; `take_settings` evaluates it."""
    verb.add_argument(
        "--config", metavar="FILE", help="a file of keys of the configuration (YAML or JSON), as `whale config` writes"
    )


def take_settings(config: str | None, settings: Sequence[str]) -> Config:
    """Exports --config and --set as environment variables for this process and its children, and checks the
    configuration.

    Args:
        config: path of --config; None: not given.
        settings: the texts KEY=VALUE of --set.

    Raises:
        PlanError: the file cannot be read.
        ConfigError: a key or a value is wrong, on the command line, in the file or in the environment.
    """
    from whale.config.reading import FILE_VARIABLE, SETTINGS_VARIABLE, Config, read_settings

    require_readable(config)
    if config is not None:
        os.environ[FILE_VARIABLE] = os.path.abspath(config)
    os.environ.pop(SETTINGS_VARIABLE, None)  # it may be set if this command is called from a script of `whale run`
    if settings:
        os.environ[SETTINGS_VARIABLE] = json.dumps(read_settings(settings))
    return Config()


@contextmanager
def hide_startup_lines(verbose: bool = False) -> Iterator[None]:
    """Filters TensorFlow's start-up lines out of this process's stderr inside the context, also those of native code.

    A child process filters, so that the last lines are not lost however this process ends.

    Args:
        verbose: do not filter.
    """
    if verbose:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER, STARTUP.decode()]
    # In a session of its own the filter survives Ctrl-C, and passes on what this process prints then.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=kept, start_new_session=True)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass  # a child process that was started inside still holds the pipe


@contextmanager
def show_progress(what: str, every_s: float = 1.0) -> Iterator[Callable[[], None]]:
    """Shows "what ... N s" on the terminal while the context runs, and removes that line at its end.

    Nothing is shown if stderr is no terminal.

    Yields:
        a function that removes the line early, to be called before anything is printed.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    over, start_s = threading.Event(), time.monotonic()
    terminal = os.dup(2)  # stderr may be redirected inside

    def tell() -> None:
        text = f"{what} ..."
        while True:
            os.write(terminal, f"\r\x1b[K{text}".encode())
            if over.wait(every_s):
                os.write(terminal, b"\r\x1b[K")
                return
            text = f"{what} ... {time.monotonic() - start_s:.0f} s"

    thread = threading.Thread(target=tell, name="whale status", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    try:
        yield end
    finally:
        end()
        os.close(terminal)


@contextmanager
def refuse_inconsistent(*paths: object) -> Iterator[None]:
    """Turns an unexpected error inside the context into a PlanError about the given files.

    A file may be valid field by field, yet its parts may contradict each other; then any error may come up later.

    Raises:
        PlanError: an error was raised inside that is none of Whale's.
    """
    try:
        yield
    except (*_CONTRADICTIONS, MemoryError, StopIteration) as error:
        raise PlanError(
            "the parts of a file contradict each other",
            given=", ".join(str(path) for path in paths if path),
            reason=f"{type(error).__name__}: {error}",
            expected="files as Whale's tools write them",
            action="create the file again; if it is unchanged since Whale wrote it, please report this error",
        ) from error
