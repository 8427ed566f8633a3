"""Implements `whale config`: asks a few questions and writes a file of keys, or shows each key's value and source."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from whale.cli.given import add_settings, require_readable, require_writable, take_settings
from whale.errors import ConfigError

if TYPE_CHECKING:
    from whale.config.deepspeed import Translation

# What a run's user decides first; every other key is one line more in the file.
QUESTIONS = (
    "mesh.auto_parallel",
    "batch.mode",
    "memory.zero",
    "memory.recompute",
    "precision.compute_dtype",
    "pipeline.micro_batches",
    "fault.elastic",
)
FILE = "whale.yaml"
_WORDS = {"bool": {"y": "true", "yes": "true", "n": "false", "no": "false"}}  # what people answer -> a value's text


def add_parser(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser(
        "config",
        help="write a file of settings by a few questions, or show what is set",
        description="Asks a few questions and writes a file for `whale run --config FILE`; with --from: writes what a "
        "configuration of DeepSpeed's says; with show: prints every key with its value and where that comes from.",
    )
    verb.add_argument("what", nargs="?", choices=("show",), help="print all keys, values and sources")
    verb.add_argument("-o", dest="out", default=FILE, metavar="FILE", help=f"the file, YAML (default {FILE})")
    verb.add_argument(
        "--from",
        dest="foreign",
        metavar="FILE",
        help="ask nothing: write the keys that DeepSpeed's ds_config.json stands for",
    )
    add_settings(verb)
    verb.set_defaults(call=run_command, wrong=verb.error)


def run_command(given: argparse.Namespace) -> int:
    """Runs the verb."""
    if given.what == "show":
        if given.foreign:
            given.wrong("--from writes a file; `whale config show --config FILE` then shows what it has")
        print("\n".join(_list_keys(given)))
        return 0
    if given.config or given.settings:
        given.wrong("--config and --set are for `whale config show`; the questions begin at the defaults")
    if not given.out.endswith((".yaml", ".yml")):
        given.wrong(f"the file's name ends with .yaml: -o {given.out}")
    require_writable(given.out)
    translated = _translate(given.foreign) if given.foreign else None
    if os.path.exists(given.out) and _ask(f"{given.out} exists. Replace it? [no]: ").lower() not in ("y", "yes"):
        print("nothing is written")
        return 1
    answers = _ask_all() if translated is None else translated.keys
    with open(given.out, "w") as file:
        file.write(_format_file(answers))
    if translated is not None:
        print("\n".join(_list_translated(translated)))
    print(f"\nwritten: {given.out}; `whale run -np 2 --config {given.out} train.py` runs with it")
    return 0


def _translate(path: str) -> Translation:
    """Reads a configuration of DeepSpeed's.

    Raises:
        PlanError: the file cannot be read.
        ConfigError: it is none of DeepSpeed's, or a value is none that a key may have.
    """
    from whale.config import deepspeed
    from whale.config.reading import Config, read_file

    require_readable(path)
    fields = read_file(path)
    if not deepspeed.is_deepspeed(fields):
        raise ConfigError(
            "no name in the file is a field of DeepSpeed's configuration",
            given=f"{path}: {', '.join(fields) or 'nothing'}",
            expected="a ds_config.json; other launchers' files are not read",
            action="answer the questions of `whale config`, or write a line `memory.zero: 2` for each key by hand",
        )
    found = deepspeed.translate(fields)
    Config(found.keys, environment={})
    return found


def _list_translated(found: Translation) -> list[str]:
    """Returns a line for each key and the field that it comes from, then for each other field what says it here."""
    width = max(60, shutil.get_terminal_size().columns)
    lines = [f"  {f'{key}: {_format_value(value)}':38}{found.sources[key]}" for key, value in found.keys.items()]
    if found.notes:
        lines += ["", "What no key says:"]
    for name, note in found.notes.items():
        lines += wrap(f"{name}: {note}", width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _list_keys(given: argparse.Namespace) -> list[str]:
    """Returns a line for each key: its name, the kind of its source, its value."""
    config = take_settings(given.config, given.settings)
    width = max(60, shutil.get_terminal_size().columns)
    lines = [f"{'key':31}{'source':14}value"]
    for name in config:
        source = config.origin(name).partition(" ")[0].replace("command", "command line")
        lines += wrap(f"{name:31}{source:14}{_format_value(config[name])}", width, subsequent_indent=" " * 45)
    files = {config.origin(name) for name in config if config.origin(name).startswith("file ")}
    return [*lines, *(f"\n{file}" for file in files)]


def _format_value(value: Any) -> str:
    """Formats a value as the command line takes it; an empty one as a person sees it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return str(value) or "empty"


def _ask_all() -> dict[str, Any]:
    """Asks every question; returns the answers that are no defaults."""
    from whale.config.keys import KEYS
    from whale.config.reading import read_value

    keys = {key.name: key for key in KEYS}
    width = max(60, shutil.get_terminal_size().columns)
    print("Enter alone keeps what stands in brackets.")
    found: dict[str, Any] = {}
    for name in QUESTIONS:
        key = keys[name]
        print("\n" + "\n".join(wrap(key.help[0].upper() + key.help[1:] + ".", width)))
        if key.choices:
            print(f"  one of: {', '.join(choice or 'empty' for choice in key.choices)}")
        while True:
            text = _ask(f"{name} [{_format_value(key.default)}]: ")
            text = _WORDS[key.type].get(text.lower(), text) if key.type in _WORDS else text
            try:
                value = key.default if not text else read_value(name, "" if text == "empty" else text)
                break
            except ConfigError as error:
                print(f"  {error.message}: expected {error.facts.get('expected', '')}")
        if value != key.default:
            found[name] = value
    return found


def _ask(question: str) -> str:
    """Returns the answer to a question, without space around.

    Raises:
        ConfigError: there is nobody to answer.
    """
    try:
        return input(question).strip()
    except EOFError:
        raise ConfigError(
            "nobody answers",
            given="the end of the input",
            expected="an answer, or an empty line, for each question",
            action="call `whale config` on a terminal, or write the file by hand: a line `memory.zero: 2` for each key",
        ) from None


def _format_file(answers: dict[str, Any]) -> str:
    """Returns the file's text: each key that is set below what it means."""
    from whale.config.keys import KEYS

    lines = ["# Keys of Whale, for `whale run --config FILE`; `whale config show --config FILE` lists all of them."]
    for key in KEYS:
        if key.name in answers:
            about = wrap(key.help[0].upper() + key.help[1:] + ".", 100)
            lines += ["", *(f"# {line}" for line in about), f"{key.name}: {json.dumps(answers[key.name])}"]
    return "\n".join(lines) + "\n"
