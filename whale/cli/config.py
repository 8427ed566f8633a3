"""Implements `whale config`: writes a file of configuration keys, or shows each key's value and source."""

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

# The keys that users most often set; other keys can be added to the file by hand.
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
    """Adds `whale config` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "config",
        help="write a file of settings by a few questions, or show what is set",
        description="Asks a few questions and writes a file for `whale run --config FILE`; with --from: translates a "
        "configuration file of DeepSpeed; with show: prints every key with its value and where the value comes from.",
    )
    verb.add_argument("what", nargs="?", choices=("show",), help="print all keys, values and sources")
    verb.add_argument("-o", dest="out", default=FILE, metavar="FILE", help=f"the file, YAML (default {FILE})")
    verb.add_argument(
        "--from",
        dest="foreign",
        metavar="FILE",
        help="ask nothing: translate DeepSpeed's ds_config.json to keys of Whale",
    )
    add_settings(verb)
    verb.set_defaults(call=run_command, wrong=verb.error)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale config`; returns 1 if the user declines to replace an existing file, else 0."""
    if given.what == "show":
        if given.foreign:
            given.wrong("--from writes a file and cannot be combined with show; use `whale config show --config FILE`")
        print("\n".join(_list_keys(given)))
        return 0
    if given.config or given.settings:
        given.wrong("--config and --set are for `whale config show`; the questions start from the defaults")
    if not given.out.endswith((".yaml", ".yml")):
        given.wrong(f"-o {given.out}: give a file name that ends with .yaml")
    require_writable(given.out)
    translated = _translate(given.foreign) if given.foreign else None
    if os.path.exists(given.out) and _ask(f"{given.out} exists. Replace it? [no]: ").lower() not in ("y", "yes"):
        print(f"nothing was written; {given.out} is unchanged")
        return 1
    answers = _ask_all() if translated is None else translated.keys
    with open(given.out, "w") as file:
        file.write(_format_file(answers))
    if translated is not None:
        print("\n".join(_list_translated(translated)))
    print(f"\nwritten: {given.out}; `whale run -np 2 --config {given.out} train.py` runs with it")
    return 0


def _translate(path: str) -> Translation:
    """Reads a configuration file of DeepSpeed and translates it to keys of Whale.

    Raises:
        PlanError: the file cannot be read.
        ConfigError: the file is no configuration of DeepSpeed, or a translated value is not allowed for its key.
    """
    from whale.config import deepspeed
    from whale.config.reading import Config, read_file

    require_readable(path)
    fields = read_file(path)
    if not deepspeed.is_deepspeed(fields):
        raise ConfigError(
            "no name in the file is a field of DeepSpeed's configuration",
            given=f"{path}: {', '.join(fields) or 'nothing'}",
            expected="a ds_config.json; files of other launchers cannot be translated",
            action="answer the questions of `whale config`, or write a line `memory.zero: 2` for each key by hand",
        )
    found = deepspeed.translate(fields)
    Config(found.keys, environment={})
    return found


def _list_translated(found: Translation) -> list[str]:
    """Formats a line for each key with the DeepSpeed field it comes from, then a note for each field that has no
    key.
    """
    width = max(60, shutil.get_terminal_size().columns)
    lines = [f"  {f'{key}: {_format_value(value)}':38}{found.sources[key]}" for key, value in found.keys.items()]
    if found.notes:
        lines += ["", "Fields without a key:"]
    for name, note in found.notes.items():
        lines += wrap(f"{name}: {note}", width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _list_keys(given: argparse.Namespace) -> list[str]:
    """Formats a line for each key: its name, where its value comes from, and the value."""
    config = take_settings(given.config, given.settings)
    width = max(60, shutil.get_terminal_size().columns)
    lines = [f"{'key':31}{'source':14}value"]
    for name in config:
        source = config.origin(name).partition(" ")[0].replace("command", "command line")
        lines += wrap(f"{name:31}{source:14}{_format_value(config[name])}", width, subsequent_indent=" " * 45)
    files = {config.origin(name) for name in config if config.origin(name).startswith("file ")}
    return [*lines, *(f"\n{file}" for file in files)]


def _format_value(value: Any) -> str:
    """Formats a value in the form that the command line accepts; an empty value as the word "empty"."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return str(value) or "empty"


def _ask_all() -> dict[str, Any]:
    """Asks every question of `QUESTIONS`; returns the answers that differ from the default, by key."""
    from whale.config.keys import KEYS
    from whale.config.reading import read_value

    keys = {key.name: key for key in KEYS}
    width = max(60, shutil.get_terminal_size().columns)
    print("Press Enter to keep the value in brackets.")
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
    """Asks a question on the terminal; returns the answer without surrounding space.

    Raises:
        ConfigError: standard input has ended.
    """
    try:
        return input(question).strip()
    except EOFError:
        raise ConfigError(
            "`whale config` asks questions, but standard input has ended",
            given="the end of standard input",
            expected="an answer, or an empty line, for each question",
            action="call `whale config` on a terminal, or write the file by hand: a line `memory.zero: 2` for each key",
        ) from None


def _format_file(answers: dict[str, Any]) -> str:
    """Formats the file's text: each key that is set, below a comment that explains it."""
    from whale.config.keys import KEYS

    lines = ["# Keys of Whale, for `whale run --config FILE`; `whale config show --config FILE` lists all of them."]
    for key in KEYS:
        if key.name in answers:
            about = wrap(key.help[0].upper() + key.help[1:] + ".", 100)
            lines += ["", *(f"# {line}" for line in about), f"{key.name}: {json.dumps(answers[key.name])}"]
    return "\n".join(lines) + "\n"
