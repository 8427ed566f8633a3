"""Implements `whale completion`: prints a script with which a shell completes verbs, options and files."""

from __future__ import annotations

import argparse
from typing import Any

_BASH = """\
# source <(whale completion bash), for example in ~/.bashrc
_whale() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} names
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case $verb in
{cases}
  esac
  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$names" -- "$word")); fi
}}
complete -o default -F _whale whale
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_parser(verbs: Any) -> None:
    """Adds `whale completion` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "completion",
        help="print a script that completes the command in a shell",
        description="Prints a script for the shell: source <(whale completion bash), or zsh.",
    )
    verb.add_argument("shell", choices=("bash", "zsh"))
    verb.set_defaults(call=lambda given: run_command(given, verbs.choices))


def run_command(given: argparse.Namespace, verbs: dict[str, argparse.ArgumentParser]) -> int:
    """Runs `whale completion`; returns the exit code.

    Args:
        verbs: the parser of each verb, by name, whose options are completed.
    """
    cases = []
    for name, verb in verbs.items():
        options = [option for action in verb._actions for option in action.option_strings]
        cases.append(f'    {name}) names="{" ".join(options)}" ;;')
    script = _BASH.format(verbs=" ".join(verbs), cases="\n".join(cases))
    print((_ZSH if given.shell == "zsh" else "") + script, end="")
    return 0
